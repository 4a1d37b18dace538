"""Long sequences over the ranks of one mesh axis: zigzag layout, ring, branch attention, and what they cost.

Rows are padded once (`pad_row`), put in the order of the ranks (`to_ranks`) and sharded over the context axis. Inside
shard_map each rank asks for the places of its tokens (`local_index`), says what its queries see (`causal_range`,
`anchor_range`), and calls `ring_attention` or `branch_attention`. `PackedRows` puts all of this behind one value, which
models, drafts and losses are given: they are written once, for one device and for many.
"""

from draftco_jax.context_parallel.branch import (
    Trunk,
    TrunkMode,
    branch_attention,
    diagonal_branch,
    ring_attention,
    save_ring_policy,
    sharded_ring_attention,
    share_trunk,
)
from draftco_jax.context_parallel.layouts import (
    Contiguous,
    Layout,
    Split,
    Striped,
    Zigzag,
    from_ranks,
    pad_row,
    padded_tokens,
    to_ranks,
)
from draftco_jax.context_parallel.memory import TrunkShape, pick_trunk_mode
from draftco_jax.context_parallel.packed_rows import WHOLE_ROWS, PackedRows
from draftco_jax.context_parallel.ring import RingSpec
from draftco_jax.context_parallel.zigzag import (
    anchor_range,
    causal_range,
    check_documents,
    local_index,
    with_halo,
)
from pallas_kernels.block_attention import KeyRange
from pallas_kernels.branch_attention import Branch, Rule

__all__ = [
    "WHOLE_ROWS",
    "Branch",
    "Contiguous",
    "KeyRange",
    "Layout",
    "PackedRows",
    "RingSpec",
    "Rule",
    "Split",
    "Striped",
    "Trunk",
    "TrunkMode",
    "TrunkShape",
    "Zigzag",
    "anchor_range",
    "branch_attention",
    "causal_range",
    "check_documents",
    "diagonal_branch",
    "from_ranks",
    "local_index",
    "pad_row",
    "padded_tokens",
    "pick_trunk_mode",
    "ring_attention",
    "save_ring_policy",
    "share_trunk",
    "sharded_ring_attention",
    "to_ranks",
    "with_halo",
]
