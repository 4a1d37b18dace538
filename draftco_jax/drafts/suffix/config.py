"""Fields of a suffix draft."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, isfinite
from typing import TYPE_CHECKING, ClassVar

from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.matching import check_match_range

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.suffix.module import Suffix


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(DraftConfig):
    """Which texts are searched, and how far a match is trusted."""

    tap_layers: ClassVar[tuple[int, ...]] = ()
    min_match: int = 1
    """Tokens at the end of the text that must occur elsewhere; with fewer nothing is proposed."""
    max_match: int = 16
    """Longer matches than this are not told apart. Each round compares every searched token max_match times."""
    budget_per_match: float = 1.0
    """alpha: at most floor(alpha * match length) tokens are proposed."""
    min_probability: float = 0.1
    """A token is proposed while the product of the count ratios on the way to it is at least this; 0 for no limit."""
    use_siblings: bool = True
    """Search the texts of the requests that answer the same prompt, as far as they have come."""
    history_tokens: int = 0
    """H: room for texts of earlier steps, per request; 0 searches none."""
    remembered_tokens: int = 2**20
    """Tokens of earlier texts that a run remembers in all; those of the same prompt are given first."""

    def __post_init__(self) -> None:
        """Refuse ranges and limits that allow no proposal."""
        check_match_range(self.min_match, self.max_match)
        if not (isfinite(self.budget_per_match) and self.budget_per_match * self.max_match >= 1.0):
            raise ValueError(
                f"budget_per_match={self.budget_per_match} must be finite and >= 1 / max_match, or nothing is ever "
                "proposed; 1.0 is usual"
            )
        if not 0.0 <= self.min_probability <= 1.0:
            raise ValueError(f"min_probability={self.min_probability} must be in [0, 1]; 0.1 is usual, 0 is no limit")
        if self.history_tokens < 0:
            raise ValueError(f"history_tokens={self.history_tokens} must be >= 0; use 0 to search no earlier texts")
        if self.remembered_tokens < self.history_tokens:
            raise ValueError(
                f"remembered_tokens={self.remembered_tokens} must be >= history_tokens={self.history_tokens}, "
                "the room of one request; raise it"
            )

    @property
    def memory(self) -> tuple[int, int]:
        """Tokens of earlier rollouts that a request is given, and that a run remembers in all."""
        return self.history_tokens, self.remembered_tokens

    def budget(self, match: int) -> int:
        """Most tokens proposed after a match of this length."""
        return floor(self.budget_per_match * match)

    def build(self, rngs: nnx.Rngs) -> Suffix:
        """The module; it has no weights."""
        from draftco_jax.drafts.suffix.module import Suffix

        return Suffix(self)
