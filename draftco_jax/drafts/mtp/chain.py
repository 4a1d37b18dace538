"""Rows in which the same block of a policy runs several times in a chain, each use at one more token.

    use 0 at t    keys s <= t of use 0 in the document of t           the trunk, which may lie on other devices
    use k at t    the same, and the keys of uses 1..k at t            the branch, which never leaves its device

all in one softmax, with the head's sink where there is one. A block attends through the `PackedRows` that it is given;
so it runs in a chain, unchanged, when it is given these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from jaxtyping import Array, Bool, Float, Int

from draftco_jax.context_parallel import KeyRange, PackedRows, Trunk, branch_attention, diagonal_branch


@dataclass(frozen=True, kw_only=True)
class ChainRows(PackedRows):
    """`PackedRows` of one block and one unroll; what earlier uses made is kept while it is traced."""

    live: Bool[Array, "R L"]
    """Tokens that are not padding."""
    reads: int
    """Uses there will be."""
    trunk_of: list[Trunk] = field(default_factory=list)
    """Of use 0; empty before it."""
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    """Of uses 1, 2, ..."""

    def attention(
        self,
        q: Float[Array, "R L N H"],
        k: Float[Array, "R L K H"],
        v: Float[Array, "R L K H"],
        seen: KeyRange,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "R L N H"]:
        """Heads of the next use: `seen` of the keys of use 0, and all keys of later uses at the same token."""
        if self.trunk_of:
            self.keys.append(k)
            self.values.append(v)
        else:
            self.trunk_of.append(self.trunk(k, v, reads=self.reads))
        trunk, branch = self.trunk_of[0], diagonal_branch(self.keys, self.values, self.live)
        places = KeyRange(seen.first[:, :, None], seen.last[:, :, None])
        spec = self._ring(trunk.slots[0, 0], q)
        return branch_attention(q[:, :, None], trunk, places, branch, sinks, spec=spec)[0][:, :, 0]


def chain_rows(packed: PackedRows, segment_ids: Int[Array, "R L"], *, reads: int) -> ChainRows:
    """Rows for `reads` uses of one block."""
    spread = {stated.name: getattr(packed, stated.name) for stated in fields(packed)}
    return ChainRows(**spread, live=segment_ids > 0, reads=reads)
