"""Tests of the metrics files and of their cut at a resume."""

import json
import math

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from draftco_jax.errors import UserError
from draftco_jax.metrics import MetricsWriter, read_metrics, read_summary, write_summary, write_text_whole
from draftco_jax.types import StepReport


def write_steps(run_dir, steps, *, resume_step=None, offset=0.0):
    with MetricsWriter(run_dir, resume_step) as writer:
        for step in steps:
            writer.write(StepReport(step, {"policy_version": step, "reward/mean": step / 10 + offset}))


def steps_of(run_dir):
    return [record["step"] for record in read_metrics(run_dir)]


def read_events(run_dir):
    """(step, tag, value) of every scalar in the TensorBoard files; a record is length, crc, data, crc."""
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_steps_are_on_disk_when_write_returns_and_read_back_in_order(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.write(StepReport(1, {"reward/mean": 0.1 + 0.2, "rollout/tokens": 17}))
    assert read_metrics(tmp_path) == [{"step": 1, "reward/mean": 0.1 + 0.2, "rollout/tokens": 17}]
    writer.write(StepReport(2, {}))
    assert steps_of(tmp_path) == [1, 2]
    writer.close()


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(StepReport(1, {"a": math.nan, "b": math.inf, "c": -math.inf}))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf


def test_resume_cuts_the_steps_after_the_checkpoint(tmp_path):
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(6, 10), resume_step=5, offset=100.0)
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert [record["reward/mean"] > 50 for record in records] == [False] * 5 + [True] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_resume_leaves_the_kept_lines_byte_for_byte(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        for step in (1, 2, 3):
            writer.write(StepReport(step, {"a": 0.1 * step, "b": math.nan, "c": 1e-30, "d": step}))
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    MetricsWriter(tmp_path, 2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(before[:2])


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b'{"step": 3, "\xc3', b"\x00\x00\x00"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    write_steps(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert steps_of(tmp_path) == [1, 2]
    write_steps(tmp_path, [3], resume_step=2)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('broken\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(tmp_path)


def test_resume_before_any_step_starts_an_empty_file(tmp_path):
    write_steps(tmp_path, [1, 2], resume_step=0)
    write_steps(tmp_path, [1], resume_step=0)
    assert steps_of(tmp_path) == [1]


def test_a_new_run_refuses_a_directory_with_metrics(tmp_path):
    write_steps(tmp_path, [1])
    with pytest.raises(UserError, match=r"already holds metrics\.jsonl"):
        MetricsWriter(tmp_path, None)
    assert steps_of(tmp_path) == [1]


def test_missing_or_empty_metrics_are_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"run_dir=.*no metrics\.jsonl") as missing:
        read_metrics(tmp_path)
    MetricsWriter(tmp_path, None).close()
    with pytest.raises(UserError, match=r"no finished step") as empty:
        read_metrics(tmp_path)
    assert "\n" not in str(missing.value) + str(empty.value)


def test_tensorboard_holds_the_same_scalars(tmp_path):
    write_steps(tmp_path, [1, 2])
    events = list(read_events(tmp_path))
    assert (1, "policy_version", 1.0) in events
    assert [step for step, tag, _ in events if tag == "reward/mean"] == [1, 2]


def test_summary_is_replaced_whole_and_read_back(tmp_path):
    assert read_summary(tmp_path) == {}
    summary = {"name": "demo", "missing": None, "bad": math.nan, "nested": {"table": [{"k": np.float32(0.5)}]}}
    path = write_summary(tmp_path, {"old": 1})
    assert write_summary(tmp_path, summary) == path == tmp_path / "summary.json"
    read = read_summary(tmp_path)
    assert math.isnan(read.pop("bad"))
    assert read == {"name": "demo", "missing": None, "nested": {"table": [{"k": 0.5}]}}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_broken_summary_is_one_clear_line(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: not JSON"):
        read_summary(tmp_path)


def test_a_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "file"
    write_text_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_whole(path, "\ud800")
    assert path.read_text() == "old"
