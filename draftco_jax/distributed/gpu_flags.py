"""What XLA must be told for programs on GPUs; one reason each."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

PIPELINE_OPTIONS: Mapping[str, str] = {
    # Collectives in flight at a time, those of loops that run meanwhile counted too. With the default of 1 a feature
    # of the draft cannot go beside the ticks of a group, which send their own: it is waited for; with 8 some still are,
    # the permutes of an exchange between 4 stages and those of a tick being more.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "32",
}
"""Compiler options of an update over pipeline stages (`jax.jit(compiler_options=...)`); as flags they begin with --."""


def pipeline_options(mesh: Mesh | None) -> dict[str, str] | None:
    """Those of a mesh of GPUs; None elsewhere, since other compilers refuse them."""
    return dict(PIPELINE_OPTIONS) if mesh is not None and mesh.devices.flat[0].platform == "gpu" else None
