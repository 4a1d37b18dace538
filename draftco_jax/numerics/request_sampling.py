"""Laws of a batch whose requests ask for different sampling: `sampling` with a setting per row.

The settings are arrays, so that requests come and go without a new program; what the batch may ask for at all is static
(`FiltersInUse`), so that nothing is sorted where nobody ranks tokens.

In one program a row's law is a function of that row's logits and settings alone, bit for bit, whatever the other rows
ask for and wherever it stands. Where all rows ask for the same it is bit for bit what `sampling.log_law` and
`sampling.law` make of batches of that shape. Programs of another batch size or with other filters agree to
rounding, as those two functions do among themselves: XLA may add up a row in another order.

Letters: B requests, V vocabulary; dims between them, such as rows of a verify block, share their request's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

from draftco_jax.numerics.sampling import SamplingConfig, best_tokens, likely_tokens


class RequestSampling(NamedTuple):
    """`SamplingConfig` of each request, in arrays."""

    temperature: jax.Array  # f32[B], 0 is greedy
    top_k: jax.Array  # i32[B], 0 keeps all tokens
    top_p: jax.Array  # f32[B], 1 keeps all tokens
    min_p: jax.Array  # f32[B], 0 keeps all tokens


class FiltersInUse(NamedTuple):
    """Which filters a program must have. One that no row asks for costs time and changes nothing; one that a row asks
    for and that is missing here is not applied."""

    top_k: bool
    top_p: bool
    min_p: bool


NO_FILTERS = FiltersInUse(False, False, False)
ALL_FILTERS = FiltersInUse(True, True, True)


def of(configs: Sequence[SamplingConfig]) -> RequestSampling:
    """The settings of requests, one row each; at least one request."""
    if not configs:
        raise ValueError("configs=[] must name the sampling of at least one request; give one SamplingConfig per row")
    columns = {name: [getattr(config, name) for config in configs] for name in RequestSampling._fields}
    dtypes = {name: np.int32 if name == "top_k" else np.float32 for name in columns}
    # A huge top_k keeps all tokens, as the largest int32 does.
    columns["top_k"] = [min(k, np.iinfo(np.int32).max) for k in columns["top_k"]]
    return RequestSampling(**{name: jnp.asarray(np.asarray(values, dtypes[name])) for name, values in columns.items()})


def filters_in_use(configs: Sequence[SamplingConfig]) -> FiltersInUse:
    """The filters that some request which is not greedy asks for."""
    sampled = [config for config in configs if not config.greedy]
    return FiltersInUse(
        top_k=any(config.top_k > 0 for config in sampled),
        top_p=any(config.top_p < 1.0 for config in sampled),
        min_p=any(config.min_p > 0.0 for config in sampled),
    )


def asked_filters(sampling: RequestSampling) -> FiltersInUse:
    """The same of rows; looks at their values, so not inside a compiled program."""
    sampled = np.asarray(sampling.temperature) > 0.0
    return FiltersInUse(
        top_k=bool(np.any(sampled & (np.asarray(sampling.top_k) > 0))),
        top_p=bool(np.any(sampled & (np.asarray(sampling.top_p) < 1.0))),
        min_p=bool(np.any(sampled & (np.asarray(sampling.min_p) > 0.0))),
    )


def log_law_each(
    logits: Float[Array, "B *t V"], sampling: RequestSampling, filters: FiltersInUse
) -> Float32[Array, "B *t V"]:
    """Log of each row's law, float32, -inf outside its support; greedy rows are one-hot (ties to the smaller id)."""
    scaled = _scaled(logits, sampling)
    laws = jax.nn.log_softmax(_filtered(scaled, sampling, filters), axis=-1)
    return jnp.where(_rows(sampling.temperature == 0.0, scaled), _greedy_log_law(logits), laws)


def law_each(
    logits: Float[Array, "B *t V"], sampling: RequestSampling, filters: FiltersInUse
) -> Float32[Array, "B *t V"]:
    """The laws themselves, float32; as `sampling.law`, rows without filters take no detour through logarithms."""
    scaled = _scaled(logits, sampling)
    laws = jax.nn.softmax(scaled, axis=-1)
    if any(filters):
        cut = _rows((sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0), scaled)
        through_logs = jnp.exp(jax.nn.log_softmax(_filtered(scaled, sampling, filters), axis=-1))
        laws = jnp.where(cut, through_logs, laws)
    return jnp.where(_rows(sampling.temperature == 0.0, scaled), jnp.exp(_greedy_log_law(logits)), laws)


def _scaled(logits: Float[Array, "B *t V"], sampling: RequestSampling) -> Float32[Array, "B *t V"]:
    """Divided by the temperature; by 1 in greedy rows, whose quotient is not read."""
    temperature = jnp.where(sampling.temperature > 0.0, sampling.temperature, 1.0)
    return logits.astype(jnp.float32) / _rows(temperature, logits)


def _filtered(
    scaled: Float32[Array, "B *t V"], sampling: RequestSampling, filters: FiltersInUse
) -> Float32[Array, "B *t V"]:
    """-inf outside the support of each row."""
    if not any(filters):
        return scaled
    inner = scaled.shape[:-1]

    def each(setting: Shaped[Array, " B"]) -> Shaped[Array, "B *t"]:
        return jnp.broadcast_to(jnp.expand_dims(setting, range(1, scaled.ndim - 1)), inner)

    kept = best_tokens(
        scaled,
        each(sampling.top_k) if filters.top_k else None,
        each(sampling.top_p) if filters.top_p else None,
    )
    if filters.min_p:
        kept &= likely_tokens(scaled, each(sampling.min_p))
    return jnp.where(kept, scaled, -jnp.inf)


def _greedy_log_law(logits: Float[Array, "B *t V"]) -> Float32[Array, "B *t V"]:
    logits = logits.astype(jnp.float32)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(ids == best, 0.0, -jnp.inf).astype(jnp.float32)


def _rows(values: Shaped[Array, " B"], logits: Float[Array, "B *t V"]) -> Shaped[Array, "B ..."]:
    """A value per request, laid against its rows of tokens."""
    return jnp.expand_dims(values, range(1, logits.ndim))
