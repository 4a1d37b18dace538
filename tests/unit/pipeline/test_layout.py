"""Layers on stages: stretches, the slots that all stages share, and the way of the parameters there and back."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from draftco_jax.models.functional import abstract_params, graph_of, initialise
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.pipeline.layout import NOTHING, from_stages, split_layers, to_stages
from draftco_jax.pipeline.staged import RoutedSlots, StagedDecoder, tap_slots


def check(layout, kinds):
    """Every layer once, in order, at a slot of its kind."""
    found = [layer for row in layout.table for layer in row if layer != NOTHING]
    assert found == list(range(len(kinds)))
    for row in layout.table:
        assert all(kinds[layer] == layout.kinds[slot] for slot, layer in enumerate(row) if layer != NOTHING)
        assert any(layer != NOTHING for layer in row)


def test_equal_layers_need_no_slot_beyond_the_longest_stage():
    layout = split_layers(("a",) * 10, stages=4)
    assert [sum(x != NOTHING for x in row) for row in layout.table] == [3, 3, 2, 2]
    assert len(layout.kinds) == 3
    check(layout, ("a",) * 10)


def test_chunks_take_turns_and_entries_keep_a_stage_together():
    layout = split_layers(("a",) * 8, stages=2, chunks=2)
    assert layout.table == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [layout.entry(k) for k in range(4)] == [0, 2, 1, 3], "stage 0 holds entries 0 and 1: virtual stages 0 and 2"
    assert [layout.stage_of(layer) for layer in (0, 3, 7)] == [0, 1, 3]


def test_a_pattern_cut_at_its_period_has_no_slot_too_many():
    layout = split_layers(("d", "d", "d", "a") * 4, stages=2)
    assert len(layout.kinds) == 8


def test_a_pattern_cut_elsewhere_has_slots_that_some_stages_pass():
    kinds = ("d", "d", "d", "a") * 2
    layout = split_layers(kinds, stages=2, counts=(3, 5))
    check(layout, kinds)
    assert layout.kinds in (("d", "d", "d", "a", "d"), ("a", "d", "d", "d", "a"))


@pytest.mark.parametrize("trial", range(40))
def test_any_pattern_and_any_counts_are_covered(trial):
    rng = np.random.default_rng(trial)
    stages, chunks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    counts = rng.integers(1, 5, stages * chunks)
    kinds = tuple(rng.choice(["a", "b", "c"], int(counts.sum())))
    layout = split_layers(kinds, stages=stages, chunks=chunks, counts=[int(c) for c in counts])
    check(layout, kinds)
    assert [sum(x != NOTHING for x in row) for row in layout.table] == list(counts)
    assert len(layout.kinds) <= len(kinds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, r"stages=0 \* chunks=1 must be from 1 to 4"),
        ({"stages": 3, "chunks": 2}, r"stages=3 \* chunks=2 must be from 1 to 4"),
        ({"stages": 2, "counts": (1, 2)}, r"layers_per_stage=\(1, 2\) must be 2 numbers >= 1 that add up to 4"),
        ({"stages": 2, "counts": (0, 4)}, r"layers_per_stage=\(0, 4\)"),
    ],
)
def test_bad_splits_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message):
        split_layers(("a",) * 4, **changes)


@pytest.mark.parametrize(
    ("cfg", "stages", "chunks", "counts"),
    [
        (replace(Qwen3Config.tiny(), num_hidden_layers=5), 2, 2, None),
        (Qwen35MoeConfig.tiny(), 2, 1, None),
        (NemotronHConfig.tiny(), 3, 1, None),
    ],
)
def test_parameters_go_there_and_back_bit_for_bit(cfg, stages, chunks, counts):
    layout = split_layers(cfg.layer_kinds, stages=stages, chunks=chunks, counts=counts)
    policy = jax.tree.map(np.asarray, initialise(cfg.build, jax.random.key(0))[1])
    staged = to_stages(policy, layout)
    abstract = abstract_params(lambda rngs: StagedDecoder(cfg, layout, rngs=rngs))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), staged) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    back = from_stages(staged, layout)
    assert jax.tree.structure(back) == jax.tree.structure(policy)
    jax.tree.map(np.testing.assert_array_equal, back, policy)


def test_slots_without_a_layer_hold_zeros():
    layout = split_layers(("block",) * 3, stages=2)
    cfg = replace(Qwen3Config.tiny(), num_hidden_layers=3)
    staged = to_stages(initialise(cfg.build, jax.random.key(0))[1], layout)
    kernel = np.asarray(staged["stages"][0][0]["mlp"]["down_proj"]["kernel"])
    assert kernel[:, :, 0].any(axis=-1).tolist() == [[True, True], [True, False]]
    assert not kernel[1, 1].any()


def test_taps_are_numbered_within_their_stage():
    layout = split_layers(("a",) * 8, stages=2, chunks=2)
    slots, most = tap_slots(layout, (1, 4, 5))
    assert most == 2
    nowhere = np.iinfo(np.int32).max
    assert slots.tolist() == [[nowhere, 0], [nowhere, nowhere], [0, 1], [nowhere, nowhere]]


def test_layers_with_experts_are_found_at_their_slots():
    cfg = NemotronHConfig.tiny()
    layout = split_layers(cfg.layer_kinds, stages=2)
    policy = graph_of(lambda rngs: StagedDecoder(cfg, layout, rngs=rngs))
    module = policy.merge(abstract_params(lambda rngs: StagedDecoder(cfg, layout, rngs=rngs)))
    routed = RoutedSlots.of(module)
    experts = [layer for layer, kind in enumerate(cfg.block_types) if kind == "moe"]
    assert routed.layers == len(experts)
    found = [experts[rank] for row, here in zip(routed.ranks, routed.here, strict=True) for rank in row[here]]
    assert sorted(found) == experts
