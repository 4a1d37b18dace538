from __future__ import annotations

import json

import pytest

from draftco_jax.decoding.cost_table import CostTable, measure
from draftco_jax.errors import UserError

SETTING = {"device": "cpu", "vocab_size": 32, "layers": 2}


class Clock:
    """Time that passes as rounds are run: rows + length seconds, the first run of each kind ten times that."""

    def __init__(self) -> None:
        self.now, self.runs = 0.0, dict[tuple[int, int], int]()

    def __call__(self) -> float:
        return self.now

    def round_of(self, rows: int, length: int):
        def run() -> None:
            count = self.runs[rows, length] = self.runs.get((rows, length), 0) + 1
            self.now += (rows + length) * {1: 10.0, 3: 7.0}.get(count, 1.0)

        return run


def test_the_median_of_rounds_after_the_first_is_kept():
    clock = Clock()
    table = measure(SETTING, (1, 4), (0, 2, 5), clock.round_of, repeats=3, clock=clock)
    assert table.seconds == ((1.0, 3.0, 6.0), (4.0, 6.0, 9.0))
    assert set(clock.runs.values()) == {4}
    assert table.array().shape == (2, 3)


def test_a_table_is_read_back_to_the_last_bit(tmp_path):
    table = CostTable(SETTING, (1, 2), (0, 3), ((0.1, 1 / 3), (2e-7, 0.30000000000000004)))
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json", dict(reversed(SETTING.items()))) == table


@pytest.mark.parametrize(
    "name, value", [("device", "H100"), ("layers", 3), ("dtype", "bfloat16"), ("vocab_size", "32")]
)
def test_a_table_of_another_setting_is_refused_in_one_line(tmp_path, name, value):
    path = tmp_path / "costs.json"
    CostTable(SETTING, (1,), (0,), ((0.1,),)).save(path)
    with pytest.raises(
        UserError, match=f"must be measured for {name}={value!r}, not for .*; delete it to measure anew"
    ) as caught:
        CostTable.load(path, SETTING | {name: value})
    assert "\n" not in str(caught.value)


BROKEN = (
    {"setting": {}, "rows": 1, "lengths": 1, "seconds": 1},
    {"setting": ["a"], "rows": [1], "lengths": [0], "seconds": [[1.0]]},
    {"setting": {}, "rows": [1, 2], "lengths": [0], "seconds": [[1.0], [1.0, 2.0]]},
)


@pytest.mark.parametrize("text", ["", "{}", "[1]", *map(json.dumps, BROKEN)])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(UserError, match="must be one that was saved by a run; delete it to measure anew"):
        CostTable.load(tmp_path / "costs.json", SETTING)


@pytest.mark.parametrize(
    "rows, lengths, seconds, message",
    [((2, 1), (0,), ((1,), (1,)), "rows="), ((1,), (0, 0), ((1, 1),), "lengths="), ((1,), (0, 1), ((1,),), "1 rows of"),
     ((1,), (0,), ((0.0,),), "numbers > 0"), ((1,), (0,), ((float("nan"),),), "numbers > 0"), ((), (0,), (), "rows=")],
)  # fmt: skip
def test_tables_that_are_no_table_are_refused(rows, lengths, seconds, message):
    with pytest.raises(UserError, match=message):
        CostTable(SETTING, rows, lengths, seconds)
