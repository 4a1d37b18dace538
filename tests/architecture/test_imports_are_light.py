"""Checks that importing is free of effects: no JAX backend starts, and only declared packages are needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

IMPORT_EVERYTHING = """
import importlib, pkgutil
import draftco_jax, pallas_kernels
for package in (draftco_jax, pallas_kernels):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends, f"an import started the backends {list(xla_bridge._backends)}"
jax.devices()
assert xla_bridge._backends, "this check looks at the wrong place: a started backend is not seen"
"""

# Where the import has another name than the distribution.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "jaxlib": "jax"}


def test_importing_every_module_starts_no_backend():
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_every_import_is_a_declared_dependency(package_sources, repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    # Triton kernels are only reached on a GPU, where the cuda12 extra is installed.
    declared = project["dependencies"] + project["optional-dependencies"]["cuda12"]
    known = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("-", "_") for line in declared}
    known |= {"draftco_jax", "pallas_kernels", *sys.stdlib_module_names}
    for source in package_sources:
        for name in source.imports:
            top = name.split(".")[0]
            needed = DISTRIBUTIONS.get(top, top).lower().replace("-", "_")
            assert needed in known, f"{source.path} imports {top}, which pyproject.toml does not declare"
