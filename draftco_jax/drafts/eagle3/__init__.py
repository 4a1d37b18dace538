"""EAGLE-3 (arXiv 2503.01840): one decoder layer that reads fused target features and the next token."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.eagle3.checkpoint import check_layout, load_draft, save_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import denominator, from_policy, passes_loss

EAGLE3 = DraftFamily(
    name="eagle3",
    config=Eagle3Config,
    denominator=denominator,
    loss=passes_loss,
    from_policy=from_policy,
    save=save_draft,
    load=load_draft,
    check_layout=check_layout,
)
