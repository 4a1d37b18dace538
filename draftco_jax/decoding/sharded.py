"""Generation over several devices: requests over all axes of a mesh but the tensor one, weights over that.

    data, stage, context, expert   each device has some of the requests, and a loop of its own: it ends with the last of
                                   them, and nothing in it waits for another device
    tensor                         each rank has some of the heads, hidden widths and the vocabulary, and the keys and
                                   values of its heads; the sums and gathers of a forward go over this axis alone

The program of one device runs in one shard_map. Weights are split by the table of training (`ROLLOUT`); drafts are
whole on every device. A request's key decides its draws, so that its tokens do not depend on where it is.

Requests are padded to as many on each device with copies of the last one, which are cut off again. Those that look at
each other's texts (`Context.siblings`) must be neighbours, as many as `siblings` has columns, and are kept together.
`Rollouts.experts_touched` counts the experts that the requests of one device need.

Types are not checked (`check_vma=False`): loops begin with zeros that are the same everywhere and go on with what is
not, and nothing is differentiated. That ranks of the tensor axis agree rests on its sums and gathers giving all of them
the same bits.

Letters: B requests, G siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.decoding.records import EngineShape, Request
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.distributed.compiler_options import update_options
from draftco_jax.distributed.sharding import partition_specs, rollout_rules
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.layers import LinearGroup
from draftco_jax.models.tensor_decoder import TensorDecoder, rollout_rows
from draftco_jax.types import Rollouts

Generate = Callable[..., Any]
"""``generate(weights, request, **static)`` on one device."""


@dataclass(frozen=True)
class Devices:
    """A mesh, and how training splits weights over it (`PackedRows.tensor_axis`, `expert_axes`)."""

    mesh: Mesh
    packed: PackedRows = WHOLE_ROWS

    @property
    def request_axes(self) -> tuple[str, ...]:
        """Axes that requests are split over."""
        return tuple(axis for axis in self.mesh.axis_names if axis != self.packed.tensor_axis)

    @property
    def shards(self) -> int:
        """Parts that requests are split into."""
        return prod(self.mesh.shape[axis] for axis in self.request_axes)

    def check_shape(self, shape: EngineShape) -> None:
        """Refuse what requests of several devices would have to share.

        Raises:
            ValueError: a budget of drafts over the whole batch.
        """
        if shape.verify_budget is not None and self.shards > 1:
            raise ValueError(
                f"verify_budget={shape.verify_budget} must be none with requests over {self.shards} devices: it is "
                "shared by all of them; leave it out or generate on one device"
            )

    def check_graph(self, policy: ModelGraph, weights: Any) -> None:
        """Refuse a policy that cannot be called over the tensor axis.

        Raises:
            ValueError: a plain decoder where there is a tensor axis, or fused projections.
        """
        over = rollout_rows(self.packed)
        module = policy.merge(weights)
        if over.tensor_axis is None:
            return
        fused = any(isinstance(node, LinearGroup) and node.fused for _, node in nnx.iter_graph(module))
        if fused or not isinstance(module, TensorDecoder) or module.over != over:
            raise ValueError(
                f"policy={type(module).__name__} must be split over mesh axis {over.tensor_axis!r} like the engine's "
                "mesh; publish it with Publisher(..., mesh=mesh, packed=packed, over_mesh=True)"
            )

    def slots_of_one(self, slots: SlotShape) -> SlotShape:
        """Slots of one device, of those of all.

        Raises:
            ValueError: slots or pages that the devices cannot share evenly, or a rule, which looks at all requests.
        """
        if slots.rule is not None:
            raise ValueError(
                "rule of the slots must be none over a mesh: it chooses by what all requests of a call did; leave it "
                "out or generate on one device"
            )
        for name in ("slots", "pages"):
            if (value := getattr(slots, name)) is not None and value % self.shards:
                raise ValueError(
                    f"{name}={value} must be a multiple of {self.shards}, the devices that requests are split over; "
                    f"use {-(-value // self.shards) * self.shards}"
                )
        pages = None if slots.pages is None else slots.pages // self.shards
        return replace(slots, slots=slots.slots // self.shards, pages=pages)

    def check_request(self, request: Request) -> None:
        """Refuse options, which are not spread yet, and siblings that would be on two devices; looks at their values.

        Raises:
            ValueError: options, or a row whose siblings are not the rows of its group of G neighbours.
        """
        if request.options is not None:
            raise ValueError("options of each request must be None over a mesh; ask all alike, or use one device")
        group = request.context.siblings.shape[1]
        if group == 0 or self.shards == 1:
            return
        siblings = np.asarray(request.context.siblings)
        own = np.arange(siblings.shape[0])[:, None] // group
        apart = np.argwhere((siblings >= 0) & (siblings // group != own))
        if apart.size:
            row, column = apart[0]
            raise ValueError(
                f"siblings of request {row} must be in its group of {group} neighbouring rows over several devices, "
                f"but one is request {siblings[row, column]}; put those that answer one prompt side by side"
            )

    def compiled(
        self, generate: Generate, *, policy: ModelGraph, shape: EngineShape, static_argnames: tuple[str, ...] = ()
    ) -> Generate:
        """`generate` over the devices as one program."""
        self.check_shape(shape)
        return jax.jit(
            self.spread(generate, policy),
            static_argnames=static_argnames,
            compiler_options=update_options(self.mesh, pipeline=False),
        )

    def spread(self, generate: Generate, policy: ModelGraph) -> Generate:
        """`generate` over the devices; `policy` is the structure of the policy, whose weights come first."""

        def run(weights: tuple[Any, Any], request: Request, **static: Any) -> Rollouts:
            self.check_graph(policy, weights[0])
            if "slots" in static:
                static["slots"] = self.slots_of_one(static["slots"])
            rules = rollout_rules(self.packed.tensor_axis, self.packed.expert_axes)
            specs = partition_specs(policy.merge(weights[0]), rules, self.mesh.shape)
            rows, count = PartitionSpec(self.request_axes or None), request.prompts.shape[0]
            rollouts = jax.shard_map(
                partial(self._of_shard, partial(generate, **static)),
                mesh=self.mesh,
                in_specs=((specs, PartitionSpec()), rows),
                out_specs=rows,
                axis_names=set(self.mesh.axis_names),
                check_vma=False,
            )(weights, padded(request, self.shards))
            return jax.tree.map(lambda x: x[:count], rollouts)

        return run

    def _of_shard(self, generate: Generate, weights: tuple[Any, Any], request: Request) -> Rollouts:
        """Those of one device, whose siblings are counted from its first row."""
        siblings = request.context.siblings
        if siblings.shape[1] and self.shards > 1:
            first = jax.lax.axis_index(self.request_axes) * siblings.shape[0]
            siblings = jnp.where(siblings >= 0, siblings - first, -1)
            request = request._replace(context=request.context._replace(siblings=siblings))
        return generate(weights, request)


def padded(request: Request, shards: int) -> Request:
    """As many requests for each shard, in whole groups: copies of the last one follow, without siblings."""
    count, group = request.context.siblings.shape
    group = max(group, 1)
    each = -(-count // (shards * group)) * group
    wanted = shards * each
    if wanted == count:
        return request
    more = jax.tree.map(lambda x: x[np.minimum(np.arange(wanted), count - 1)], request)
    siblings = jnp.where(np.arange(wanted)[:, None] < count, more.context.siblings, -1)
    return more._replace(context=more.context._replace(siblings=siblings))
