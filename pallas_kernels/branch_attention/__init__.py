"""Attention of queries over the keys of their own branch, merged with what they saw of the trunk."""

from pallas_kernels.branch_attention.api import (
    IMPLEMENTATIONS,
    Branch,
    BranchGrads,
    Rule,
    branch_attention,
    branch_attention_backward,
)

__all__ = [
    "IMPLEMENTATIONS",
    "Branch",
    "BranchGrads",
    "Rule",
    "branch_attention",
    "branch_attention_backward",
]
