"""`draftco bench attention --fast` from the command line, small: what it counts, what it draws, what it refuses."""

from __future__ import annotations

import json

import pytest

from draftco_jax import bench_attention as bench
from draftco_jax import cli
from draftco_jax.bench_attention import counts, figure, table

KEYS = {
    "ranks", "seed", "fast", "jax", "tile", "kinds", "paper", "ring_forward_bytes_over_formula",
    "ring_forward_bytes_formula", "passes_bytes", "usp_bytes", "work_max_over_mean", "parallel_efficiency",
    "parallel_efficiency_256k_c8", "padded_usp_work_ratio_c2", "padded_usp_work_ratio_c4", "padded_usp_work_ratio_c8",
    "padded_usp_work_ratio", "padding_alone_work_ratio", "padded_tokens_over_real", "critical_path",
    "paper_usp_milliseconds", "anchors_kept_c1", "anchors_dropped", "anchors_added",
    "anchors_whose_block_crosses_ranks", "peak_bytes_per_rank", "peak_bytes_per_rank_reason", "cpu_milliseconds",
    "cpu_blockwise_over_dense", "cpu_branch_over_block",
}  # fmt: skip
MEMORY = [
    {"program": "three_passes", "tokens": tokens, "ranks": ranks, "bytes": 25e3 * tokens / ranks}
    for tokens, ranks in [*((n, 2) for n in counts.CONTEXTS), (counts.LONG_TOKENS, 1)]
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder and the JSON of one run; this process has one device, so the rings are compiled by another one."""
    folder = tmp_path_factory.mktemp("bench")
    written = ["--json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    settings = [word for s in ("documents=64", "tokens=128", "repetitions=1") for word in ("--set", s)]
    assert cli.main(["bench", "attention", "--fast", "--ranks", "2", *written, *settings]) == 0
    return folder, json.loads((folder / "a.json").read_text())


def test_every_key_is_there_and_says_how_it_came_about(run):
    _, found = run
    assert found.keys() == KEYS
    assert found["kinds"].keys() == KEYS - {"ranks", "seed", "fast", "jax", "kinds"}
    assert found["peak_bytes_per_rank"] is None and "--fast" in found["peak_bytes_per_rank_reason"]


def test_figures_of_the_design(run):
    _, found = run
    assert found["parallel_efficiency_256k_c8"] >= 0.98
    assert found["padded_usp_work_ratio_c2"] >= 3.8
    assert found["padded_usp_work_ratio_c2"] < found["padding_alone_work_ratio"]
    assert found["padded_tokens_over_real"] == pytest.approx(2.25, rel=1e-3)
    assert set(found["ring_forward_bytes_over_formula"].values()) == {1.0}
    assert (found["anchors_dropped"], found["anchors_added"]) == (0, 0) and found["anchors_kept_c1"] > 1000
    assert found["anchors_whose_block_crosses_ranks"] > 0, "rows in which nothing crosses would show little"


def test_balance_of_every_mix_and_layout(run):
    _, found = run
    rows = {(row["documents"], row["ranks"]): row for row in found["work_max_over_mean"]}
    assert rows.keys() == {(mix, c) for mix in ("one_64k", "paper_mix_64", "short_512") for c in (1, 2, 4, 8)}
    for (_, ranks), row in rows.items():
        # The slowest rank is at least the mean one, its steps' slowest at least that.
        for name in ("zigzag", "stripes", "picked", "contiguous"):
            assert 1 <= row[name] <= row[f"{name}_critical_over_mean"] + 1e-12
        others = [row[f"{name}_critical_over_mean"] for name in ("zigzag", "stripes")]
        # Picked in tiles, as these are; what wins may have more work in all, since tiles at stripes' ends are cut.
        assert row["picked_critical_over_mean"] <= 1.01 * min(others) and (ranks > 1 or row["picked"] == 1)
    long = rows["one_64k", 8]
    assert long["zigzag"] == 1 and long["picked_layout"] == "zigzag"
    assert long["contiguous"] == pytest.approx(2 - 1 / 8, rel=2e-3)  # one tile of the 64 a rank has
    assert rows["paper_mix_64", 8]["picked_layout"] == "stripes of 128"


def test_padded_usp_in_pairs_and_in_tiles(run):
    _, found = run
    for row in found["padded_usp_work_ratio"]:
        # Tiles add to both sides; ours have more borders of documents.
        assert 0.94 < row["over_picked_in_tiles"] / row["over_picked"] < 1
        assert row["over_zigzag"] < row["over_picked"]
    at_8 = {row["ring"]: row["over_picked"] for row in found["padded_usp_work_ratio"] if row["ranks"] == 8}
    for ring, value in at_8.items():
        assert value / at_8[1] == pytest.approx(2 - 1 / ring)


def test_one_constant_gives_the_papers_nine_times():
    rows = counts.usp_milliseconds()
    assert len(rows) == 9 and rows[0]["from_count"] == rows[0]["printed"]
    assert max(abs(row["printed"] / row["from_count"] - 1) for row in rows) < 0.09


def test_timed_kernels_have_medians_between_their_quartiles(run):
    _, found = run
    ops = {(row["op"], row["implementation"]) for row in found["cpu_milliseconds"]}
    assert ops == {("block", "blockwise"), ("block", "dense"), ("branch", "blockwise")}
    for row in found["cpu_milliseconds"]:
        assert 0 < row["lower_quartile"] <= row["median"] <= row["upper_quartile"]
        assert row["wall_median"] > 0
    assert found["cpu_blockwise_over_dense"]["128"] > 0 and found["cpu_branch_over_block"]["128"] > 0


def test_the_plot_shows_the_counts_and_memory_where_there_is_some(run):
    folder, found = run
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    work, efficiency, memory = figure.draw(found).axes
    assert "no memory: --fast" in memory.texts[0].get_text() and not memory.lines
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in work.lines}
    assert drawn["packed row, zigzag"] == [row["zigzag"] for row in found["critical_path"]]
    assert list(efficiency.lines[0].get_ydata()) == [row["zigzag"] for row in found["parallel_efficiency"]]
    with_memory = found | {"peak_bytes_per_rank": MEMORY}
    memory = figure.draw(with_memory).axes[2]
    assert list(memory.lines[0].get_ydata()) == [row["bytes"] / 1e9 for row in MEMORY[:-1]]
    figure.write_figure(with_memory, folder / "b.svg")
    assert "<svg" in (folder / "b.svg").read_text()
    assert "6.55" in table.table(with_memory) and "53.2 measured" in table.table(with_memory)


def test_a_missing_compiler_is_said(monkeypatch):
    monkeypatch.setattr(bench.deviceless, "available", lambda: False)
    found = bench._memory(bench.BenchAttentionConfig(), lambda text: None)
    assert found["peak_bytes_per_rank"] is None and "make setup" in found["peak_bytes_per_rank_reason"]


def test_a_failing_process_is_not_hidden():
    with pytest.raises(RuntimeError, match="what='nothing' must be 'devices' or 'h100'"):
        bench._ask("nothing")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--ranks", "3"], "ranks=3 must be 2, 4 or 8"),
        (["attention", "--ranks", "0"], "ranks=0 must be 2, 4 or 8"),
        (["attention", "--plot", "a.pdf"], "--plot a.pdf must end in .png or .svg"),
        (["attention", "--plot", "no/such/a.png"], "there is no folder no/such"),
        (["attention", "--json", "no/such/a.json"], "there is no folder no/such"),
        (["attention", "--set", "documents=4"], "documents=(4,) must be >= 8"),
        (["attention", "--set", "repetitions=0"], "repetitions=0 must be >= 1"),
        (["attention", "--set", "heads=2"], "heads"),
        (["drafts", "--ranks", "0"], "--ranks is an option of `draftco bench attention`"),
        (["drafts", "--plot", "a.png"], "--plot is an option of `draftco bench attention` and `draftco bench decode`"),
        (["drafts", "--fast"], "--fast is an option of `draftco bench attention` and `draftco bench decode`"),
    ],
)
def test_bad_settings_are_refused_in_one_line(arguments, said, capsys):
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("draftco: ") and said in captured.err
