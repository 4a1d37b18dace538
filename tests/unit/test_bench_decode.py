"""`draftco bench decode`: what it makes of known times and texts, what it prints and draws, and a small real run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import types

import jax
import numpy as np
import pytest

from draftco_jax import bench_decode as bench
from draftco_jax import cli
from draftco_jax.bench_decode import cells, figure, machine, overhead, pairs, peer, table
from draftco_jax.decoding.engine import Engine, Request, no_context
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.growth import check_growth
from draftco_jax.models.transformer import count_parameters
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import Rollouts

KEYS = {
    "digits", "step_matmul", "sizes", "cells", "overhead", "overhead_share", "speedup", "accepted_length",
    "draft_length", "worst_over_plain", "over_transformers", "over_transformers_by_policy", "over_transformers_reason",
    "date", "hardware", "versions",
}  # fmt: skip
PROMPT, WRITTEN, STOP = [2, 7, 8], [5, 6, 6, 9, 4, 3, 11, 12, 1], 1
SECONDS = {  # of a turn; a decode of 8 tokens after the first takes 8 s plainly and 4 s with three drafts
    "0": [12.0], "3": [6.0], "5": [7.0], "plain": [10.0, 10.0, 90.0], "prefill_plain": [2.0, 40.0, 2.0],
    "speculative": [6.0, 5.0, 42.0], "prefill_speculative": [2.0, 2.0, 2.0], "peer_plain": [40.0, 40.0, 40.0],
    "peer_assisted": [20.0, 50.0, 20.0],
}  # fmt: skip


class ToyEngine(Engine):
    """Writes WRITTEN, or as much of it as there is room for."""

    def __init__(self, sampling, room):
        self.sampling, self.room = sampling, room

    def generate(self, policy_weights, draft_weights, request, draft_length=0):
        assert (draft_weights is None) == (draft_length == 0)
        text, batch = WRITTEN[: self.room], len(request.prompts)
        rounds = math.ceil((len(text) - 1) / (draft_length + 1)) if draft_length else 0
        row = PROMPT + text + [0] * (9 - len(text))
        count = lambda n: np.full((batch,), n, np.int32)  # noqa: E731
        return Rollouts(
            tokens=np.array([row] * batch, np.int32),
            prompt_lengths=count(len(PROMPT)),
            lengths=count(len(PROMPT) + len(text)),
            logprobs=np.zeros((batch, len(row)), np.float32),
            finished=count(1) > 0,
            rounds=count(rounds),
            committed=count(len(text) - 1 if draft_length else 0),
            accepted=np.ones((batch, draft_length), np.int32),
            proposed=count(rounds * draft_length),
        )


class ToyPair(pairs.Pair):
    name, published = "tiny", types.SimpleNamespace(policy={}, draft={})
    shape = types.SimpleNamespace(max_new_tokens=9, stop_ids=(STOP,), pad_id=0)

    def __init__(self):
        pass

    def engine(self, sampling, max_new_tokens=9):
        return ToyEngine(sampling, max_new_tokens)

    def turns(self, batch, first, count, key):
        prompts, lengths = np.array([PROMPT] * batch), np.full((batch,), len(PROMPT))
        return [[Request(prompts, lengths, jax.random.split(key, batch), no_context(batch))]] * count


class ToyPeer(peer.Peer):
    def __init__(self):
        pass

    def generate(self, prompts, *, new_tokens, stops, pad, assisted=False):
        assert (new_tokens, stops, pad) == (9, (STOP,), 0)
        return peer.Texts([WRITTEN if prompts[0] == PROMPT else []] * len(prompts))


@pytest.fixture
def measure(monkeypatch):
    """(config, sampling, batch, peer) -> a cell of the toy pair at the times above."""

    def compare(calls, repetitions):
        for _ in range(repetitions + 1):
            for call in calls.values():
                call()
        return {name: SECONDS[name][:repetitions] for name in calls}

    monkeypatch.setattr(cells, "compare", compare)
    return lambda cfg, sampling, batch, other=None: cells.measure_cell(cfg, ToyPair(), sampling, batch, other)


def config(**changes):
    return bench.BenchDecodeConfig(
        **({"draft_lengths": (3, 5), "repetitions": 3, "choosing_turns": 1, "policies": ("tiny",)} | changes)
    )


def test_speeds_leave_out_the_prefill_and_its_stalls(measure):
    row = measure(config(), "greedy", 2)
    assert row["choices"]["3"] == {"over_plain": 2.0, "accepted_length": 4.0}
    assert row["draft_length"] == 3 and row["accepted_length"] == 4.0
    plain, fast = row["plain"], row["speculative"]
    assert plain["prefill_milliseconds"] == 2000 and plain["step_milliseconds"] == 1000
    assert plain["tokens_per_second"] == 2.0, "two requests, 8 tokens each in 8 s"
    assert plain["tokens_per_second_with_prefill"] == pytest.approx(1.8)
    assert fast["step_milliseconds"] == 2000, "two rounds of four tokens in 4 s"
    assert row["speedup"] == pytest.approx(88 / 40), "the median of 8 / 4, 8 / 3 and 88 / 40"
    assert row["speedup_with_prefill"] == pytest.approx(2.0), "the median of 10 / 6, 10 / 5 and 90 / 42"
    assert row["greedy_texts_as_plain"] == 1.0
    assert row["transformers"] is row["over_transformers"] is None


def test_the_peer_is_taken_at_its_faster_way_turn_by_turn(measure):
    row = measure(config(), "greedy", 1, ToyPeer())
    assert row["over_transformers"] == pytest.approx(20 / 6), "the median of 20 / 6, 40 / 5 and 20 / 42"
    assert row["transformers"]["assisted"]["texts_as_ours"] == 1.0
    assert measure(config(), "greedy", 2, ToyPeer())["transformers"].keys() == {"plain"}, "it assists one at a time"
    assert measure(config(), "temperature_1", 1, ToyPeer())["transformers"] is None


def test_plain_decoding_is_kept_where_no_length_wins_clearly(measure, monkeypatch):
    monkeypatch.setitem(SECONDS, "3", [11.5])
    monkeypatch.setitem(SECONDS, "5", [12.5])
    row = measure(config(), "temperature_1", 2)
    assert row["choices"]["3"]["over_plain"] == pytest.approx(12 / 11.5)
    assert (row["draft_length"], row["speedup"], row["accepted_length"]) == (0, 1.0, None)
    assert "speculative" not in row


def test_turns_of_choosing_and_of_measuring_share_no_prompt_and_no_key():
    pair = pairs.shipped_pair()
    asked = pair.turns(2, 0, 2, jax.random.key(0)) + pair.turns(2, 2, 1, jax.random.key(0))
    assert [len(turn) for turn in asked] == [8, 8, 8]
    keys = {bytes(jax.random.key_data(request.keys).tobytes()) for turn in asked for request in turn}
    rows = {tuple(row) for turn in asked for request in turn for row in np.asarray(request.prompts).tolist()}
    assert len(keys) == 24 and len(rows) == 48
    assert pair.engine(SamplingConfig(), 1) is pair.engine(SamplingConfig(), 1)


def test_rungs_of_the_ladder_have_the_parameters_they_are_called_by():
    shipped = pairs.shipped_pair()
    assert 0.38e6 < shipped.describe()["parameters"] < 0.42e6 and shipped.grown("0.4M") is shipped
    for name, size in (("10M", 10e6), ("50M", 50e6)):
        cfg = dataclasses.replace(shipped.policy_cfg, **pairs.LADDER[name])
        check_growth(shipped.policy_cfg, cfg)
        assert count_parameters(abstract_params(cfg.build)) == pytest.approx(size, rel=0.05)
        wider = dataclasses.replace(shipped.draft_cfg, hidden_size=cfg.hidden_size)
        draft = abstract_params(wider.build)
        assert count_parameters(draft) - count_parameters(draft["fc"]) < 0.05 * size, "a pass stays cheap"


def found_of(rows, why=None):
    cfg = config(batches=tuple(sorted({row["batch"] for row in rows})))
    part = {"policy": "tiny", "batch": 1, "draft_length": 3, "share": 0.07, "verify_over_step": 2.1}
    part["milliseconds"] = {"round": 5.0}
    found = {"step_matmul": "xla", "cells": rows, "overhead": part, "overhead_share": 0.07}
    return found | bench._headlines(cfg, rows, why) | machine.describe_machine(0.5)


def test_headlines_table_and_picture(measure, tmp_path):
    rows = [
        measure(config(), sampling, batch, ToyPeer()) for batch in (1, 8) for sampling in ("greedy", "temperature_1")
    ]
    found = found_of(rows)
    assert found["speedup"]["tiny"]["8"] == pytest.approx({"greedy": 2.2, "temperature_1": 2.2})
    assert found["worst_over_plain"] == pytest.approx(2.2)
    assert found["over_transformers"] == pytest.approx({"1": 20 / 6, "8": 40 / 6})
    json.dumps(found)
    lines = table.table(found).splitlines()
    assert lines[1].split() == ["tiny", "1", "greedy", "3", "4.00", "1", "2", "2.20x", "2000.0", "ms", "3.33"]
    assert "7.0% are outside" in lines[5] and "load 0.50" in lines[6]
    assert "2.20x" in table.last_line(found)
    axes = figure.draw(found).axes
    assert [bar.get_height() for bar in axes[0].patches] == pytest.approx([2.2] * 4)
    assert {line.get_label() for line in axes[1].lines} >= {"plain", "transformers", "transformers, assisted"}
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        figure.write_figure(found, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_without_the_peer_the_reason_stands_there(measure):
    found = found_of([measure(config(), "greedy", 1)], "torch not installed")
    assert found["over_transformers"] is None and found["over_transformers_reason"] == "torch not installed"
    assert "not measured (torch not installed)" in table.table(found)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert peer.missing() == "torch not installed: pip install 'draftco[interop]'"
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: name)
    assert peer.missing() is None
    assert peer._until([4, 1, 0, 1], [7, 1]) == [4, 1] and peer._until([4, 7, 1], [7, 1]) == [4, 7]
    assert peer._until([4, 5], [1]) == peer._until([4, 5], []) == [4, 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "policies=7B"], "policies=('7B',) must name some of tiny, 0.4M, 10M, 50M"),
        (["--set", "batches=0"], "batches=(0,) must be numbers >= 1"),
        (["--set", "repetitions=0"], "repetitions=0 must be >= 1"),
        (["--ranks", "2"], "--ranks is an option of `draftco bench attention`"),
        (["--plot", "a.pdf"], "--plot a.pdf must end in .png or .svg"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert cli.main(["bench", "decode", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.slow
def test_a_small_real_run_from_the_command_line(tmp_path):
    said = io.StringIO()
    written = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    with contextlib.redirect_stdout(said):
        assert cli.main(["bench", "decode", "--fast", *written, "--set", "peer=false"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found.keys() == KEYS and (tmp_path / "a.svg").is_file()
    assert found["over_transformers"] is None and found["over_transformers_reason"] == "left out by peer=false"
    for row in found["cells"]:
        assert row["choices"]["3"]["accepted_length"] > 2.5, "the grown draft drafts as the shipped one"
        assert row["greedy_texts_as_plain"] in (None, 1.0)
    part = found["overhead"]
    assert part["policy"] == "tiny" and 0 < part["milliseconds"]["policy_1_token"] < part["milliseconds"]["round"]
    assert overhead.SAMPLING == "temperature_1" and "outside the two forwards" in said.getvalue()
