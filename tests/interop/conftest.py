"""Other projects' model classes, imported once and only where they are installed."""

from __future__ import annotations

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Shared
from draftco_jax.models.functional import abstract_params

VOCAB, WIDTH = 37, 32


def _found(module, name):
    pytest.importorskip("torch")
    pytest.importorskip(module.split(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optional kernels they cannot find
        return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="session")
def found_class():
    """(module, name) -> a class or function of a package; the test is skipped where that is not installed."""
    return _found


@pytest.fixture(scope="session")
def load_strictly():
    """(module, class, folder) -> the other project's model with the folder's weights.

    Its config comes from config.json by the class it names itself; no tensor may be missing and none may be left over.
    """

    def load(module, name, folder):
        cls = _found(module, name)
        from safetensors.torch import load_file

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cfg = cls.config_class.from_pretrained(folder)
            cfg._attn_implementation = "eager"
            model = cls(cfg).float().eval()
        result = model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        assert not result.missing_keys and not result.unexpected_keys
        assert cfg.architectures == [name]
        return model

    return load


@pytest.fixture(scope="session")
def shared() -> Shared:
    """The policy's tables."""
    rng = np.random.default_rng(0)
    return Shared(*(jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for s in ((VOCAB, WIDTH), (WIDTH, VOCAB))))


@pytest.fixture(scope="session")
def lively():
    """Config -> weights of such a size that attention is not flat, and norms that are not 1."""

    def make(cfg):
        rng = np.random.default_rng(1)

        def draw(leaf):
            noise = rng.normal(size=leaf.shape)
            return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[0] ** -0.5, leaf.dtype)

        return jax.tree.map(draw, abstract_params(cfg.build))

    return make
