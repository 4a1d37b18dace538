"""Rotary position embedding: which frequencies a policy turns with.

    angle of pair i at position p:  p * f_i,   f_i = theta^(-2i / width) by default, i < width / 2

Long contexts scale the frequencies, each family in its own way (`Llama3Scaling`, `YarnScaling`, `LinearScaling`). YaRN
also multiplies cos and sin by an attention factor, so scores grow by its square.

Frequencies are made in float64 on the host: theta^(-2i/width) in float32 is off in the last place, and positions of
10^5 turn that into an angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """f / factor."""

    factor: float

    def __post_init__(self) -> None:
        """Refuse what cannot divide."""
        _check_factor(self.factor)

    def apply(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies."""
        del theta
        return frequencies / self.factor

    attention_factor = 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: pairs that turn less than low_freq_factor times over the original length are slowed down by `factor`,
    those that turn more than high_freq_factor times are kept, linear in the number of turns between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Refuse bounds that leave nothing between."""
        _check_factor(self.factor)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be > low_freq_factor={self.low_freq_factor}; "
                "take both from the checkpoint"
            )

    def apply(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies."""
        del theta
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return frequencies * (keep + (1 - keep) / self.factor)

    attention_factor = 1.0


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): pairs that turn more than beta_fast times over the original length are kept, those that
    turn less than beta_slow times are slowed down by `factor`, linear in i between."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the bounds to whole pairs, outwards; GPT-OSS does not."""
    attention_factor_override: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot divide."""
        _check_factor(self.factor)

    @property
    def attention_factor(self) -> float:
        """0.1 ln(factor) + 1, or what the checkpoint says."""
        if self.attention_factor_override is not None:
            return self.attention_factor_override
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def apply(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Scaled frequencies."""
        width = 2 * frequencies.size

        def pair_of(turns: float) -> float:
            return (
                width * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = (np.arange(width // 2) - low) / max(high - low, 1e-3)
        slow = np.clip(ramp, 0.0, 1.0)
        return frequencies * (slow / self.factor + 1 - slow)


def _check_factor(factor: float) -> None:
    if not factor > 0:
        raise ValueError(f"factor={factor} must be > 0; take it from the checkpoint")


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """What a policy turns its queries and keys with."""

    width: int
    """Dims of a head that are turned, from the first on."""
    theta: float
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Refuse widths that hold no pairs."""
        if self.width < 2 or self.width % 2:
            raise ValueError(f"width={self.width} must be even and >= 2; rotary pairs need it")

    def frequencies(self) -> Float32[np.ndarray, " h"]:
        """Radians a position, of each pair."""
        base = np.asarray(self.theta, np.float64) ** -(np.arange(0, self.width, 2, dtype=np.float64) / self.width)
        return (base if self.scaling is None else self.scaling.apply(base, self.theta)).astype(np.float32)

    def angles(self, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
        """cos and sin of every position, float32, times the attention factor."""
        turned = positions[..., None, None].astype(jnp.float32) * jnp.asarray(self.frequencies())[None, None, None, :]
        factor = jnp.float32(1.0 if self.scaling is None else self.scaling.attention_factor)
        return jnp.cos(turned) * factor, jnp.sin(turned) * factor
