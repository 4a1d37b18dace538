"""`draftco bench drafts` from the command line, as small as it can be: one prompt, one turn, one request."""

from __future__ import annotations

import json

from draftco_jax import bench_drafts, cli
from draftco_jax.drafts.catalog import FAMILIES


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


def test_bad_settings_are_refused_in_one_line(capsys):
    assert cli.main(["bench", "drafts", "--set", "repetitions=0"]) == 2
    assert cli.main(["bench", "drafts", "--set", "digits=9"]) == 2
    assert cli.main(["bench", "nothing"]) == 2
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if line.startswith("draftco: ")]
    assert len(told) == 3 and "repetitions=0 must be >= 1" in told[0] and "arithmetic9 is not shipped" in told[1]
