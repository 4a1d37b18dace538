"""What XLA must be told for updates over several devices; one reason each."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

ON_CPUS: Mapping[str, bool] = {
    # Collectives that do not depend on each other may run in another order on each device, and then wait for one
    # another for ever: in an interleaved update over stage 2 x context 2 x tensor 2 a hop of the pipeline and a sum
    # over tensor ranks, within 40 calls. In the order of this scheduler they did not, in 300.
    "xla_cpu_enable_concurrency_optimized_scheduler": False,
}
ON_GPUS: Mapping[str, str] = {
    # Collectives in flight at a time, those of loops that run meanwhile counted too. With the default of 1 a feature
    # of the draft cannot go beside the ticks of a group, which send their own: it is waited for; with 8 some still are,
    # the permutes of an exchange between 4 stages and those of a tick being more.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "32",
}


def update_options(mesh: Mesh | None, *, pipeline: bool) -> dict[str, str | bool] | None:
    """Compiler options of an update (`jax.jit(compiler_options=...)`); as flags they begin with --.

    On GPUs only a pipeline has any; None where there are none, since a compiler refuses those of another.
    """
    if mesh is None:
        return None
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return dict(ON_CPUS)
    return dict(ON_GPUS) if platform == "gpu" and pipeline else None
