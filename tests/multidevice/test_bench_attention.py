"""What `draftco bench attention` reads from programs of eight devices, in a process that has them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from draftco_jax import bench_attention as bench
from draftco_jax.bench_attention import devices

RANKS = 8


@pytest.fixture(scope="module")
def found():
    def ask(*question):
        raise AssertionError("this process has eight devices and needs no other")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_ask", ask)
        return bench._device_facts(bench.BenchAttentionConfig(ranks=RANKS))


def test_the_forward_ring_sends_the_bytes_of_the_formula_whatever_the_branches(found):
    assert found["ring_forward_bytes_over_formula"] == dict.fromkeys(devices.BRANCHES, 1.0)
    # 2 (C-1) (N/C) d_kv b
    expected = 2 * (RANKS - 1) * (devices.TOKENS // RANKS) * devices.KV_HEADS * devices.WIDTH * 4
    assert found["ring_forward_bytes_formula"] == expected


def test_bytes_of_three_passes(found):
    rows = {(row["mode"], row["what"]): row for row in found["passes_bytes"]}
    one = found["ring_forward_bytes_formula"]
    assert rows["replay", "forward"]["bytes"] == rows["replay", "forward"]["formula"] == 3 * one
    assert rows["gathered", "forward"]["bytes"] == rows["gathered", "forward"]["formula"] == one
    both = rows["gathered", "forward and backward"]
    assert both["bytes"] == both["formula"] == 2 * one  # float32 keys there, float32 gradients home
    both = rows["replay", "forward and backward"]
    # Each pass sends its first hop twice, to see it and to go back, and all of them send the same: XLA may do it once.
    assert both["formula"] == 9 * one and 0 <= both["formula"] - both["bytes"] <= (2 * 3 - 1) * one // (RANKS - 1)


def test_bytes_of_the_baseline_are_its_exchanges_and_its_shorter_ring(found):
    """A pass exchanges q, k, v and out, and sends keys of `ulysses` ranks with a share of the heads `ring` - 1 times.

    Queries of a rank: its tokens, HEADS and WIDTH float32 numbers; keys and values are repeated to `ulysses` heads.
    """
    rows = {row["ulysses"]: row for row in found["usp_bytes"]}
    assert {u: row["ring"] for u, row in rows.items()} == {1: 8, 2: 4, 4: 2}
    head = devices.TOKENS // RANKS * devices.WIDTH * 4
    for ulysses, row in rows.items():
        kv = 2 * max(devices.KV_HEADS, ulysses)
        assert row["exchanged_bytes"] == 3 * (2 * devices.HEADS + kv) * head * (ulysses - 1) // ulysses
        # Two ring ranks: all passes send the same one hop, and XLA sends it once.
        assert row["ring_bytes"] == (1 if row["ring"] == 2 else 3) * (row["ring"] - 1) * kv * head
    assert rows[1]["over_ours"] == 1.0  # one ring of eight, like ours


def test_no_anchor_is_dropped_and_a_dropped_one_would_be_counted(found, monkeypatch):
    assert (found["anchors_dropped"], found["anchors_added"]) == (0, 0)
    assert found["anchors_whose_block_crosses_ranks"] > 0
    select = devices.select_anchors

    def forgetful(key, ahead, cfg):
        anchors, keep = select(key, ahead, cfg)
        return anchors, keep & (ahead.packed.ranks == 1) | keep & (anchors > anchors[:, :1])  # not a rank's first

    monkeypatch.setattr(devices, "select_anchors", forgetful)
    broken = devices.anchor_facts(Mesh(np.array(jax.devices()), (devices.AXIS,)), 0)
    assert broken["anchors_dropped"] > 0 and broken["anchors_added"] == 0
