"""DFlash (z-lab): all tokens of a block in one pass, from fused features of the policy."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.blocks.anchors import check_row_anchors
from draftco_jax.drafts.blocks.training import denominator
from draftco_jax.drafts.dflash.checkpoint import check_layout, load_dflash, save_dflash
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dflash.training import blocks_loss

DFLASH = DraftFamily(
    name="dflash",
    config=DFlashConfig,
    denominator=denominator,
    loss=blocks_loss,
    save=save_dflash,
    load=load_dflash,
    check_layout=check_layout,
    check_batch=check_row_anchors,
)
