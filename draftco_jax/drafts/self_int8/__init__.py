"""The policy itself with int8 weights, made anew at each publish, over the policy's own keys and values."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.self_int8.config import SelfInt8Config

SELF_INT8 = DraftFamily(name="self_int8", config=SelfInt8Config)
