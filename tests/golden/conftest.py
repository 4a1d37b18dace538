"""Where the golden files are."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden files."""
    return Path(__file__).resolve().parent / "data"
