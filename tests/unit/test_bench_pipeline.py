"""`draftco bench pipeline` from the command line, small: what it counts, what it draws, what it refuses."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from draftco_jax import bench_pipeline as bench
from draftco_jax import cli
from draftco_jax.bench_pipeline import counts, figure
from draftco_jax.pipeline.slack import timeline

KEYS = {
    "stages", "microbatches", "tokens", "teraflops", "jax", "kinds", "paper", "targets", "draft_critical_path",
    "draft_critical_path_all_over_last", "update_overhead", "flops", "tap_wait_share", "tap_wait_bandwidths",
    "tap_bytes_over_eq5", "tap_bytes_over_eq5_formula", "transports", "feature_bytes", "temp_bytes_by_microbatches",
    "host_staged_bytes",
}  # fmt: skip
PLOTS = {
    "ticks.svg", "tap_bytes.png", "executed_permutes.png", "temp_memory.png", "draft_critical_path.png",
    "update_overhead.png", "tap_wait.png",
}  # fmt: skip


def facts(stages, microbatches, memory_microbatches):
    """What programs say, in the shape that `tests/multidevice/test_bench_pipeline.py` gets from real ones."""
    names = ("all_stages", "last_stage", "relay", "host")
    row = {
        "tap_bytes": 150, "tap_permutes": 9, "activation_bytes": 80, "activation_permutes": 12, "eq5_bytes": 100,
    }  # fmt: skip
    memory = [
        {"schedule": schedule, "microbatches": m, "bytes": 900 + each * m, "tap_bytes_over_eq5": 1.0, "formula": 1.0}
        for schedule, each in (("1f1b", 0), ("gpipe", 20))
        for m in memory_microbatches
    ]
    return {
        "tap_bytes_over_eq5": dict.fromkeys(names, 1.5) | {"relay": 2.75, "host": 0.0},
        "tap_bytes_over_eq5_formula": dict.fromkeys(names, 1.5) | {"relay": 2.75, "host": 0.0},
        "transports": dict.fromkeys(names, row),
        "feature_bytes": 10,
        "temp_bytes_by_microbatches": memory,
        "host_staged_bytes": {"to_host": 100, "from_host": 100},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, the JSON and what was printed of one run that compiles nothing."""
    folder = tmp_path_factory.mktemp("bench")
    written = ["--json", str(folder / "a.json"), "--plots", str(folder / "plots")]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(bench, "_device_facts", lambda cfg: facts(cfg.stages, cfg.microbatches, cfg.memory_microbatches))
        assert cli.main(["bench", "pipeline", *written, "--set", "memory_microbatches=8,16"]) == 0
    return folder, json.loads((folder / "a.json").read_text()), said.getvalue()


def test_every_key_is_there_and_says_how_it_came_about(run):
    _, found, _ = run
    assert found.keys() == KEYS
    assert found["kinds"].keys() == KEYS - {"stages", "microbatches", "tokens", "teraflops", "jax", "kinds"}


def test_pictures_and_table(run):
    folder, found, said = run
    assert {path.name for path in (folder / "plots").iterdir()} == PLOTS
    for path in (folder / "plots").iterdir():
        assert path.read_bytes().startswith(b"<svg" if path.suffix == ".svg" else b"\x89PNG")
    bars = figure.draw(figure.tap_bytes, found).axes[0].patches
    assert [bar.get_height() for bar in bars[:4]] == [1.5, 1.5, 2.75, 0.0]
    assert bars[7].get_height() == 2.0, "there and back"
    memory = {line.get_label(): list(line.get_ydata()) for line in figure.draw(figure.temp_memory, found).axes[0].lines}
    assert memory == {"1f1b": [90.0, 90.0], "gpipe": [106.0, 122.0]}
    lines = said.splitlines()
    assert any("dflash, last stage" in line and "13.6%" in line for line in lines)
    assert any("dflash, all stages" in line and "5.0%" in line for line in lines)
    assert any("more micro-batch, gpipe" in line and " 2.00" in line for line in lines)
    assert lines[-1].endswith(f"written to {folder / 'a.json'} and {folder / 'plots'}")


def test_overheads_are_those_of_played_updates():
    """A head and a draft after each forward of the last stage, in ticks, by the event model."""
    microbatches, tokens = 6, 2048
    rows = counts.overhead_rows(microbatches, tokens)
    assert len(rows) == 2 * len(counts.drafts())
    for row in rows:
        costs, head = counts.stage_costs(2, tokens, row["counting"])
        cfg = counts.drafts()[row["family"]]
        draft = counts.draft_cost(cfg, tokens, row["counting"])

        def played(after, costs=costs):
            own = type(costs)(forward=costs.forward, backward=costs.backward, draft=after)
            return float(timeline("lockstep", stages=2, microbatches=microbatches, costs=own).makespan[0])

        assert row["last_stage"] == pytest.approx(played(head + draft) / played(head) - 1, rel=1e-9)
        assert row["last_stage_split"] == pytest.approx(played(head + draft / 2) / played(head) - 1, rel=1e-9)
        # Six micro-batches in rounds of two stages by two tensor ranks, the last not full: a draft for each round.
        drafts = 2 / microbatches * draft
        assert row["all_stages"] == pytest.approx((played(head / 2 + drafts) / played(head / 2)) - 1, rel=1e-9)


def test_a_draft_on_all_stages_is_a_quarter_on_four():
    found = counts.counted(4, 8, 20_480, 400.0)
    assert found["draft_critical_path_all_over_last"] == pytest.approx(0.25)
    assert found["draft_critical_path_all_over_last"] <= found["targets"]["draft_critical_path_all_over_last"]
    rows = counts.critical_path_rows(4, 9, 20_480)
    assert {row["tensor"] for row in rows} == {1, 2}
    for row in rows:
        assert row["ratio"] == pytest.approx({1: 3 / 9, 2: 2 / 9}[row["tensor"]]), "what is not full costs as much"


def test_waiting_falls_with_bandwidth_and_an_ideal_channel_waits_least():
    rows = {(row["family"], row["form"]): row["share"] for row in counts.wait_rows(4, 8, 20_480, 400.0)}
    for (family, form), share in rows.items():
        assert list(share) == sorted(share, reverse=True)
        if form.startswith("lockstep_"):
            assert all(a >= b - 1e-12 for a, b in zip(share, rows[family, "lockstep"], strict=True))
    # direct: sends of three ticks without a backward have nothing to hide behind; two features on one stage, 84 MB each
    tick = 4 * counts.stage_costs(4, 20_480, "executed")[0].forward / 400e12
    seconds = 2 * 20_480 / 2 * 4096 * 2 / 400e9
    draft = counts.draft_cost(counts.drafts()["dflash"], 20_480, "executed") / 400e12
    expected = 3 * seconds / (11 * tick + 8 * draft + 3 * seconds)
    assert rows["dflash", "lockstep_direct"][-1] == pytest.approx(expected, rel=1e-6)


def test_a_failing_process_is_not_hidden(monkeypatch):
    cfg = bench.BenchPipelineConfig(stages=2, microbatches=2, memory_microbatches=(2,))
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="stopped with code 1"):
        bench._device_facts(cfg)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pipeline", "--set", "stages=1"], "stages=1 must be 2 to 8"),
        (["pipeline", "--set", "microbatches=6"], "microbatches=6 and memory_microbatches=(8, 16, 32) must be"),
        (["pipeline", "--set", "tokens=0"], "tokens=0 and teraflops=400.0 must be > 0"),
        (["pipeline", "--json", "no/such/a.json"], "there is no folder no/such"),
        (["pipeline", "--plots", "README.md"], "--plots README.md cannot be made"),
        (["pipeline", "--plot", "a.png"], "--plot is an option of `draftco bench attention`"),
        (["drafts", "--plots", "a"], "--plots is an option of `draftco bench pipeline`"),
    ],
)
def test_bad_settings_are_refused_in_one_line(arguments, said, capsys, monkeypatch, repository):
    monkeypatch.chdir(repository)
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("draftco: ") and said in captured.err
