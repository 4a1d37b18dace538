"""Checks that the test session is as strict as tests/conftest.py means it to be."""

from __future__ import annotations

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

TOY = """
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
import jax
import numpy as np
from jaxtyping import Array, Float

@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    rate: float = 1
    depth: int = 2

class Record(NamedTuple):
    tokens: jax.Array

def total(x_BT: Float[Array, "batch tokens"], mask_BT: Float[Array, "batch tokens"]) -> Float[Array, ""]:
    return (x_BT * mask_BT).sum()
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A module that lies in draftco_jax as far as the import hook can tell."""
    import draftco_jax

    (tmp_path / "toy_of_the_session.py").write_text(TOY)
    monkeypatch.setattr(draftco_jax, "__path__", [*draftco_jax.__path__, str(tmp_path)])
    return importlib.import_module("draftco_jax.toy_of_the_session")


def test_shape_annotations_are_executed(toy):
    assert toy.total(jnp.ones((2, 3)), jnp.ones((2, 3))) == 6.0
    assert jax.jit(toy.total)(jnp.ones((2, 3)), jnp.ones((2, 3))) == 6.0
    with pytest.raises(Exception, match="mask_BT"):
        toy.total(jnp.ones((2, 3)), jnp.ones((2, 4)))


def test_dataclass_fields_are_checked_and_an_int_is_a_float(toy):
    assert toy.Config(rate=3).rate == 3
    with pytest.raises(Exception, match="depth"):
        toy.Config(depth="2")


def test_named_tuples_hold_numpy_or_device_arrays(toy):
    assert toy.Record(np.zeros(3)).tokens.shape == toy.Record(jnp.zeros(3)).tokens.shape


def test_silent_promotion_is_an_error():
    with pytest.raises(Exception, match="strict"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)
    with pytest.raises(Exception, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)
