"""The block of all families: a token mixer and an MLP or experts, each after its norm and added to the stream.

Letters: R packed rows or B requests of T tokens, D width, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import PackedRows
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.layers import RMSNorm
from draftco_jax.models.moe import MoE
from draftco_jax.models.moe_routing import Routing

Norm = Callable[[], RMSNorm]


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)); a block may lack either half.

    Norms and halves are attributes under the family's published names, so that tensor names follow by a rule.
    """

    def __init__(
        self, *, mixer: tuple[str, str, nnx.Module] | None, ffn: tuple[str, str, nnx.Module] | None, norm: Norm
    ) -> None:
        self.mixer_names = self.ffn_names = ("", "")
        if mixer is not None:
            self.mixer_names = mixer[:2]
            setattr(self, mixer[0], norm())
            setattr(self, mixer[1], mixer[2])
        if ffn is not None:
            self.ffn_names = ffn[:2]
            setattr(self, ffn[0], norm())
            setattr(self, ffn[1], ffn[2])

    @property
    def routes(self) -> bool:
        """Whether it has experts."""
        return bool(self.ffn_names[1]) and isinstance(getattr(self, self.ffn_names[1]), MoE)

    def __call__(
        self, x: Float[Array, "R T D"], call: PackedCall, chosen: Int[Array, "R T k"] | None = None
    ) -> tuple[Float[Array, "R T D"], Routing | None]:
        """Packed rows, and where the experts' tokens went; `chosen`: ids to be replayed, -1 where there are none."""
        norm, mixer = self.mixer_names
        if mixer:
            x = x + getattr(self, mixer)(getattr(self, norm)(x), call)
        return self._feed_forward(x, call.packed, chosen, None)

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: Any) -> Any:
        """State of the mixer; () without one."""
        mixer = self.mixer_names[1]
        return getattr(self, mixer).empty_state(batch, capacity, lookahead, dtype) if mixer else ()

    def step(
        self, x: Float[Array, "B T D"], state: Any, call: CachedCall
    ) -> tuple[Float[Array, "B T D"], Any, Routing | None]:
        """A few new tokens, whose past is in the state."""
        norm, mixer = self.mixer_names
        if mixer:
            y, state = getattr(self, mixer).step(getattr(self, norm)(x), state, call)
            x = x + y
        x, routing = self._feed_forward(x, call.packed, None, call.active)
        return x, state, routing

    def _feed_forward(
        self, x: Array, packed: PackedRows, chosen: Array | None, active: Array | None
    ) -> tuple[Array, Routing | None]:
        norm, ffn = self.ffn_names
        if not ffn:
            return x, None
        normed, module = getattr(self, norm)(x), getattr(self, ffn)
        if not isinstance(module, MoE):
            return x + module(normed, packed), None
        recorded = None if chosen is None else Routing.recorded(chosen)
        y, routing = module(normed, packed, routing=recorded, active=active)
        return x + y, routing
