"""Prompt lookup: what followed the last words of a request the last time they occurred in it. No weights."""

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.ngram.config import NGramConfig

NGRAM = DraftFamily(name="ngram", config=NGramConfig)
