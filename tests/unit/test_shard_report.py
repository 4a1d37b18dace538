"""Reports of published sizes, against counts worked out from the published settings alone."""

from __future__ import annotations

from math import ceil

import jax
import pytest

from draftco_jax.distributed.sharding import TRAIN
from draftco_jax.errors import UserError
from draftco_jax.models.functional import initialise
from draftco_jax.models.hf_weights import save_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.shard_report import PUBLISHED, deal, report_of, shard_report

# Settings as the published config.json files have them, and nothing of our classes. D hidden, N and K heads, H head
# width, V vocabulary, E experts of width I, S width of the shared expert; `linear`: K heads, V heads, dk, dv, taps.
FACTS = {
    "qwen3-8b": {"V": 151936, "D": 4096, "N": 32, "K": 8, "H": 128, "layers": 36, "F": 12288},
    "qwen3-235b-a22b": {"V": 151936, "D": 4096, "N": 64, "K": 4, "H": 128, "layers": 94, "E": 128, "I": 1536},
    "qwen3.5-35b-a3b": {
        "V": 248320, "D": 2048, "N": 16, "K": 2, "H": 256, "layers": 40, "E": 256, "I": 512, "S": 512, "values": 32,
    },
    "qwen3.5-122b-a10b": {
        "V": 248320, "D": 3072, "N": 32, "K": 2, "H": 256, "layers": 48, "E": 256, "I": 1024, "S": 1024, "values": 64,
    },
    "nemotron3-30b-a3b": {
        "V": 131072, "D": 2688, "N": 32, "K": 2, "H": 128, "mamba": 23, "moe": 23, "attention": 6, "E": 128, "I": 1856,
        "S": 3712,
    },
    "gpt-oss-120b": {"V": 201088, "D": 2880, "N": 64, "K": 8, "H": 64, "layers": 36, "E": 128, "I": 2880},
}  # fmt: skip
# As the publishers count them, where they say: "117B", "235B", "30B" (of 31.6), "8.2B".
ROUNDED = {"qwen3-8b": 8.2e9, "qwen3-235b-a22b": 235e9, "gpt-oss-120b": 117e9, "nemotron3-30b-a3b": 31.6e9}


def by_component(name):
    """(experts, everything else) in numbers, formula by formula."""
    f = FACTS[name]
    d, q, kv = f["D"], f["N"] * f["H"], f["K"] * f["H"]
    rest = 2 * f["V"] * d + d  # embedding, head, final norm
    if name == "qwen3-8b":
        return 0, rest + f["layers"] * (2 * d * q + 2 * d * kv + 2 * f["H"] + 3 * d * f["F"] + 2 * d)
    if name == "qwen3-235b-a22b":
        experts = f["layers"] * f["E"] * 3 * d * f["I"]
        return experts, rest + f["layers"] * (2 * d * q + 2 * d * kv + 2 * f["H"] + d * f["E"] + 2 * d)
    if name == "gpt-oss-120b":
        experts = f["layers"] * f["E"] * (3 * d * f["I"] + 2 * f["I"] + d)
        attention = 2 * d * q + 2 * d * kv + q + 2 * kv + d + f["N"]  # biases of four projections, sinks
        return experts, rest + f["layers"] * (attention + d * f["E"] + f["E"] + 2 * d)
    if name == "nemotron3-30b-a3b":
        inner, channels, heads = 64 * 64, 64 * 64 + 2 * 8 * 128, 64
        mamba = d * (inner + channels + heads) + channels * (4 + 1) + 3 * heads + inner + inner * d
        moe = d * f["E"] + f["E"] + 2 * d * f["S"]
        blocks = f["mamba"] * mamba + f["moe"] * moe + f["attention"] * (2 * d * q + 2 * d * kv)
        norms = d * (f["mamba"] + f["moe"] + f["attention"])
        return f["moe"] * f["E"] * 2 * d * f["I"], rest + blocks + norms
    values, keys, heads = f["values"] * 128, 16 * 128, f["values"]
    channels = 2 * keys + values
    delta = d * channels + d * values + 2 * d * heads + channels * 4 + 2 * heads + 128 + values * d
    attention = 3 * d * q + 2 * d * kv + 2 * f["H"]  # each query head has a gate of its own width
    full = f["layers"] // 4
    each = d * f["E"] + 3 * d * f["S"] + d + 2 * d
    experts = f["layers"] * f["E"] * 3 * d * f["I"]
    return experts, rest + full * attention + (f["layers"] - full) * delta + f["layers"] * each


@pytest.fixture(scope="module")
def reports():
    return {name: shard_report(known.config(), known.sizes, known.rules) for name, known in PUBLISHED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_of_the_published_settings(name, reports):
    experts, others = by_component(name)
    total = reports[name].total.parameters
    assert total == experts + others
    assert experts == (reports[name].components["experts"].parameters if experts else 0)
    if name in ROUNDED:
        assert abs(total / ROUNDED[name] - 1) < 0.006


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "qwen3-8b"])
def test_a_device_has_its_share_of_the_experts_of_its_stage(name, reports):
    """Every expert is whole and on one device of the stage: layers with experts x experts / devices of the stage."""
    report, f = reports[name], FACTS[name]
    ranks = report.devices // report.sizes["stage"]
    one = by_component(name)[0] // (f.get("moe", f.get("layers")) * f["E"])
    local = report.components["experts"].local
    assert local % (one * f["E"] // ranks) == 0
    layers = local // (one * f["E"] // ranks)
    if "layers" in f:
        assert layers == ceil(f["layers"] / report.sizes["stage"])
    else:
        assert f["moe"] / report.sizes["stage"] <= layers <= f["moe"]


def test_bytes_of_qwen3_8b_by_hand(reports):
    """Tensor 2, stage 2: half of everything but norms, and half of the layers, and one of the two tables."""
    f, report = FACTS["qwen3-8b"], reports["qwen3-8b"]
    q, kv = f["N"] * f["H"], f["K"] * f["H"]
    layer = (2 * f["D"] * q + 2 * f["D"] * kv + 3 * f["D"] * f["F"]) // 2 + 2 * f["H"] + 2 * f["D"]
    local = 18 * layer + f["V"] * f["D"] // 2 + f["D"]  # the last stage: it has the final norm too
    total = report.total
    assert (report.stage, report.layers, total.local) == (1, (18, 18), local)
    assert (total.parameter_bytes, total.gradient_bytes, total.optimizer_bytes) == (2 * local, 4 * local, 12 * local)
    whole = shard_report(Qwen3Config.qwen3_8b(), {}, dtype="float32").total
    assert whole.local == whole.parameters and whole.bytes == 16 * whole.parameters


def test_key_value_heads_are_shared_and_tied_tables_are_on_both_ends():
    tiny = Qwen3Config.tiny()  # 2 layers, 4 query and 2 key-value heads of 32, width 128, tied
    spread = shard_report(tiny, {"tensor": 4, "stage": 2}, TRAIN)
    attention = 128 * 128 // 4 * 2 + 2 * 128 * 64  # q and o in four, k and v whole
    assert spread.components["attention"].local == attention
    assert spread.components["embedding and head"].local == 32 * 128 // 4
    assert deal(94, 4) == (24, 24, 23, 23)


def test_an_axis_of_experts_alone_divides_them():
    one = shard_report(Qwen3MoeConfig.tiny(), {"data": 2})
    two = shard_report(Qwen3MoeConfig.tiny(), {"data": 2, "expert": 2})
    assert two.components["experts"].local * 2 == one.components["experts"].local
    assert two.components["attention"].local == one.components["attention"].local


def test_bad_layouts_are_refused_in_one_line():
    tiny = Qwen3Config.tiny()
    for sizes, message in (
        ({"stage": 3}, r"stage=3 must be in 1\.\.2, the layers of the policy"),
        ({"rows": 2}, r"axes=\['rows'\] must be among"),
        ({"tensor": 3}, r"embed_tokens: vocab=32 must be a multiple of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_report(tiny, sizes)
    for name, axes, message in (
        ("qwen9", (), "must be a folder with a config.json, or one of: qwen3-8b"),
        ("qwen3-8b", ("tensor=0",), "'tensor=0' must be AXIS=SIZE"),
        ("qwen3-8b", ("tensor=5",), "must be a multiple of 5"),
        ("qwen3-8b", ("tensor=²",), "'tensor=²' must be AXIS=SIZE"),
        ("qwen3-8b", ("tensor=2", "tensor=4"), "'tensor=4': tensor must be given once"),
    ):
        with pytest.raises(UserError, match=message):
            report_of(name, axes)
    assert "8,190,735,360" in report_of("qwen3-8b", ("tensor=2",), "float32").table()


def test_a_folder_is_reported_by_its_config_alone(tmp_path):
    cfg = Qwen3Config.tiny()
    save_policy(tmp_path, cfg, initialise(cfg.build, jax.random.key(0))[1])
    (tmp_path / "model.safetensors").unlink()
    assert report_of(str(tmp_path), ("tensor=2",)).total == shard_report(cfg, {"tensor": 2}).total
