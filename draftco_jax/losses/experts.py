"""How a policy's experts are used by the tokens of an update, and the loss that spreads tokens over them.

Letters: M layers with experts, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from draftco_jax.models.moe_routing import RoutingSums, routing_metrics


def expert_metrics(
    sums: RoutingSums, replayed: Float32[Array, ""] | None = None
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Balance loss and metrics, means over layers; `sums` [M, ...] are those of all devices.

    The loss is that of `moe_routing.balance_loss`: k where all experts are used alike, up to E. Load, mass and tokens
    are summed over the whole batch before they are multiplied, so it does not depend on how rows are spread or packed.
    `replayed`: how many choices (a token in a layer) were taken from a record; of these the metrics say how many the
    router would have made otherwise. None: nothing was replayed.
    """
    by_layer = jax.vmap(routing_metrics)(sums)
    means = {name: jnp.mean(values) for name, values in by_layer.items()}
    metrics = {f"experts/{name}": jax.lax.stop_gradient(value) for name, value in means.items()}
    if replayed is not None:
        metrics["experts/replay_changed_fraction"] = jnp.sum(sums.changed) / jnp.maximum(replayed, 1.0)
    return means["balance_loss"], metrics
