"""The native library: where it lies once it is built, and how JAX learns of it. Nothing is compiled here (`build`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("native.cc")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
"""No -march: the same file runs on every processor of its kind, which picks its path when it is called. No contraction:
the portable path would round differently from one compiler to the next."""

TARGET = "draftco_skinny_matmul"
_SYMBOL = "DraftcoSkinnyMatmul"


def library_path() -> Path:
    """Where the library belongs: under XDG_CACHE_HOME, by default ~/.cache.

    The name carries all that goes into it (source, flags, version of the headers, kind of processor), so that a library
    of another version is never taken for this one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "draftco" / f"skinny_matmul-{_digest()}.so"


def registered() -> bool:
    """Whether JAX knows the native implementation; a library that was built is loaded and registered, once."""
    if not library_path().is_file():
        return False
    _register()
    return True


@functools.cache
def _digest() -> str:
    made_of = (SOURCE.read_text(), FLAGS, metadata.version("jaxlib"), platform.system(), platform.machine())
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


@functools.cache
def _register() -> None:
    function = getattr(ctypes.CDLL(str(library_path())), _SYMBOL)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(function), platform="cpu")
