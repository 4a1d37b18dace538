"""Packed rows as one device holds them: what models, drafts and losses ask of the layout they train under.

`PackedRows()` is one device with whole rows. Otherwise the code runs inside a `shard_map` over `axes`: rows are split
over `row_axes`, the tokens of each row over the context axis, in the order of a layout (`to_ranks`). The same code then
serves both: attention goes round the ring, looking ahead exchanges halos, totals are summed over devices. Nothing that
is computed depends on the number of ranks, up to the order of float32 sums.

Letters: R rows and L tokens of this device, C ranks, N = C L, p pieces of w tokens each of a rank, n tokens of reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from draftco_jax.context_parallel.branch import Trunk, TrunkMode, branch_attention, ring_attention, share_trunk
from draftco_jax.context_parallel.layouts import Split, Striped, Zigzag, from_ranks
from draftco_jax.context_parallel.ring import RingSpec
from draftco_jax.context_parallel.zigzag import anchor_range, causal_range, rank_of, with_halo
from pallas_kernels.block_attention import IMPLEMENTATIONS as BLOCK_IMPLEMENTATIONS
from pallas_kernels.block_attention import KeyRange
from pallas_kernels.branch_attention import IMPLEMENTATIONS as BRANCH_IMPLEMENTATIONS
from pallas_kernels.branch_attention import Branch, Rule
from pallas_kernels.manual_axes import cast

Tree = TypeVar("Tree")


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """How packed rows are spread over devices, and how attention over them runs."""

    ranks: int = 1
    """C, the size of the context axis."""
    context_axis: str | None = None
    """Its name; None: every device holds whole rows."""
    row_axes: tuple[str, ...] = ()
    """Mesh axes that rows are split over."""
    stripe: int | None = None
    """Tokens of a stripe of the striped layout; None: zigzag. `pick_layout` says what balances better."""
    implementation: str = "blockwise"
    """Of the block op, and of the branch op unless that has its own."""
    branch_implementation: str | None = None
    """Of the branch op; None: the same."""
    tile: int = 256
    """Queries and keys that "blockwise" handles at a time; kernels for GPUs go by their own tuning."""
    unroll: int = 1
    """Ring steps in one loop body."""
    trunk_mode: TrunkMode = "replay"
    """How a trunk is served that is read more than once; `pick_trunk_mode` says what fits."""
    tensor_axis: str | None = None
    """Mesh axis that heads and hidden widths of the weights are split over; tokens are the same on all its ranks."""
    expert_axis: str | tuple[str, ...] | None = None
    """Mesh axis that the experts of a mixture are split over, or several, major first: of `axes` and `tensor_axis`."""

    def __post_init__(self) -> None:
        """Refuse what no ring could run with."""
        for name in ("ranks", "tile", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave it out for the default")
        if self.stripe is not None and self.stripe < 1:
            raise ValueError(f"stripe={self.stripe} must be >= 1; use none for zigzag")
        for name, known in (
            ("implementation", BLOCK_IMPLEMENTATIONS),
            ("branch_implementation", BRANCH_IMPLEMENTATIONS),
        ):
            if (value := getattr(self, name)) is not None and value not in known:
                raise ValueError(f"{name}={value!r} must be one of {sorted(known)}; use 'blockwise' on a CPU")
        if self.trunk_mode not in get_args(TrunkMode):
            raise ValueError(f"trunk_mode={self.trunk_mode!r} must be one of {get_args(TrunkMode)}; 'replay' is usual")
        if self.ranks > 1 and self.context_axis is None:
            raise ValueError(
                f"context_axis=None must name a mesh axis where ranks={self.ranks} > 1; 'context' is usual"
            )
        self._check_axes()

    def _check_axes(self) -> None:
        if self.context_axis in self.row_axes:
            raise ValueError(
                f"row_axes={self.row_axes} must not hold context_axis={self.context_axis!r}; give two axes"
            )
        if self.tensor_axis is not None and self.tensor_axis in self.axes:
            raise ValueError(
                f"tensor_axis={self.tensor_axis!r} must not be among {self.axes}, which tokens are split over; "
                "give another axis"
            )
        if not set(self.expert_axes) <= {*self.axes, self.tensor_axis}:
            raise ValueError(
                f"expert_axis={self.expert_axis!r} must be one of {self.axes} or tensor_axis={self.tensor_axis!r}; "
                "add it to row_axes"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that what a device holds differs over."""
        return self.row_axes + (() if self.context_axis is None else (self.context_axis,))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """All mesh axes that a device's data or weights differ over."""
        return self.axes + (() if self.tensor_axis is None else (self.tensor_axis,))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes that experts are split over."""
        if self.expert_axis is None:
            return ()
        return (self.expert_axis,) if isinstance(self.expert_axis, str) else self.expert_axis

    # ---- places ----

    def row_layout(self, tokens: int) -> Split:
        """Layout of rows of so many tokens; refused where the ranks cannot share them."""
        if self.ranks == 1:  # one piece, so that any length will do
            return Striped(ranks=1, tokens=tokens, stripe=tokens)
        if self.stripe is None:
            return Zigzag(ranks=self.ranks, tokens=tokens)
        return Striped(ranks=self.ranks, tokens=tokens, stripe=self.stripe)

    def layout(self, local_tokens: int) -> Split:
        """Layout of rows of which a device holds so many tokens."""
        return self.row_layout(self.ranks * local_tokens)

    def index(self, local_tokens: int) -> Int32[Array, " L"]:
        """Place of this device's tokens in whole rows."""
        return self.layout(local_tokens).index(rank_of(self.context_axis))

    def whole(self, x: Shaped[Array, "R L *rest"]) -> Shaped[Array, "R N *rest"]:
        """Whole rows in their natural order: for what decides over a row (4 bytes a token), never for states."""
        if self.context_axis is None:
            return x
        return from_ranks(lax.all_gather(x, self.context_axis, axis=1, tiled=True), self.layout(x.shape[1]))

    def local(self, x: Shaped[Array, "R N *rest"]) -> Shaped[Array, "R L *rest"]:
        """This device's tokens of whole rows."""
        return x if self.context_axis is None else x[:, self.index(x.shape[1] // self.ranks)]

    # ---- looking ahead ----

    def extend(self, tree: Tree, reach: int) -> Tree:
        """Each piece of every array [R, L, ...] followed by the next `reach` tokens of the row: [R, p, w + reach, ...].

        Zeros where the row ends. One exchange serves all shifts up to `reach` (`shifted`, `places`).
        """

        def one(x: Array) -> Array:
            if self.ranks == 1:
                return jnp.pad(x[:, None], ((0, 0), (0, 0), (0, reach)) + ((0, 0),) * (x.ndim - 2))
            return with_halo(x, reach, self.layout(x.shape[1]), self.context_axis)

        return jax.tree.map(one, tree)

    def shifted(
        self, extended: Shaped[Array, "R p e *rest"], steps: int, local_tokens: int
    ) -> Shaped[Array, "R L *rest"]:
        """y[t] = x[t + steps] of what `extend` gave, steps <= its reach."""
        width = self.layout(local_tokens).piece
        if not 0 <= steps <= extended.shape[2] - width:
            raise ValueError(f"steps={steps} must be in 0..{extended.shape[2] - width}, the reach; extend by more")
        ahead = extended[:, :, steps : steps + width]
        return ahead.reshape(ahead.shape[0], local_tokens, *ahead.shape[3:])

    def ahead(self, x: Shaped[Array, "R L *rest"], steps: int) -> Shaped[Array, "R L *rest"]:
        """y[t] = x[t + steps] in the order of the row, whatever the document; zeros where the row ends."""
        return self.shifted(self.extend(x, steps), steps, x.shape[1])

    def places(self, local: Int[Array, "*n"], reach: int, local_tokens: int) -> Int[Array, "*n"]:
        """Where these local tokens are in extended arrays whose pieces are laid one after another, [R, p * (w + n)].

        The j-th token after one, j <= reach, stands j places after it.
        """
        width = self.layout(local_tokens).piece
        return local // width * (width + reach) + local % width

    def span(self, count: int, reach: int, local_tokens: int) -> int:
        """Entries of such arrays, rows one after another, from the first of `count` neighbouring tokens to the last.

        A piece begins `reach` entries late; n tokens see (n - 1) / piece begin at most, rounded up.
        """
        begun = -(-(count - 1) // self.layout(local_tokens).piece)
        return count - 1 + begun * reach

    # ---- attention ----

    def same_document(self, segment_ids: Int32[Array, "R L"], steps: int) -> Bool[Array, "R L"]:
        """Whether t + steps lies in the document of t; False on padding."""
        return (segment_ids > 0) & (self.ahead(segment_ids, steps) == segment_ids)

    def causal(
        self,
        segment_ids: Int32[Array, "R L"],
        positions: Int32[Array, "R L"],
        *,
        window: int | None = None,
    ) -> KeyRange:
        """Each token sees its own document up to itself, at most `window` tokens; padding sees nothing."""
        return causal_range(segment_ids, positions, self.index(segment_ids.shape[1]), window=window)

    def before_anchors(
        self,
        positions: Int32[Array, "R L"],
        anchors: Int32[Array, "R A"],
        live: Bool[Array, "R A"],
        *,
        rows: int,
        window: int | None = None,
    ) -> KeyRange:
        """Each row of a block sees the document of its anchor (a local token) strictly before the anchor."""
        index = self.index(positions.shape[1]).at[anchors].get(mode="promise_in_bounds")
        starts = index - jnp.take_along_axis(positions, anchors, axis=1)
        return anchor_range(index, starts, live, rows=rows, window=window)

    def attention(
        self,
        q: Float[Array, "R L N H"],
        k: Float[Array, "R L K H"],
        v: Float[Array, "R L K H"],
        seen: KeyRange,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "R L N H"]:
        """softmax(q k^T / sqrt(H)) v over what each query sees; query head n reads key-value head n // (N / K)."""
        return ring_attention(q, k, v, seen, sinks, spec=self._ring(q))[0]

    def trunk(self, k: Float[Array, "R L K H"], v: Float[Array, "R L K H"], *, reads: int = 1) -> Trunk:
        """Keys and values that `branch_attention` reads `reads` times."""
        return share_trunk(k, v, self._ring(k), mode=self.trunk_mode if reads > 1 else "replay")

    def branch_attention(
        self, q: Float[Array, "R G n N H"], trunk: Trunk, seen: KeyRange, branch: Branch | None, *, rule: Rule = "all"
    ) -> Float[Array, "R G n N H"]:
        """One softmax over the trunk and the keys of the own branch."""
        return branch_attention(q, trunk, seen, branch, None, rule=rule, spec=self._ring(trunk.slots[0, 0], q))[0]

    def _ring(self, keys: Array, q: Array | None = None) -> RingSpec:
        width = keys.shape[-1] if q is None else q.shape[-1]
        return RingSpec(
            layout=self.layout(keys.shape[1]),
            axis=self.context_axis,
            scale=width**-0.5,
            implementation=self.implementation,
            branch_implementation=self.branch_implementation,
            tile=self.tile,
            unroll=self.unroll,
        )

    # ---- over devices ----

    def total(self, tree: Tree) -> Tree:
        """Sum over all devices, the same on each."""
        return self._over(lax.psum, self.axes, tree)

    def total_in_order(self, tree: Tree) -> Tree:
        """The same of a few numbers, added in the order of the devices: the same digits on any machines.

        A backend may add in the order in which numbers arrive. Here each device has a place of its own, and what is
        summed over devices are zeros but for one.
        """
        if not self.axes:
            return tree
        count, own = lax.axis_size(self.axes), lax.axis_index(self.axes)

        def one(x: Array) -> Array:
            x = cast(x, frozenset(self.axes))
            places = jnp.zeros_like(jnp.broadcast_to(x, (count, *x.shape))).at[own].set(x)
            return jnp.sum(lax.psum(places, self.axes), axis=0)

        return jax.tree.map(one, tree)

    def largest(self, tree: Tree) -> Tree:
        """Maximum over all devices, the same on each."""
        return self._over(lax.pmax, self.axes, tree)

    def row_total(self, tree: Tree) -> Tree:
        """Sum over the devices that share rows with this one."""
        return self._over(lax.psum, () if self.context_axis is None else (self.context_axis,), tree)

    def once_a_row(self, x: Array) -> Array:
        """What all devices of a row know counts on the first of them alone, so that a `total` counts it once."""
        return x if self.context_axis is None else jnp.where(rank_of(self.context_axis) == 0, x, jnp.zeros_like(x))

    def varying(self, tree: Tree) -> Tree:
        """The same values, typed as differing over devices: gradients are then summed once, where this is undone."""
        return jax.tree.map(lambda x: cast(x, frozenset(self.axes)), tree)

    def _over(self, reduce: Callable[..., Array], axes: tuple[str, ...], tree: Tree) -> Tree:
        if not axes:
            return tree
        return jax.tree.map(lambda x: reduce(cast(x, frozenset(axes)), axes), tree)


WHOLE_ROWS = PackedRows()
"""One device."""
