"""Compiling for GPUs on a machine without one, and reading what came out.

    mesh = gpu_mesh("h100", context=8)
    compiled = compile_for(mesh, function, *shapes, in_specs=..., out_specs=...)
    permutes(compiled.as_text())    what runs while keys travel
    orders(compiled.as_text())      the whole order of what is started, for a picture (`figure`)
    kernel_resources(compiled)      registers, stack and shared memory of each kernel
    peak_bytes(compiled)            memory of one device

Nothing here runs a kernel: it says what the compiler made, not how fast it is.
"""

from pallas_kernels.deviceless.compiling import compile_for, gpu_mesh, gpu_topology, peak_bytes
from pallas_kernels.deviceless.machine_code import KernelResources, cubin_resources, ptxas_resources
from pallas_kernels.deviceless.plugin import available, folder, prepare, ptxas
from pallas_kernels.deviceless.resources import kernel_resources, ptx_options
from pallas_kernels.deviceless.schedule import Order, PermuteSpan, PlacedPermute, Work, orders, permutes
from pallas_kernels.deviceless.targets import GPU_KINDS, GpuTarget, gpu_target

__all__ = [
    "GPU_KINDS",
    "GpuTarget",
    "KernelResources",
    "Order",
    "PermuteSpan",
    "PlacedPermute",
    "Work",
    "available",
    "compile_for",
    "cubin_resources",
    "folder",
    "gpu_mesh",
    "gpu_target",
    "gpu_topology",
    "kernel_resources",
    "orders",
    "peak_bytes",
    "permutes",
    "prepare",
    "ptx_options",
    "ptxas",
    "ptxas_resources",
]
