"""What `draftco bench pipeline` reads from updates of four stages, in a process that has the devices."""

from __future__ import annotations

import pytest

from draftco_jax import bench_pipeline as bench
from draftco_jax.bench_pipeline import programs

STAGES, MICROBATCHES = 4, 8


@pytest.fixture(scope="module")
def found():
    return programs.device_facts(STAGES, MICROBATCHES, ())


def test_features_send_the_bytes_of_their_formulas(found):
    """Taps: one on each stage, one more on the second; the final state is made on the last, as is its tap."""
    ticks = (MICROBATCHES + STAGES - 1) / MICROBATCHES
    remote = {"last_stage": 4 * MICROBATCHES, "all_stages": (4 + 2) * MICROBATCHES * (STAGES - 1) // STAGES}
    size = found["feature_bytes"]
    for name, row in found["transports"].items():
        assert row["eq5_bytes"] == size * remote["all_stages" if name == "all_stages" else "last_stage"]
    ratios = found["tap_bytes_over_eq5"]
    assert ratios["last_stage"] == ticks  # in every tick with a forward, also where there is nothing to send
    assert ratios["relay"] == ticks * (3 + 2 + 2 + 1) / 4  # hops of each
    assert ratios["all_stages"] == 1
    assert ratios["host"] == ticks * 3 * 4 / (4 * size)  # a count over three links in each tick
    assert ratios == pytest.approx(found["tap_bytes_over_eq5_formula"])


def test_permutes_beside_the_pipelines_own(found):
    """Ticks of the phases F, F and B, B: one hop, two hops, one hop."""
    rows = found["transports"]
    hops = (STAGES - 1) + 2 * MICROBATCHES + (STAGES - 1)
    assert {row["activation_permutes"] for row in rows.values()} == {hops}
    forwards = MICROBATCHES + STAGES - 1
    assert rows["last_stage"]["tap_permutes"] == 3 * forwards  # a permute a source
    assert rows["relay"]["tap_permutes"] == 3 * forwards  # links with 1, 3 and 4 features
    assert rows["host"]["tap_permutes"] == forwards
    assert rows["all_stages"]["tap_permutes"] == 2 * 3 * 2  # groups, distances, stages with 1 and with 2 features
    assert len({row["activation_bytes"] for row in rows.values()}) == 1


def test_host_staging_copies_every_remote_feature_there_and_back(found):
    eq5 = found["transports"]["host"]["eq5_bytes"]
    assert found["host_staged_bytes"] == {"to_host": eq5, "from_host": eq5}


@pytest.mark.slow
def test_memory_of_1f1b_does_not_grow_with_microbatches_and_that_of_gpipe_does():
    def growth(schedule):
        few, many = (programs.Program(2, count, schedule=schedule) for count in (8, 24))
        sent = few.traffic()
        assert sent["tap_bytes"] / sent["eq5_bytes"] == few.formula() == 1
        return (many.temp_bytes - few.temp_bytes) / 16 / programs.FEATURE_BYTES

    # What grows in 1f1b is the rows of tokens and labels, each a 64th of an activation.
    assert growth("1f1b") < 0.25
    assert growth("gpipe") > 1.0  # a saved input at least


def test_the_command_asks_no_other_process_where_there_are_devices(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "device_facts", lambda *question: {"asked": asked.append(question)})
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    bench._device_facts(bench.BenchPipelineConfig())
    assert asked == [(4, 8, (8, 16, 32))]
