"""Tests of a draft config's own rules, and of its fit to a policy."""

from __future__ import annotations

import dataclasses

import pytest

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.qwen3 import Qwen3Config

POLICY = Qwen3Config.tiny()
FITTING = Eagle3Config.for_target(POLICY)


def test_a_draft_made_for_a_policy_fits_it_and_reads_the_usual_layers():
    FITTING.check_target(POLICY)
    assert FITTING.tap_layers == (0, 1)
    assert Eagle3Config.for_target(Qwen3Config.qwen3_8b()).tap_layers == (1, 17, 32)
    assert Eagle3Config.for_target(POLICY, tap_layers=(1,), passes=7).tap_layers == (1,)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"vocab_size": 64, "draft_vocab_size": 32}, "vocab_size=64"),
        ({"hidden_size": 64}, "hidden_size=64"),
        ({"tap_layers": (0, 2)}, r"tap_layers=\(0, 2\)"),
        # B40: a draft that ends before the policy does.
        ({"max_position_embeddings": 32}, "max_position_embeddings=32"),
    ],
)
def test_a_draft_that_cannot_read_the_policy_is_refused(changes, pattern):
    with pytest.raises(ValueError, match=pattern):
        dataclasses.replace(FITTING, **changes).check_target(POLICY)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"tap_layers": ()}, r"tap_layers=\(\)"),
        ({"tap_layers": (1, 1)}, r"tap_layers=\(1, 1\)"),
        ({"tap_layers": (-1, 0)}, r"tap_layers=\(-1, 0\)"),
        ({"draft_vocab_size": 33}, "draft_vocab_size=33"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"passes": 0}, "passes=0"),
        ({"pass_decay": 0.0}, "pass_decay=0.0"),
    ],
)
def test_values_that_mean_nothing_are_refused(changes, pattern):
    with pytest.raises(ValueError, match=pattern):
        dataclasses.replace(FITTING, **changes)
