"""Loads a config from a Python file with a ``get_config`` function."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from draftco_jax.errors import UserError

T = TypeVar("T")


def load_python_config(path: str | Path, expected: type[T]) -> T:
    """Runs the file, calls its ``get_config()``, returns what that gives, which must be an ``expected``.

    A config file may import its neighbours by their bare names, to be derived from one by ``dataclasses.replace``.

    Raises UserError, with the line in the file where there is one, for everything that can be wrong with the file.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--config {path}: there is no such file")
    try:
        with _neighbours_importable(path.resolve().parent):
            get_config = runpy.run_path(str(path), run_name="draftco_config").get("get_config")
            config = get_config() if callable(get_config) else None
    except Exception as error:  # whatever a user's file raises
        raise UserError(_told(error, str(path))) from error
    if not callable(get_config):
        raise UserError(f"{path} must define a function get_config() that returns a {expected.__name__}")
    if not isinstance(config, expected):
        raise UserError(f"{path}: get_config() must return a {expected.__name__}, it gave a {type(config).__name__}")
    return config


@contextmanager
def _neighbours_importable(folder: Path) -> Iterator[None]:
    """Puts the folder on the import path, then takes away every trace, so that equal names elsewhere do not clash."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin and Path(origin).parent == folder:
                del sys.modules[name]


def _told(error: Exception, path: str) -> str:
    """One line: the file, the line of it that was running, what was wrong."""
    syntax = isinstance(error, SyntaxError)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = error.lineno if syntax and error.filename == path else next(reversed(lines), None)
    what = " ".join((error.msg if syntax else str(error)).split())
    # A component's own check already says everything; of any other exception the kind matters too.
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{path}:{line}: {kind}{what}" if line else f"{path}: {kind}{what}"
