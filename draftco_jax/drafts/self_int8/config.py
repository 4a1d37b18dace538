"""The config of the int8 self-draft, which has nothing to choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from draftco_jax.drafts.base import DraftConfig

if TYPE_CHECKING:
    from flax import nnx

    from draftco_jax.drafts.self_int8.module import SelfInt8


@dataclass(frozen=True, kw_only=True)
class SelfInt8Config(DraftConfig):
    """Any policy on one device or whole on each; it computes in the policy's dtype, whatever that of drafts is."""

    tap_layers: ClassVar[tuple[int, ...]] = ()

    def build(self, rngs: nnx.Rngs) -> SelfInt8:
        """The module; it has no weights before a publish."""
        from draftco_jax.drafts.self_int8.module import SelfInt8

        return SelfInt8(self)
