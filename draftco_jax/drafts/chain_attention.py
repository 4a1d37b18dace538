"""Training-time attention of drafts that run in a chain: EAGLE-3 passes, MTP steps.

    pass 0 at t    keys s <= t of pass 0 in the document of t         the trunk, which may lie on other devices
    pass k at t    the same, and the keys of passes 1..k at t         the branch, which never leaves its device

all in one softmax.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from draftco_jax.context_parallel import KeyRange, PackedRows, Trunk, diagonal_branch


class ChainAttention:
    """Attention of one pass after the other; it keeps the trunk and the branch keys made so far."""

    def __init__(
        self, segment_ids: Int32[Array, "R T"], positions: Int32[Array, "R T"], packed: PackedRows, *, reads: int
    ) -> None:
        self.packed, self.reads, self.live = packed, reads, segment_ids > 0
        seen = packed.causal(segment_ids, positions)
        self.seen = KeyRange(seen.first[:, :, None], seen.last[:, :, None])
        self.trunk: Trunk | None = None
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def __call__(
        self, q: Float[Array, "R T N H"], key: Float[Array, "R T K H"], value: Float[Array, "R T K H"]
    ) -> Float[Array, "R T N H"]:
        """Heads of the next pass, whose own keys join the branch (those of pass 0 are the trunk)."""
        if self.trunk is None:
            self.trunk = self.packed.trunk(key, value, reads=self.reads)
        else:
            self.keys.append(key)
            self.values.append(value)
        branch = diagonal_branch(self.keys, self.values, self.live)
        return self.packed.branch_attention(q[:, :, None], self.trunk, self.seen, branch)[:, :, 0]
