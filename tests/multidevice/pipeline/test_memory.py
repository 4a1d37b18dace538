"""What the pipelined gradients need besides their arguments does not grow with micro-batches; nor does the program."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from draftco_jax.training.update import place_batch

# Wide enough that an activation outweighs a row's tokens and labels, of which M are held whatever the schedule.
WIDTHS = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
STAGES, LAYERS = 2, 4


@pytest.fixture(scope="module")
def lowered(cases):
    @functools.cache
    def get(microbatches, layers=LAYERS, **changes):
        policy = dataclasses.replace(cases.dense(layers), **WIDTHS)
        setup = cases.Setup(policy, cases.draft_configs(policy)["eagle3"])
        staged = setup.staged({"stage": STAGES}, microbatches=microbatches, **changes)
        spec = staged.spec
        rows = cases.batch_of_rows(microbatches)
        batch = place_batch(rows, spec.packed, staged.mesh, draft_cfg=setup.draft_cfg, pipeline=spec.pipeline)
        return staged.run.lower(setup.params(staged.policy), batch, setup.weight, None, None, setup.key)

    return get


@pytest.fixture(scope="module")
def temporary(lowered):
    """Bytes of one device beside arguments and results."""

    @functools.cache
    def get(microbatches, **changes):
        return lowered(microbatches, **changes).compile().memory_analysis().temp_size_in_bytes

    return get


@pytest.mark.parametrize("microbatches", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_memory_does_not_grow_with_micro_batches(temporary, microbatches):
    few, many = temporary(8), temporary(microbatches)
    assert 0.95 * few < many < 1.05 * few


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tap_mode": "post"}, {"schedule": "gpipe"}], ids=["post", "gpipe"])
def test_where_it_must_grow_it_does(temporary, cases, changes):
    """By what each micro-batch leaves: its features on the stage that makes most, or an input of its stage."""
    few, many = temporary(8, **changes), temporary(32, **changes)
    activation = cases.TOKENS * WIDTHS["hidden_size"] * 4
    assert many - few > (32 - 8) * activation, (few, many)
    assert many > 1.1 * few


@pytest.mark.parametrize(("microbatches", "layers"), [(32, LAYERS), (8, 2 * LAYERS)])
def test_the_program_is_no_longer_for_more_micro_batches_or_layers(lowered, microbatches, layers):
    lines = lambda *case: len(lowered(*case).as_text().splitlines())  # noqa: E731
    assert lines(microbatches, layers) == lines(8, LAYERS)
