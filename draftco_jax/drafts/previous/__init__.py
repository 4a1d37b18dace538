"""The previous epoch's text as the draft, under the weights that wrote it: SPEC-RL (arXiv 2509.23232) done exactly."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.previous.config import PreviousConfig

PREVIOUS = DraftFamily(
    name="previous",
    config=PreviousConfig,
    from_policy=lambda draft, policy: {"policy": policy},
)
