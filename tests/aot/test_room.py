"""The room itself: what it reads is what NVIDIA's tools say, and what it should complain about it does see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import PartitionSpec

from pallas_kernels.deviceless import (
    GPU_KINDS,
    compile_for,
    gpu_mesh,
    gpu_topology,
    kernel_resources,
    peak_bytes,
    permutes,
    ptx_options,
    ptxas_resources,
)

MiB = 2**20
REGISTER_GRANULE = 8
"""Registers are given to a warp in eights, so two versions of the assembler that agree differ by less."""
LATE = """
import jax
jax.devices()
from pallas_kernels.deviceless import gpu_topology
gpu_topology("h100")
"""


def product(rows: int, num_warps: int):
    """A Pallas kernel: x times its transpose, in one block."""

    def kernel(x, out):
        out[...] = jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32)

    def call(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((rows, rows), jnp.float32, manual_axis_type=jax.typeof(x).manual_axis_type),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            name="product",
        )(x)

    return call


def mixed(x):
    """A Pallas kernel, a transpose and a reduction that use shared memory, a matrix product of XLA's."""
    y = product(64, 4)(x)
    return jnp.sin(y).T + jnp.sum(y, axis=0)[:, None], y @ x.astype(jnp.float32)


def assembled(folder: Path, architecture: str):
    """What ptxas says of the PTX that a compilation left."""
    programs = [path.read_text() for path in folder.glob("*.ptx")]
    return {k: v for ptx in programs if ptx for k, v in ptxas_resources(ptx, architecture).items()}


def launched(folder: Path):
    """Threads of a block and dynamic shared memory of each kernel, as XLA wrote them down."""
    (text,) = [path.read_text() for path in folder.glob("*thunk_sequence.txt")]
    found = re.findall(r"(\w+) grid: \S+ \S+ \S+ threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+) bytes", text)
    return {name: (int(threads), int(shared)) for name, threads, shared in found}


@pytest.mark.parametrize(("kind", "architecture"), [("h100", "sm_90a"), ("a100", "sm_80")])
def test_machine_code_and_assembler_agree(tmp_path, kind, architecture):
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    found = kernel_resources(compile_for(gpu_mesh(kind), mixed, x, options=ptx_options(str(tmp_path))))
    reported = assembled(tmp_path, architecture)
    assert set(reported) == set(found) and "product" in found and len(found) > 2
    for name, kernel in found.items():
        assert abs(kernel.registers - reported[name].registers) < REGISTER_GRANULE, name
        assert (kernel.stack_bytes, kernel.spill_bytes) == (reported[name].stack_bytes, reported[name].spill_bytes)
    launches = launched(tmp_path)
    assert "product" in launches
    for name, (threads, dynamic) in launches.items():
        assert (found[name].threads, found[name].shared_bytes) == (threads, reported[name].shared_bytes + dynamic), name


def test_a_spill_is_seen(tmp_path):
    """128 x 128 sums in one warp are 512 registers a thread, which has 255."""
    x = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    found = kernel_resources(compile_for(gpu_mesh("h100"), product(128, 1), x, options=ptx_options(str(tmp_path))))
    assert found["product"].stack_bytes > 0 and found["product"].spill_bytes is None
    spilled = assembled(tmp_path, "sm_90a")["product"]
    assert spilled.spill_bytes and spilled.stack_bytes == found["product"].stack_bytes


def test_a_permute_that_is_waited_for_is_seen():
    mesh, sharded = gpu_mesh("h100", ring=4), PartitionSpec("ring")

    def shift(x):
        return lax.ppermute(x, "ring", [(i, (i + 1) % 4) for i in range(4)])

    def ring(x):
        coming = shift(x)
        own = lax.fori_loop(0, 7, lambda _, y: jnp.sin(y @ y), x)
        return own, shift(coming * 2)

    compiled = compile_for(
        mesh, ring, jax.ShapeDtypeStruct((1024, 256), jnp.float32), in_specs=sharded, out_specs=sharded
    )
    spans = permutes(compiled.as_text() or "")
    assert [span.bytes for span in spans] == [256 * 256 * 4] * 2
    # One of the two can be under way during the loop; the compiler keeps one at a time.
    assert sorted(span.hidden for span in spans) == [False, True]


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_every_kind_of_gpu_compiles(kind):
    compiled = compile_for(gpu_mesh(kind), product(64, 4), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert kernel_resources(compiled)["product"].registers > 0


def test_peak_memory_is_arguments_and_results_of_a_program_without_temporaries():
    x = jax.ShapeDtypeStruct((MiB,), jnp.float32)
    assert peak_bytes(compile_for(gpu_mesh("h100"), lambda x: x * 2, x)) == 8 * MiB


def test_devices_of_several_hosts():
    devices = gpu_topology("h100", devices=16, hosts=2).devices
    assert len(devices) == 16 and {device.process_index for device in devices} == {0, 1}


def test_a_session_that_started_without_the_compiler_is_told_so(repository):
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, cwd=repository, timeout=120)
    assert done.returncode != 0
    assert "call pallas_kernels.deviceless.prepare() before the first use of a device" in done.stderr
