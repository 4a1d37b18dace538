"""How the tokens of a sequence are spread over the ranks of the context axis.

Zigzag: the sequence is cut into 2 C equal chunks; rank r holds chunks r and 2C-1-r. For one long document every rank
has exactly the same number of causal query-key pairs, and labels ahead cross a border only twice a rank.

Striped: stretches of `stripe` tokens are dealt out in turn. Balances packed rows of many documents, which zigzag does
not (`work.pick_layout` counts); with a stripe of one kernel tile it wastes no more tiles than zigzag. (Splitting each
document for itself balances pairs as well, but documents then need padding, and short ones fill their tiles badly.)

Either way documents may start and end anywhere: only the length of the whole row is padded, once.

Contiguous: rank r holds one stretch. The last rank then has 2 - 1/C times the mean work. For comparison only.

Letters: C ranks, N tokens of a row, L = N / C tokens of a rank, p pieces (unbroken stretches) of a rank, w tokens of a
piece, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped


@dataclass(frozen=True, kw_only=True)
class Zigzag:
    """An early and a late chunk for each rank."""

    ranks: int
    tokens: int
    """Of a row, all ranks together."""

    def __post_init__(self) -> None:
        _check_split(self.ranks, self.tokens, 2)

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank, L."""
        return self.tokens // self.ranks

    @property
    def pieces(self) -> int:
        """Unbroken stretches of a rank, p."""
        return 2

    @property
    def piece(self) -> int:
        """Tokens of one of them, w."""
        return self.tokens // (2 * self.ranks)

    def index(self, rank: Array | int) -> Int32[Array, " L"]:
        """Place in the whole sequence of each token of a rank, increasing. `rank` may be traced."""
        rank = jnp.asarray(rank, jnp.int32)
        return _places(jnp.stack([rank, 2 * self.ranks - 1 - rank]), self.piece)

    def owner(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Rank that holds each place of the sequence."""
        chunk = index // self.piece
        return jnp.minimum(chunk, 2 * self.ranks - 1 - chunk)

    def local(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Where among its rank's tokens each place of the sequence is."""
        late = (index >= self.tokens // 2).astype(index.dtype)
        return late * self.piece + index % self.piece

    def order(self) -> Int32[np.ndarray, " N"]:
        """x[order] is what the ranks hold, one after the other."""
        natural = np.arange(self.tokens, dtype=np.int32).reshape(2, self.ranks, self.piece)
        return np.stack([natural[0], natural[1, ::-1]], axis=1).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Striped:
    """Stripes dealt out in turn: rank r holds stripes r, r + C, r + 2 C, ..."""

    ranks: int
    tokens: int
    stripe: int
    """Tokens of a stripe: at least a tile of the kernel, and at least as many as labels reach ahead."""

    def __post_init__(self) -> None:
        if self.stripe < 1:
            raise ValueError(f"stripe={self.stripe} must be >= 1; the tile of the kernel is a good choice")
        _check_split(self.ranks, self.tokens, self.stripe)

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank, L."""
        return self.tokens // self.ranks

    @property
    def pieces(self) -> int:
        """Unbroken stretches of a rank, p."""
        return self.tokens // (self.ranks * self.stripe)

    @property
    def piece(self) -> int:
        """Tokens of one of them, w."""
        return self.stripe

    def index(self, rank: Array | int) -> Int32[Array, " L"]:
        """Place in the whole sequence of each token of a rank, increasing. `rank` may be traced."""
        rank = jnp.asarray(rank, jnp.int32)
        return _places(rank + self.ranks * jnp.arange(self.pieces, dtype=jnp.int32), self.piece)

    def owner(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Rank that holds each place of the sequence."""
        return index // self.stripe % self.ranks

    def local(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Where among its rank's tokens each place of the sequence is."""
        return index // (self.stripe * self.ranks) * self.stripe + index % self.stripe

    def order(self) -> Int32[np.ndarray, " N"]:
        """x[order] is what the ranks hold, one after the other."""
        natural = np.arange(self.tokens, dtype=np.int32).reshape(self.pieces, self.ranks, self.stripe)
        return natural.swapaxes(0, 1).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Contiguous:
    """One stretch a rank: what a sequential ring uses."""

    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        _check_split(self.ranks, self.tokens, 1)

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank, L."""
        return self.tokens // self.ranks

    def index(self, rank: Array | int) -> Int32[Array, " L"]:
        """Place in the whole sequence of each token of a rank, increasing. `rank` may be traced."""
        return _places(jnp.asarray(rank, jnp.int32)[None], self.local_tokens)

    def order(self) -> Int32[np.ndarray, " N"]:
        """x[order] is what the ranks hold, one after the other."""
        return np.arange(self.tokens, dtype=np.int32)


Split = Zigzag | Striped
"""What is trained with."""
Layout = Zigzag | Striped | Contiguous


def padded_tokens(tokens: int, ranks: int, per_rank: int = 2) -> int:
    """Smallest row length >= tokens that a zigzag (per_rank 2) or stripes (per_rank = stripe) can split."""
    parts = per_rank * ranks
    return max(-(-tokens // parts), 1) * parts


def pad_row(x: Shaped[Array, "R T *rest"], tokens: int, fill: float | int | bool = 0) -> Shaped[Array, "R N *rest"]:
    """Rows of `tokens` tokens; what is added at the end holds `fill` (segment id 0: padding)."""
    if x.shape[1] > tokens:
        raise ValueError(f"tokens={tokens} must be >= {x.shape[1]}, the length of the rows; raise it")
    widths = [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


def to_ranks(x: Shaped[Array, "R N *rest"], layout: Layout) -> Shaped[Array, "R N *rest"]:
    """Whole rows in the order of the ranks: to be sharded over the context axis along axis 1."""
    return _reorder(x, layout, layout.order())


def from_ranks(x: Shaped[Array, "R N *rest"], layout: Layout) -> Shaped[Array, "R N *rest"]:
    """The inverse of `to_ranks`, exactly."""
    return _reorder(x, layout, np.argsort(layout.order()).astype(np.int32))


def _reorder(x: Array, layout: Layout, order: Int32[np.ndarray, " N"]) -> Array:
    if x.shape[1] != layout.tokens:
        raise ValueError(f"x={x.shape} must have {layout.tokens} tokens along axis 1; pad it with pad_row")
    return jnp.take(x, order, axis=1, unique_indices=True, mode="clip")


def _places(pieces: Int32[Array, " p"], width: int) -> Int32[Array, " L"]:
    """Places of these pieces of the sequence, one after the other."""
    return (width * pieces[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]).reshape(-1)


def _check_split(ranks: int, tokens: int, per_rank: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be >= 1; 1 is no split")
    parts = per_rank * ranks
    if tokens < parts or tokens % parts:
        raise ValueError(
            f"tokens={tokens} must be a positive multiple of {parts} ({per_rank} for each of ranks={ranks}); "
            f"pad rows to {padded_tokens(tokens, ranks, per_rank)}"
        )
