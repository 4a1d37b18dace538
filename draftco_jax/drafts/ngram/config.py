"""Fields of a prompt-lookup draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.matching import check_match_range

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.ngram.module import NGram


@dataclass(frozen=True, kw_only=True)
class NGramConfig(DraftConfig):
    """How much of a request's own text must repeat before it is copied."""

    tap_layers: ClassVar[tuple[int, ...]] = ()
    min_match: int = 2
    """Tokens at the end of the text that must have occurred before; with fewer nothing is proposed."""
    max_match: int = 4
    """Longer matches than this are not told apart: of those the most recent one is taken."""

    def __post_init__(self) -> None:
        """Refuse a range that holds no match."""
        check_match_range(self.min_match, self.max_match)

    def build(self, rngs: nnx.Rngs) -> NGram:
        """The module; it has no weights."""
        from draftco_jax.drafts.ngram.module import NGram

        return NGram(self)
