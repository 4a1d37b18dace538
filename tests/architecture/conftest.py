"""Parses the repository's Python files once for all architecture tests."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("draftco_jax", "pallas_kernels")


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the repository."""
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Its dotted name; a package's is that of its folder."""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def imports(self) -> set[str]:
        """Dotted names of all it imports, at the top or inside functions, relative imports resolved."""
        package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*start, *([node.module] if node.module else [])])
                names |= {f"{origin}.{alias.name}" for alias in node.names}
        return names


def _read(folder: str) -> list[Source]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    texts = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    return [Source(path, text, ast.parse(text)) for path, text in texts]


@pytest.fixture(scope="session")
def package_sources() -> list[Source]:
    """The files of the two packages."""
    return [source for package in PACKAGES for source in _read(package)]


@pytest.fixture(scope="session")
def all_sources(package_sources) -> list[Source]:
    """The files of the packages, the tests and the configs, and whatever else of ours is Python."""
    return package_sources + [source for folder in ("tests", "configs", "launch") for source in _read(folder)]
