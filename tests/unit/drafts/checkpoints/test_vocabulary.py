"""Which target ids a draft knows: from counts of rollout tokens, through offsets and back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.drafts import files
from draftco_jax.drafts.eagle3.checkpoint import load_draft, save_draft
from draftco_jax.drafts.vocabulary import graph_with_map, kept_ids, map_tensors, vocabulary_map
from draftco_jax.errors import UserError


@pytest.mark.parametrize(
    ("counts", "size", "kept"),
    [
        ([5, 0, 3, 3, 9], 3, [0, 2, 4]),  # ids 2 and 3 are tied: the smaller one is kept
        ([0, 0, 0, 0, 0], 2, [0, 1]),
        ([1, 1, 2, 2, 2], 4, [0, 2, 3, 4]),
        ([7], 1, [0]),
        ([0.5, 0.25, 0.75], 2, [0, 2]),  # weighed counts
    ],
)
def test_the_most_frequent_ids_are_kept_in_rising_order(counts, size, kept):
    ids = kept_ids(np.array(counts), size)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, kept)


def test_counts_are_not_rounded():
    counts = np.array([2**40, 2**40 + 1, 2**40 - 1])  # float32 holds none of these apart
    np.testing.assert_array_equal(kept_ids(counts, 1), [1])


@pytest.mark.parametrize(("counts", "size"), [([1, 2], 0), ([1, 2], 3), ([[1, 2]], 1)])
def test_sizes_that_no_vocabulary_has_are_refused(counts, size):
    with pytest.raises(ValueError, match=r"must be in 1\.\."):
        kept_ids(np.array(counts), size)


def test_bug_case_b21_ids_survive_the_way_through_offsets(make_draft):
    cfg = make_draft(draft_vocab_size=11).cfg
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = kept_ids(rng.random(cfg.vocab_size), cfg.draft_vocab_size)
        tensors = map_tensors(cfg, ids)
        assert tensors["t2d"].sum() == cfg.draft_vocab_size
        np.testing.assert_array_equal(vocabulary_map(cfg, tensors["d2t"], tensors["t2d"], "here"), ids)


def test_bug_case_b21_the_offsets_of_the_report(make_draft):
    cfg = make_draft(draft_vocab_size=3).cfg
    marks = np.isin(np.arange(19), [1, 4, 6])
    np.testing.assert_array_equal(vocabulary_map(cfg, np.array([1, 3, 4]), marks, "here"), [1, 4, 6])
    np.testing.assert_array_equal(vocabulary_map(cfg, np.zeros(3, np.int64), None, "here"), [0, 1, 2])


def test_bug_case_b21_ids_that_could_be_offsets_are_refused_without_marks(make_draft):
    cfg = make_draft(draft_vocab_size=3).cfg
    with pytest.raises(UserError, match="it may be target ids, but it holds offsets"):
        vocabulary_map(cfg, np.array([1, 4, 6]), None, "here")  # read as offsets: 1, 5, 8
    with pytest.raises(UserError, match="d2t and t2d name different"):
        vocabulary_map(cfg, np.array([1, 4, 6]), np.isin(np.arange(19), [1, 4, 6]), "here")


def test_bug_case_b19_a_full_vocabulary_is_the_identity_or_nothing(make_draft):
    cfg = make_draft().cfg
    tensors = map_tensors(cfg, None)
    assert not tensors["d2t"].any() and tensors["t2d"].all()
    assert vocabulary_map(cfg, tensors["d2t"], tensors["t2d"], "here") is None
    with pytest.raises(UserError, match="d2t and t2d name different"):
        vocabulary_map(cfg, tensors["d2t"], ~tensors["t2d"], "here")


def test_a_map_made_of_counts_goes_out_and_comes_back(make_draft, tmp_path):
    draft = make_draft(draft_vocab_size=11)
    ids = kept_ids(np.random.default_rng(1).integers(0, 9, 19), 11)
    save_draft(tmp_path, draft.cfg, graph_with_map(draft.cfg, ids), draft.params)
    np.testing.assert_array_equal(load_draft(tmp_path)[1].constants["draft_to_target"], ids)


# ---- files that every family meets ----


@pytest.fixture
def saved(make_draft, tmp_path):
    draft = make_draft(draft_vocab_size=11)
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params)
    return tmp_path


def test_shards_are_read_as_one_file(saved, make_draft, same_tree):
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + (i > 5)}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, saved / file)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    same_tree(load_draft(saved)[2], make_draft(draft_vocab_size=11).params)


def test_a_pickle_is_refused_with_the_way_out(saved, refused):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    refused(load_draft, saved, r"pytorch_model.bin is a pickle.*safetensors.torch.save_file")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_file_cut_short_is_named(share, saved, refused):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(load_draft, saved, "damaged or cut short")


def test_a_save_that_stops_midway_leaves_the_old_draft(saved, make_draft, monkeypatch, same_tree):
    def stop(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    draft = make_draft(draft_vocab_size=11)
    monkeypatch.setattr(files, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        save_draft(saved, replace(draft.cfg, rope_theta=7.0), draft.graph, draft.params)
    cfg, _, params = load_draft(saved)
    assert cfg == draft.cfg
    same_tree(params, draft.params)
