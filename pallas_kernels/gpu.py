"""What the kernels of both ops share: what they run on, what they refuse, and Triton's lengths.

Both ops ask here, so that they agree on what a GPU is and fail with the same words.
"""

from __future__ import annotations

import math

import jax

GPUS = ("gpu", "cuda", "rocm")
"""Names that JAX has for platforms with Triton."""
MOST_NUMBERS = 2**31
"""Kernels count places in int32."""


def target_platform() -> str:
    """The platform this program is traced for: that of the mesh, of the default device, or of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        return jax.default_backend()
    return chosen if isinstance(chosen, str) else chosen.platform


def check_target(implementation: str, platform: str) -> None:
    """Refuses to be traced for anything but a GPU."""
    if platform not in GPUS:
        raise ValueError(
            f"implementation={implementation!r} must run on a GPU, not on platform={platform!r}; "
            "use 'blockwise', or 'pallas_interpret' to check the kernels"
        )


def check_interpreter(axes: frozenset[str]) -> None:
    """Refuses interpreted kernels where types are checked: JAX's interpreter makes loops of the wrong type there."""
    if axes:
        raise ValueError(
            f"check_vma=True over {sorted(axes)} must be False for 'pallas_interpret'; give shard_map check_vma=False, "
            "or use 'blockwise'"
        )


def check_sizes(**shapes: tuple[int, ...]) -> None:
    """Refuses arrays with more places than a kernel can count."""
    for name, shape in shapes.items():
        if math.prod(shape) >= MOST_NUMBERS:
            raise ValueError(f"{name}={shape} must have fewer than 2**31 numbers; split the rows")


def power_above(size: int) -> int:
    """The power of two that is >= size: Triton knows no other lengths."""
    return 1 << max(size - 1, 0).bit_length()
