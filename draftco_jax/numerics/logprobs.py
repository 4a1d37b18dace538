"""The one function from logits to the log-prob of a token, used by engine, trainer and scorer."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import SamplingConfig, log_law


def token_logprobs(
    logits: Float[Array, "*b V"], tokens: Int[Array, "*b"], sampling: SamplingConfig
) -> Float[Array, "*b"]:
    """Log-prob of each token under the tempered, filtered law of its logits.

    log pi(x) = log softmax(filter(z / T))[x]. Any float dtype in, float32 inside and out. The token itself is always
    kept in the filtered support (see `support`), so the value is finite for temperature > 0.
    """
    return pick(log_law(logits, sampling, keep=tokens), tokens)


def entropy(logits: Float[Array, "*b V"], sampling: SamplingConfig) -> Float[Array, "*b"]:
    """Entropy in nats of the law of each row of logits; tokens of probability 0 add 0. float32 inside and out."""
    laws = log_law(logits, sampling)
    return -jnp.sum(jnp.where(jnp.isneginf(laws), 0.0, jnp.exp(laws) * laws), axis=-1)
