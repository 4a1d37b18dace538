"""Multi-token prediction heads: one layer that reads the policy's last hidden state and the next token."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.mtp.checkpoint import load_mtp, save_mtp
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.mtp.training import denominator, steps_loss

MTP = DraftFamily(name="mtp", config=MtpConfig, denominator=denominator, loss=steps_loss, save=save_mtp, load=load_mtp)
