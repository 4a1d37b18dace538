"""Compiles a function for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.deviceless.plugin import prepare
from pallas_kernels.deviceless.targets import gpu_target

WHOLE = PartitionSpec()
"""The same on every device."""


def gpu_topology(kind: str = "h100", devices: int = 8, hosts: int = 1) -> topologies.TopologyDescription:
    """Devices to compile for: `devices` GPUs in all, on `hosts` machines."""
    if devices < 1 or hosts < 1 or devices % hosts:
        raise ValueError(f"devices={devices} must be a multiple of hosts={hosts}; give the GPUs of all hosts together")
    target = gpu_target(kind).text()
    prepare()
    try:
        # slices x hosts of a slice x devices of a host
        return topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=f"1x{hosts}x{devices // hosts}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX looked for its plugins before the compiler for GPUs was on the path; "
            "call pallas_kernels.deviceless.prepare() before the first use of a device"
        ) from error


def gpu_mesh(kind: str = "h100", *, hosts: int = 1, **axes: int) -> Mesh:
    """A mesh of GPUs that are not there, `gpu_mesh("h100", context=8)`; without axes it is one device."""
    sizes = axes or {"device": 1}
    devices = gpu_topology(kind, int(np.prod(list(sizes.values()))), hosts).devices
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    *shapes: Any,
    in_specs: Any = WHOLE,
    out_specs: Any = WHOLE,
    check_vma: bool = True,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile `function` as the body of a shard_map over `mesh`.

    Args:
        mesh: `gpu_mesh`.
        function: sees the arrays of one device.
        shapes: its arguments, whole: pytrees of jax.ShapeDtypeStruct.
        in_specs: how the arguments are split, as in shard_map: one for all, or a tuple with one for each.
        out_specs: how the results are.
        check_vma: as in shard_map.
        options: compiler options of XLA, such as those of `ptx_options`.
    """
    specs = (in_specs,) * len(shapes) if isinstance(in_specs, PartitionSpec) else tuple(in_specs)
    placed = [
        jax.tree.map(
            lambda leaf, s=spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, s)), x
        )
        for x, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    # A kernel asks the default device what it is compiled for.
    with jax.default_device(mesh.devices.flat[0]):
        return jax.jit(mapped).lower(*placed).compile(compiler_options=dict(options) if options else None)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """The most memory one device needs at a time while the program runs, arguments and results included, in bytes.

    As planned by the compiler: memory that libraries allocate for themselves (NCCL, cuDNN) is not in it.
    """
    plan = compiled.memory_analysis()
    if plan is None:
        raise ValueError("compiled must be a program that knows its memory plan; give what compile_for returns")
    return int(plan.peak_memory_in_bytes)
