"""Files of problems: published layouts, and every row accounted for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from draftco_jax.data.problem_files import FileRules, read_problems
from draftco_jax.errors import UserError

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed (pip install 'draftco[parquet]')"
)

DAPO = FileRules(layout="dapo")


def lines(tmp_path: Path, rows: list, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", "utf-8")
    return path


def table(tmp_path: Path, rows: list[dict], name: str = "rows.parquet") -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name, row_group_size=3)
    return tmp_path / name


def dapo_row(question: str, answer: str | None, role: str = "user") -> dict:
    """The published columns."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": role}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "0"},
    }


def pairs(problems) -> list[tuple[str, str, int]]:
    return [(problem.question, problem.answer, problem.row) for problem in problems]


def test_json_lines_with_fields_of_any_name(tmp_path):
    path = lines(tmp_path, [{"problem": "2 + 2?", "solution": "4"}, "", {"problem": "a\u2028b?", "solution": 7}])
    problems, report = read_problems(path, FileRules(question_field="problem", answer_field="solution"))
    assert pairs(problems) == [("2 + 2?", "4", 1), ("a\u2028b?", "7", 3)]
    assert (report.rows, report.kept, report.first) == (2, 2, ())
    assert report.line() == f"{path}: 2 rows, 2 used"


def test_gsm8k_keeps_the_number_after_the_mark(tmp_path):
    rows = [
        {"question": "How many?", "answer": "There are 2 x 617 = <<2*617=1234>>1234.\n#### 1,234"},
        {"question": "Which?", "answer": "#### -0.50"},
    ]
    problems, _ = read_problems(lines(tmp_path, rows), FileRules(layout="gsm8k"))
    assert pairs(problems) == [("How many?", "1234", 1), ("Which?", "-0.50", 2)]
    for answer in ("1234", "#### 3/4", "#### 10:30", "#### 3 apples"):
        with pytest.raises(UserError, match="line 1 has an answer that does not end in #### and a number; correct it"):
            read_problems(lines(tmp_path, [{"question": "?", "answer": answer}]), FileRules(layout="gsm8k"))


@needs_pyarrow
def test_dapo_and_its_aime_are_read_by_their_columns_and_repeats_are_one(tmp_path):
    rows = [dapo_row(f"What is {i} + {i}?", str(2 * i)) for i in range(5)] * 4
    problems, report = read_problems(table(tmp_path, rows), DAPO)
    assert pairs(problems) == [(f"What is {i} + {i}?", str(2 * i), i) for i in range(5)]
    assert (report.rows, report.kept, report.duplicates, report.malformed) == (20, 5, 15, 0)
    assert report.first == ("row 5 repeats row 0", "row 6 repeats row 1", "row 7 repeats row 2")
    kept, _ = read_problems(table(tmp_path, rows), FileRules(layout="dapo", duplicates="keep"))
    assert len(kept) == 20


@needs_pyarrow
def test_any_table_is_read_by_the_names_of_two_columns(tmp_path):
    path = table(tmp_path, [{"ID": "1", "Problem": "3 x 7?", "Answer": 21}, {"ID": "2", "Problem": "?", "Answer": 0}])
    rules = FileRules(layout="parquet", question_field="Problem", answer_field="Answer")
    assert pairs(read_problems(path, rules)[0]) == [("3 x 7?", "21", 0), ("?", "0", 1)]


MALFORMED = ["{", "[]", {"question": "b?"}, {"question": " ", "answer": "1"}, {"question": "c?", "answer": 1.5}]


def test_malformed_rows_are_refused_with_their_line_or_counted(tmp_path):
    rows = [{"question": "a?", "answer": "1"}, *MALFORMED, {"question": "d?", "answer": "2"}]
    path = lines(tmp_path, rows)
    with pytest.raises(UserError, match="line 2 is not JSON; correct it, or set malformed=skip"):
        read_problems(path, FileRules())
    problems, report = read_problems(path, FileRules(malformed="skip"))
    assert pairs(problems) == [("a?", "1", 1), ("d?", "2", 7)]
    assert (report.rows, report.kept, report.malformed) == (7, 2, 5)
    said = "(line 2 is not JSON; line 3 is no object; line 4 has no text answer)"
    assert report.line() == f"{path}: 7 rows, 2 used, 5 malformed {said}"


def test_rows_say_truly_what_is_wrong_with_them(tmp_path):
    rows = [
        (r'{"question": "a\ud800?", "answer": "1"}', "line 1 has half a surrogate pair in question"),
        (r'{"question": "a?", "answer": "\udc00"}', "line 1 has half a surrogate pair in answer"),
        ('{"question": "a?", "answer": 0.5}', "line 1 has the float 0.5 as answer, not a text or a whole number"),
        ('{"question": "a?", "answer": ["1"]}', r"line 1 has the list \['1'\] as answer, not a text"),
        ('{"question": "a?", "answer": true}', "line 1 has the bool True as answer, not a text"),
    ]
    for row, said in rows:
        with pytest.raises(UserError, match=said):
            read_problems(lines(tmp_path, [row]), FileRules())


def test_whole_numbers_of_any_length_are_answers(tmp_path):
    digits = "9" * 5000  # more than Python turns into an integer
    path = lines(tmp_path, [f'{{"question": "a?", "answer": {digits}}}', '{"question": "b?", "answer": -7}'])
    assert [problem.answer for problem in read_problems(path, FileRules())[0]] == [digits, "-7"]


def test_a_byte_order_mark_is_no_text_and_a_carriage_return_ends_no_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a?",\r"answer": "1"}\r\n\r\n{"question": "b?", "answer": "2"}\r\n')
    assert pairs(read_problems(path, FileRules())[0]) == [("a?", "1", 1), ("b?", "2", 3)]


def test_repeats_and_contradictions_are_told_apart(tmp_path):
    rows = [("a?", "1"), ("b?", "2"), (" a? ", "1"), ("a?", "3"), ("b?", "2")]
    path = lines(tmp_path, [{"question": question, "answer": answer} for question, answer in rows])
    problems, report = read_problems(path, FileRules())
    assert pairs(problems) == [("a?", "1", 1), ("b?", "2", 2)]
    assert (report.duplicates, report.conflicting) == (2, 1)
    told = ("line 3 repeats line 1", "line 5 repeats line 2", "line 4 gives another answer to line 1")
    assert report.first == told
    kept, _ = read_problems(path, FileRules(duplicates="keep"))
    assert [problem.row for problem in kept] == [1, 2, 3, 5], "a contradiction is never kept"
    with pytest.raises(UserError, match="line 3 repeats line 1; correct it, or set duplicates=skip"):
        read_problems(path, FileRules(duplicates="refuse"))


@needs_pyarrow
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dapo_row("1 + 1?", None), "row 0 has no text ground_truth of reward_model"),
        (dapo_row("1 + 1?", "2", role="system"), "row 0 has a prompt by 'system', not by user"),
        (dapo_row("1 + 1?", "2") | {"prompt": []}, "row 0 has a prompt that is not one message"),
        (dapo_row("1 + 1?", "2") | {"prompt": "1 + 1?"}, "row 0 has a prompt that is not one message"),
        (dapo_row("1 + 1?", "2") | {"reward_model": None}, "row 0 has no text ground_truth of reward_model"),
        (dapo_row("1 + 1?", "2") | {"reward_model": "{}"}, "row 0 has a reward_model that is a str, not columns"),
        (dapo_row("1 + 1?", "2") | {"reward_model": ["2"]}, "row 0 has a reward_model that is a list, not columns"),
        ({"question": "1 + 1?", "answer": "2"}, "has the columns question, answer, not prompt, reward_model"),
    ],
)
def test_tables_of_another_shape_are_refused(row: dict, said: str, tmp_path):
    with pytest.raises(UserError, match=said) as caught:
        read_problems(table(tmp_path, [row]), DAPO)
    assert "\n" not in str(caught.value)


@needs_pyarrow
def test_files_that_are_no_such_files_are_refused_in_a_line(tmp_path):
    whole = table(tmp_path, [dapo_row(f"{i}?", "1") for i in range(9)]).read_bytes()
    cut, text, empty = tmp_path / "cut.parquet", tmp_path / "text.parquet", lines(tmp_path, [""])
    cut.write_bytes(whole[: len(whole) // 2])
    text.write_text("{}\n")
    for path in (cut, text, tmp_path / "absent.parquet", tmp_path):
        with pytest.raises(UserError, match="cannot be read as Parquet") as caught:
            read_problems(path, DAPO)
        assert "\n" not in str(caught.value)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.jsonl", binary, tmp_path):
        with pytest.raises(UserError, match="cannot be read as a text"):
            read_problems(path, FileRules())
    with pytest.raises(UserError, match="holds no problem in 0 rows of layout jsonl"):
        read_problems(empty, FileRules())


@pytest.mark.slow
def test_the_published_gsm8k_is_read_whole(repository):
    folder = repository.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("the files of GSM8K are not beside the repository")
    for name, rows in (("train", 7473), ("test", 1319)):
        problems, report = read_problems(folder / f"{name}.jsonl", FileRules(layout="gsm8k"))
        assert (report.rows, report.kept + report.duplicates, report.malformed) == (rows, rows, 0)
        assert all(float(problem.answer) == float(problem.answer.strip()) for problem in problems)
