"""`draftco bench drafts` and `pipeline` from the command line, as small as they can be: one prompt, one turn, one
request; two stages and micro-batches."""

from __future__ import annotations

import json

import pytest

from draftco_jax import bench_drafts, cli
from draftco_jax.drafts.catalog import FAMILIES


@pytest.mark.slow
def test_bench_drafts_prints_one_json_object_with_every_family(monkeypatch, capsys):
    for name in ("_EVALUATION_PROMPTS", "_REMEMBERED_PROMPTS", "_CALLS_PER_TURN"):
        monkeypatch.setattr(bench_drafts, name, 1)
    settings = [word for s in ("digits=2", "repetitions=1", "draft_length=2") for word in ("--set", s)]
    assert cli.main(["bench", "drafts", "--json", *settings]) == 0
    found = json.loads(capsys.readouterr().out)  # nothing else is printed
    assert found["families"].keys() == FAMILIES.keys() and found["not_shipped"] == []
    for name, row in found["families"].items():
        assert 1 <= row["accepted_length"] <= 3, name
        assert row["draft_length"] == 2 and 0 <= (row["acceptance_rate"] or 0) <= 1, name
        assert row["rounds_per_second"] > 0 and row["tokens_per_second"] > 0 and row["speedup"] > 0, name
    assert found["plain"]["tokens_per_second"] > 0


@pytest.mark.slow
def test_bench_pipeline_compiles_its_updates_in_a_process_of_its_own(capsys):
    settings = [w for s in ("stages=2", "microbatches=2", "memory_microbatches=2") for w in ("--set", s)]
    assert cli.main(["bench", "pipeline", "--json", *settings]) == 0
    found = json.loads(capsys.readouterr().out)
    ratios = found["tap_bytes_over_eq5"]
    assert ratios["relay"] == ratios["last_stage"] == (2 + 1) / 2, "two stages have one link"
    assert ratios["all_stages"] == 1.0  # one group, sent once, late
    assert ratios == pytest.approx(found["tap_bytes_over_eq5_formula"])
    assert set(found["host_staged_bytes"].values()) == {found["transports"]["host"]["eq5_bytes"]}


def test_bad_settings_are_refused_in_one_line(capsys):
    assert cli.main(["bench", "drafts", "--set", "repetitions=0"]) == 2
    assert cli.main(["bench", "drafts", "--set", "digits=9"]) == 2
    assert cli.main(["bench", "nothing"]) == 2
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("draftco: ")]
    assert len(told) == 3 and "repetitions=0 must be >= 1" in told[0] and "arithmetic9 is not shipped" in told[1]
