"""GPUs that a program can be compiled for without one: what the compiler has to know of each.

The figures are those of the target descriptions in openxla/xla, xla/backends/gpu/target_config/specs, without the
tables of arithmetic rates, which only steer autotuning.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

GPU_KINDS = ("h100", "h200", "b200", "gb200", "a100")


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One kind of GPU."""

    name: str
    """As the driver calls it."""
    capability: int
    """Major compute capability: 8 Ampere, 9 Hopper, 10 Blackwell."""
    accelerated: bool
    """Whether the instructions of this architecture alone may be used (sm_90a, sm_100a)."""
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """Float32 units of a multiprocessor."""
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: int
    """Bytes a second."""
    l2_bytes: int
    shared_per_core: int
    """Bytes of shared memory of a multiprocessor."""
    shared_per_block: int
    """The most of it that one block may ask for."""

    def text(self) -> str:
        """The description as the compiler reads it: a text proto."""
        extension = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core} shared_memory_per_block_optin: {self.shared_per_block}
  core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.memory_bandwidth} device_memory_size: {self.memory_bytes} l2_cache_size: {self.l2_bytes}
  cuda_compute_capability {{ major: {self.capability}{extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.name}"
"""


def gpu_target(kind: str) -> GpuTarget:
    """What is known of a kind of GPU."""
    if kind not in GPU_KINDS:
        raise ValueError(f"kind={kind!r} must be one of {GPU_KINDS}; add its figures to gpu_target")
    h100 = GpuTarget(
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        accelerated=True,
        cores=132,
        lanes=128,
        clock_ghz=1.98,
        memory_bytes=84942979072,
        memory_bandwidth=3352320000000,
        l2_bytes=52428800,
        shared_per_core=233472,
        shared_per_block=232448,
    )
    b200 = dataclasses.replace(
        h100,
        name="NVIDIA B200",
        capability=10,
        cores=148,
        clock_ghz=1.965,
        memory_bytes=191514411008,
        memory_bandwidth=7672320000000,
        l2_bytes=132644864,
    )
    if kind == "h100":
        return h100
    if kind == "h200":
        return dataclasses.replace(
            h100, name="NVIDIA H200 141GB HBM3e", memory_bytes=151397597184, memory_bandwidth=4800000000000
        )
    if kind == "b200":
        return b200
    if kind == "gb200":
        return dataclasses.replace(
            b200,
            name="NVIDIA GB200",
            cores=152,
            clock_ghz=2.062,
            memory_bytes=197897748480,
            memory_bandwidth=7928064000000,
            l2_bytes=135528448,
        )
    return GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        accelerated=False,
        cores=108,
        lanes=64,
        clock_ghz=1.41,
        memory_bytes=85100068864,
        memory_bandwidth=2039040000000,
        l2_bytes=41943040,
        shared_per_core=167936,
        shared_per_block=166912,
    )
