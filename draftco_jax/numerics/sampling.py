"""Turn logits into the law that tokens are drawn from.

Order of operations, the same for policy and draft: divide by the temperature, keep the top k, keep the nucleus of
mass p, leave out what is less than min-p times as likely as the likeliest token, renormalise. Everything here is
float32 whatever comes in. `request_sampling` does the same with settings that differ from row to row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

# One stream per purpose, so that the uniform that proposes a token is independent of the one that judges it.
PROPOSE, ACCEPT, COMMIT = 0, 1, 2
_STREAMS = 3

MIN_TEMPERATURE = 1e-4
"""Below it logits / temperature leave the range in which float32 tells neighbours apart."""

_PRODUCT_PREFIX_SUM_UP_TO = 256


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn from logits; applied alike to the policy's law p and the draft's law q."""

    temperature: float = 1.0
    """0 means greedy: the law is one-hot on the largest logit."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    """Mass of the nucleus in (0, 1]; 1 keeps all tokens."""
    min_p: float = 0.0
    """Tokens stay whose probability is at least min_p times the largest one; in [0, 1), 0 keeps all tokens. The ratio
    is that of the tempered law, which top-k and top-p do not change."""

    def __post_init__(self) -> None:
        """Refuse values that name no law."""
        if self.temperature != 0.0 and not MIN_TEMPERATURE <= self.temperature <= 1 / MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} must be 0 (greedy) or in {MIN_TEMPERATURE}..{1 / MIN_TEMPERATURE:g}; "
                "use 0 for greedy decoding"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; use 0 to keep all tokens")
        if not (0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; use 1 to keep all tokens")
        if not (0.0 <= self.min_p < 1.0):
            raise ValueError(f"min_p={self.min_p} must be in [0, 1); use 0 to keep all tokens")

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p cut the support."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def law(
        self, logits: Float[Array, "*b V"], first: int | Int[Array, ""] = 0, ids: Int[Array, " V"] | None = None
    ) -> Float[Array, "*b V"]:
        """`law` of a draft's logits (`drafts.base.DraftSampling`): alike in all rows, whichever drafts they are."""
        del first, ids
        return law(logits, self)

    def log_law(self, logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        """`log_law` of the policy's logits."""
        return log_law(logits, self)


def support(
    logits: Float[Array, "*b V"], sampling: SamplingConfig, keep: Int[Array, "*b"] | None = None
) -> Bool[Array, "*b V"]:
    """Tokens that top-k, top-p and min-p leave in the law. Ties are broken towards the smaller id.

    Args:
        logits: already divided by the temperature, float32.
        sampling: the filters.
        keep: a token that stays in the support whatever the filters say. The trainer passes the sampled token here:
            it was inside the support when it was drawn, and rounding must not push it out afterwards.
    """
    top_k = min(sampling.top_k, logits.shape[-1]) if sampling.top_k > 0 else None
    top_p = sampling.top_p if sampling.top_p < 1.0 else None
    kept = best_tokens(logits, top_k, top_p)
    if sampling.min_p > 0.0:
        kept &= likely_tokens(logits, sampling.min_p)
    if keep is not None:
        ids = jnp.expand_dims(jnp.arange(logits.shape[-1]), range(logits.ndim - 1))
        kept |= ids == keep[..., None]
    return kept


def best_tokens(
    logits: Float[Array, "*b V"], top_k: int | Int[Array, "*#b"] | None, top_p: float | Float[Array, "*#b"] | None
) -> Bool[Array, "*b V"]:
    """The top k (0: all), then the nucleus of mass p of what they hold; ties go to the smaller id. None: not asked for.

    Both keep a prefix of the tokens in falling order, so one sort does, and the last token kept tells for each other
    one whether it comes before.
    """
    if top_k is None and top_p is None:
        return jnp.ones(logits.shape, bool)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    falling, order = jax.lax.sort((-logits, ids), num_keys=1, is_stable=True)
    falling, kept = -falling, jnp.ones(logits.shape, bool)
    if top_k is not None:
        kept = ids < _column(jnp.where(jnp.asarray(top_k) > 0, top_k, logits.shape[-1]), logits)
    if top_p is not None:
        probs = jax.nn.softmax(jnp.where(kept, falling, -jnp.inf), axis=-1)
        mass_before = jnp.cumsum(probs, axis=-1) - probs
        mass = _column(jnp.asarray(top_p, jnp.float32), logits)
        # The sum may reach 1 before the last token by rounding: where all is asked for, nothing is compared. The first
        # token stays however small the mass, also one that is 0 among the numbers that are told from it.
        kept &= (mass_before < mass) | (mass >= 1.0) | (ids == 0)
    last = jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32) - 1
    worst, its_id = jnp.take_along_axis(falling, last, axis=-1), jnp.take_along_axis(order, last, axis=-1)
    return (logits > worst) | ((logits == worst) & (ids <= its_id))


def likely_tokens(logits: Float[Array, "*b V"], min_p: float | Float[Array, "*#b"]) -> Bool[Array, "*b V"]:
    """Tokens at least min_p times as likely as the likeliest; 0 keeps all."""
    ratio = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return ratio >= _column(jnp.asarray(min_p, jnp.float32), logits)


def _column(value: Shaped[Array, "*b"], logits: Float[Array, "*c V"]) -> Shaped[Array, "..."]:
    """A setting per row, or one for all, laid against rows of tokens."""
    return jnp.broadcast_to(value, logits.shape[:-1])[..., None] if value.ndim else value


def log_law(
    logits: Float[Array, "*b V"], sampling: SamplingConfig, keep: Int[Array, "*b"] | None = None
) -> Float[Array, "*b V"]:
    """Log of the law that tokens are drawn from: log softmax of the tempered, filtered logits.

    In any float dtype, computed and returned in float32. Tokens outside the support get -inf. With temperature 0 the
    law is one-hot on the largest logit (ties towards the smaller id), so the result is 0 there and -inf elsewhere.
    """
    logits = logits.astype(jnp.float32)
    if sampling.greedy:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        ids = jnp.expand_dims(jnp.arange(logits.shape[-1]), range(logits.ndim - 1))
        return jnp.where(ids == best, 0.0, -jnp.inf).astype(jnp.float32)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.filtered:
        logits = jnp.where(support(logits, sampling, keep), logits, -jnp.inf)
    return jax.nn.log_softmax(logits, axis=-1)


def law(logits: Float[Array, "*b V"], sampling: SamplingConfig) -> Float[Array, "*b V"]:
    """The law itself, float32: exp of `log_law` up to rounding, without the detour through logarithms."""
    if sampling.greedy or sampling.filtered:
        return jnp.exp(log_law(logits, sampling))
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits if sampling.temperature == 1.0 else logits / sampling.temperature, axis=-1)


def draw(weights: Float[Array, "*b V"], uniform: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Draw ids with probability weights / sum(weights) by inverting the cumulative sum.

    The id is the first one of positive weight whose cumulative weight exceeds uniform * total. Ids of weight 0 are set
    aside because a sum in float32 need not be monotone: one of them could otherwise be drawn once in 10^8. The total is
    the largest cumulative weight of an id of positive weight, so there always is an id that exceeds. Resolution is that
    of a float32 uniform, 2^-23, as in Gumbel sampling in float32.

    Args:
        weights: float32, >= 0, some entry positive in each row.
        uniform: float32 in [0, 1).
    """
    cumulative = jnp.where(weights > 0, prefix_sum(weights), -1.0)
    threshold = uniform * jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > threshold[..., None], axis=-1).astype(jnp.int32)


def prefix_sum(x: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Inclusive prefix sum over the last axis, float32.

    A short axis is summed by one product with a triangle of ones: a scan of log V levels is a dozen operations, each of
    which costs more than the sum itself where decoding is bound by the number of operations.
    """
    width = x.shape[-1]
    if width > _PRODUCT_PREFIX_SUM_UP_TO:
        return jnp.cumsum(x, axis=-1)
    triangle = jnp.triu(jnp.ones((width, width), x.dtype))
    return jnp.matmul(x, triangle, precision=jax.lax.Precision.HIGHEST)


def request_uniforms(keys: Key[Array, " B"], length: int) -> Float[Array, "B S 3"]:
    """Uniforms in [0, 1) for each (request, position, stream); streams are PROPOSE, ACCEPT, COMMIT.

    The value at a position depends on the request's own key and on the position alone: not on the batch, on the
    capacity `length`, or on how many rounds it took to get there. Bits are a function of the key and of a counter,
    position * 3 + stream (JAX's partitionable Threefry), so a longer table begins with the shorter one.
    """
    return jax.vmap(lambda key: jax.random.uniform(key, (length, _STREAMS), jnp.float32))(keys)
