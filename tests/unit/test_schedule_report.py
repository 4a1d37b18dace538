"""`draftco plan --draw-schedule`: what it says, writes and refuses."""

from __future__ import annotations

import json

import pytest

from draftco_jax import cli
from draftco_jax.errors import UserError
from draftco_jax.schedule_report import parse_stages, plan_schedule


def test_lines_say_what_a_schedule_needs():
    lines = plan_schedule("1f1b", stages=4, chunks=1, microbatches=8, tap_stages=[0, 1, 3]).lines()
    assert lines[0].endswith("bubble 27.3%")
    assert lines[1].splitlines()[4].startswith("s3")
    assert lines[2] == "Inputs kept, by stage: 7, 5, 3, 1"
    assert lines[3] == (
        "Mailbox slots of virtual stages 0, 1, 3: 3, 2, 0 with the draft on the last stage, "
        "7, 6, 4 with the draft on all stages"
    )
    assert len(plan_schedule("gpipe", stages=2, chunks=1, microbatches=2).lines()) == 3


def test_the_command_prints_and_writes(tmp_path, capsys):
    svg, file = tmp_path / "a.svg", tmp_path / "a.json"
    arguments = "plan --draw-schedule --schedule 1f1b --stages 2 --chunks 2 --microbatches 4 --tap-stages 0,2".split()
    assert cli.main([*arguments, "--svg", str(svg), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "F2a/B0b" in printed and printed.splitlines()[-1] == f"Written to {svg} and {file}"
    assert svg.read_text().startswith("<svg")
    found = json.loads(file.read_text())
    assert (found["ticks"], found["saved_inputs"]) == (12, [5, 3])
    assert found["mailbox_depths"] == {
        "0": {"all_stages": 3, "last_stage": 2},
        "2": {"all_stages": 2, "last_stage": 1},
    }
    assert found["forward"][4] == [[2, 0, 4], [1, 1, 2]] and found["forward"][0] == [[0, 0, 0], None]
    assert [phase["head"] for phase in found["phases"]] == [False, True, True, False]
    assert found["bubble_share"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "--draw-schedule"),
        (["plan", "--draw-schedule", "--chunks", "2", "--microbatches", "7"], "multiple of stages=4"),
        (["plan", "--draw-schedule", "--stages", "0"], "stages=0 must be >= 1"),
        (["plan", "--draw-schedule", "--tap-stages", "0,4"], "virtual_stage=4 must be in 0..3"),
        (["plan", "--draw-schedule", "--tap-stages", "a"], "--tap-stages a must be numbers"),
        (["plan", "--draw-schedule", "--tensor", "0"], "--tensor 0 must be >= 1"),
        (["plan", "--draw-schedule", "--svg", "no/such/folder/a.svg"], "--svg no/such/folder/a.svg cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_stages_are_numbers():
    assert parse_stages("0, 2,") == [0, 2] and parse_stages("") == []
    with pytest.raises(UserError, match="for example 0,1,2"):
        parse_stages("0;1")
