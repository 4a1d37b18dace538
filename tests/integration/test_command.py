"""Checks the `draftco` command on a real config and a real run, each in a process of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from draftco_jax.config_io import to_json


def test_train_help_is_a_command_of_its_own(environment):
    done = subprocess.run(
        [sys.executable, "-m", "draftco_jax.cli", "train", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert "--resume" in done.stdout and "example:\n  draftco train --config" in done.stdout


def test_config_prints_what_the_python_interface_loads(command, small, small_options):
    done = command("config", *small_options("seed=3"))
    assert done.code == 0 and done.err == ""
    assert json.loads(done.out) == to_json(small("seed=3"))


@pytest.mark.parametrize("arm", ["off", "cotrained"])
def test_report_is_written_anew_byte_for_byte(arm, command, finished, tmp_path):
    run_dir = tmp_path / arm  # the report names its directory
    shutil.copytree(finished(arm).run_dir, run_dir)
    written = (run_dir / "report.html").read_bytes()
    (run_dir / "report.html").unlink()
    done = command("report", run_dir)
    assert done.code == 0 and done.err == ""
    assert done.out == f"Report is {run_dir / 'report.html'}\n"
    assert (run_dir / "report.html").read_bytes() == written


def test_report_of_an_unfinished_run_is_written(command, unfinished_copy):
    run_dir = unfinished_copy("off")
    assert command("report", run_dir).code == 0
    assert "<html" in (run_dir / "report.html").read_text()


def test_report_of_something_else_is_refused(command, tmp_path, tree):
    done = command("report", tmp_path)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert f"run_dir={tmp_path}: no metrics.jsonl in it" in done.err and tree(tmp_path) == {}


def test_doctor_names_versions_and_devices(command, tmp_path):
    done = command("doctor", "--json", tmp_path / "doctor.json")
    assert done.code == 0 and done.err == ""
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["devices"] and found["devices"][0].startswith("cpu:0")
    assert re.search(rf"^jax +{re.escape(found['packages']['jax'])}$", done.out, re.MULTILINE)


def test_a_finished_run_is_answered_at_once(command, finished, small_options, tree):
    run_dir = finished("off").run_dir
    before = tree(run_dir)
    done = command("train", *small_options("speculation=off"), "--run-dir", run_dir, "--resume")
    assert done.code == 0 and done.err == ""
    assert done.out == f"Results are in {run_dir}: open {run_dir / 'report.html'}\n"
    assert tree(run_dir) == before
