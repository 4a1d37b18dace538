"""Options that a compiler is given are its own."""

from __future__ import annotations

from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from draftco_jax.distributed.compiler_options import update_options


def mesh_of(platform):
    return Mock(spec=Mesh, devices=np.array([Mock(platform=platform)]))


@pytest.mark.parametrize("pipeline", [True, False])
def test_collectives_on_cpus_keep_one_order(pipeline):
    """The compiler knows the option: one that it does not know is refused."""
    options = update_options(mesh_of("cpu"), pipeline=pipeline)
    assert options == {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    jax.jit(lambda x: x + 1, compiler_options=options).lower(np.float32(1)).compile()


def test_others_get_what_they_need_and_nothing_else():
    assert update_options(None, pipeline=True) is None
    assert list(update_options(mesh_of("gpu"), pipeline=True)) == [
        "xla_gpu_experimental_parallel_collective_overlap_limit"
    ]
    assert update_options(mesh_of("gpu"), pipeline=False) is None
    assert update_options(mesh_of("tpu"), pipeline=True) is None
