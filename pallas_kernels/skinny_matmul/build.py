"""Compiles the native library into the user's cache folder: `python -m pallas_kernels.skinny_matmul.build`.

Needs a C++ compiler (CXX, or the first of c++, g++ and clang++ there is) and nothing else: headers come with jaxlib.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from pallas_kernels.skinny_matmul.library import FLAGS, SOURCE, library_path

COMPILERS = ("c++", "g++", "clang++")


def compiler() -> str | None:
    """The command to compile with: that of CXX alone where it is set."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ((wanted,) if wanted else COMPILERS))
    return next((path for path in found if path), None)


def build() -> Path:
    """The library, compiled if it is not there yet. Raises RuntimeError, one line, where that cannot be done."""
    path = library_path()
    if path.is_file():
        return path
    command = compiler()
    if command is None:
        raise RuntimeError(
            f"CXX={os.environ.get('CXX')!r}: no C++ compiler found (one of {', '.join(COMPILERS)}); install one, set "
            "CXX, or use implementation='xla'"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under a name of its own first: who looks meanwhile, or builds too, never sees half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        arguments = [command, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(fresh)]
        done = subprocess.run(arguments, capture_output=True, text=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
            raise RuntimeError(f"CXX={command!r} could not compile {SOURCE.name}: {first}; try another with CXX")
        fresh.replace(path)
    return path


def main() -> int:
    """The command."""
    try:
        path = build()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"skinny_matmul: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
