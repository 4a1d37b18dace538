"""What is done to rewards before advantages are made of them, and which answers are trained on.

The order is NeMo-RL's: scale, then shape by length. Rewards and lengths are host-sized, [P, G] or any other shape.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def scale_rewards(
    rewards: Float[Array, "*shape"],
    *,
    target: tuple[float, float],
    source: tuple[float, float] = (0.0, 1.0),
) -> Float[Array, "*shape"]:
    """Map [source low, source high] to [target low, target high] along a line; rewards outside are clipped first.

    Raises:
        ValueError: a source whose low end is not below its high end.
    """
    (low, high), (bottom, top) = source, target
    if not low < high:
        raise ValueError(f"source={source} must have its low end below its high end; (0.0, 1.0) is usual")
    share = (jnp.clip(rewards, low, high) - low) / (high - low)
    return bottom + share * (top - bottom)


def overlong_penalty(
    lengths: Int[Array, "*shape"], *, max_length: int, buffer: int, penalty: float = 1.0
) -> Float[Array, "*shape"]:
    """What is added to the reward of a response: ``min(0, -(length - (max_length - buffer)) / buffer) * penalty``.

    Lengths in tokens of the response. 0 up to ``max_length - buffer``, then down along a line to ``-penalty`` at
    ``max_length``; float32. As in NeMo-RL it has no floor of its own: the generator's limit bounds the length. DAPO's
    floor beyond ``max_length`` is the same thing where no response is longer.

    Source: DAPO, soft overlong punishment (arXiv 2503.14476, eq. 13).

    Raises:
        ValueError: a buffer outside 1..max_length, or a negative penalty.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be in 1..{max_length}, the longest response; a fifth of it in DAPO")
    if penalty < 0:
        raise ValueError(f"penalty={penalty} must be >= 0, it is taken off the reward; 1 is usual")
    exceeding = (lengths - (max_length - buffer)).astype(jnp.float32)
    return jnp.minimum(0.0, -exceeding / buffer) * penalty


def kept_answers(finished: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """1 for answers that are trained on under overlong filtering, 0 for those that were cut at the limit.

    Whether an answer was cut is what the generator says: one that ends with its stop token exactly at the limit was
    not. A cut answer leaves the numerator and the denominator of the loss, and still counts in its group's baseline.

    Source: DAPO, overlong filtering (arXiv 2503.14476, section 3.4).
    """
    return finished.astype(jnp.float32)
