"""Checkpoint folders as others write them, and one way to ask for a refusal."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from draftco_jax.errors import UserError


@pytest.fixture(scope="session")
def write_files():
    """(folder, config, tensors) -> the folder; None as a value leaves a key or a tensor out."""

    def write(folder, config, tensors):
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def refused():
    """(load, folder, pattern, ...) : loading stops with one line that says this, and the folder stays as it is."""

    def check(load, folder, pattern, *args):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UserError, match=pattern) as caught:
            load(folder, *args)
        assert "\n" not in str(caught.value)
        assert before == {path.name: path.read_bytes() for path in folder.iterdir()}

    return check


@pytest.fixture(scope="session")
def same_tree():
    """Two trees are equal bit for bit, dtypes too."""

    def check(found, wanted):
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    return check
