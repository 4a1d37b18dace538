"""DSpark (arXiv 2607.05147): a block as in DFlash, drawn in order under a low-rank bias, with a confidence head."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.blocks.anchors import check_row_anchors
from draftco_jax.drafts.blocks.training import denominator
from draftco_jax.drafts.dspark.checkpoint import check_layout, load_dspark, save_dspark
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.dspark.training import blocks_loss

DSPARK = DraftFamily(
    name="dspark",
    config=DSparkConfig,
    denominator=denominator,
    loss=blocks_loss,
    save=save_dspark,
    load=load_dspark,
    check_layout=check_layout,
    check_batch=check_row_anchors,
)
