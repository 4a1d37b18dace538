"""Suffix decoding (arXiv 2411.04975; over rollouts of a group: 2511.13841): copies from earlier and sibling texts."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.suffix.config import SuffixConfig

SUFFIX = DraftFamily(name="suffix", config=SuffixConfig)
