r"""The policy's int8 copy as a draft.

    publish   q = int8 codes and scales of the policy that is published (`models.quantised`)
    propose   k steps of q over the policy's cache: exact keys and values before the anchor are read, its own at
              anchor, anchor + 1, ... are written and read
    verify    the policy's forward over anchor .. anchor + k writes exact ones there before any query reads them

So the draft has no cache, and what a round leaves of it lies after the last accepted token, where the next round writes
before it reads. A recurrent state goes one way only: the draft advances a copy, and the policy goes on from its own.

The laws are those of q after the very tokens that were drafted, which is all that exactness asks of a draft.

What EfficientRollout (arXiv 2606.18967) does with 4 bits. Letters: B requests, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.drafts.base import Context, DraftSampling, Features, Proposal, Shared
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.models.kv_cache import Cache, LayerCache
from draftco_jax.models.paged_cache import PagedCache, PagedLayer
from draftco_jax.models.quantised_decoder import QuantisedDecoder
from draftco_jax.models.tensor_decoder import TensorDecoder
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.sampling import draw


class Lent(NamedTuple):
    """The policy's cache while it is drafted with."""

    cache: Cache | PagedCache
    before: tuple[Any, ...]  # states of its layers as they were lent
    live: jax.Array  # bool[B] requests that decode; nothing is written for the others in pages


class SelfInt8(nnx.Module):
    """A draft whose state is (), and in a round `Lent`."""

    def __init__(self, cfg: SelfInt8Config, policy: QuantisedDecoder | None = None) -> None:
        self.cfg = cfg
        self.policy = policy

    def made_of(self, policy: Decoder) -> SelfInt8:
        """The draft of a policy in the rollout layout, whose modules it takes over.

        Raises:
            ValueError: weights split over a tensor axis.
        """
        if isinstance(policy, TensorDecoder):
            raise ValueError(
                "draft=SelfInt8Config must have a policy that is whole on each device, not one split over a tensor "
                "axis; use mesh.tensor=1, rollout.devices=one or another draft"
            )
        return SelfInt8(self.cfg, QuantisedDecoder(policy))

    def empty_state(self, batch: int, capacity: int, context: Context) -> tuple[()]:
        """Nothing."""
        del batch, capacity, context
        return ()

    def absorb(self, state: tuple[()], features: Features, shared: Shared) -> tuple[()]:
        """Nothing: the policy's forward has written what there is to know into its cache."""
        del features, shared
        return state

    def borrow(self, state: tuple[()], cache: Cache | PagedCache, live: Bool[Array, " B"]) -> Lent:
        """`drafts.base.SharesCache`."""
        del state
        return Lent(cache, cache.layers, live)

    def give_back(self, state: Lent) -> tuple[tuple[()], Cache | PagedCache]:
        """Keys and values with the guesses in them, which are overwritten; states of recurrences as they were."""
        attention = lambda node: isinstance(node, LayerCache | PagedLayer)  # noqa: E731
        kept = lambda now, before: now if attention(now) else before  # noqa: E731
        layers = jax.tree.map(kept, state.cache.layers, state.before, is_leaf=attention)
        return (), state.cache._replace(layers=layers)

    def propose(
        self,
        state: Lent,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, Lent]:
        """Draw d_1 .. d_k, one step of the int8 policy each."""
        del shared  # it has embedding and head of its own, int8 like the rest
        policy = self.policy
        if policy is None:
            raise ValueError("SelfInt8 must be made of a policy before it proposes; publish it with weight_sync")

        def step(carry: tuple[Any, Array], now: tuple[Array, Array]) -> tuple[tuple[Any, Array], tuple[Array, Array]]:
            (layers, token), (number, uniform) = carry, now
            cache = state.cache._replace(layers=layers)
            read = policy.step(token[:, None], anchor + number, cache, tap_layers=(), active=state.live[:, None])
            law = sampling.law(policy.logits(read.hidden[:, 0]), number)
            token = draw(law, uniform)
            return (read.cache.layers, token), (token, law)

        count = uniforms.shape[1]
        numbers = jnp.arange(count, dtype=jnp.int32)
        # A loop, so that the policy is compiled once and not k times.
        (layers, _), (tokens, laws) = jax.lax.scan(step, (state.cache.layers, newest), (numbers, uniforms.T))
        proposed = jnp.full(newest.shape, count, jnp.int32)
        proposal = Proposal(tokens.T, jnp.swapaxes(laws, 0, 1), proposed)
        return proposal, state._replace(cache=state.cache._replace(layers=layers))
