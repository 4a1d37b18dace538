"""Records of the branch attention op.

Letters, here and in all files of the op: R rows, G branches of a row, n queries and m keys of a branch, N query heads,
K key-value heads, H head width. A branch of EAGLE-3 is one token with n = 1 and m = its later passes; one of a
block draft is an anchor with n = m = the rows of its block.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

Rule = Literal["all", "causal"]
"""Which keys i of a branch its query j sees: all of them, or i <= j (n = m)."""


class Branch(NamedTuple):
    """Keys that never leave their rank."""

    keys: jax.Array  # [R, G, m, K, H]
    values: jax.Array  # [R, G, m, K, H]
    live: jax.Array  # bool[R, G]; a branch that is not live has no keys


class BranchGrads(NamedTuple):
    """Gradients of the local part. `q` is what the branch keys add to that of the trunk."""

    q: jax.Array  # f32[R, G, n, N, H]
    keys: jax.Array | None  # f32[R, G, m, K, H]
    values: jax.Array | None  # f32[R, G, m, K, H]
    sinks: jax.Array | None  # f32[N]
