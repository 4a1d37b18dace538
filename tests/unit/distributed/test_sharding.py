"""The table of logical axes: what is split, between which parts, and what is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import pytest
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec

from draftco_jax.distributed.axes import MeshAxis, make_mesh
from draftco_jax.distributed.sharding import (
    ROLLOUT,
    TRAIN,
    Stated,
    local_shape,
    partition_spec,
    partition_specs,
    stated_parameters,
    with_axes,
)
from draftco_jax.errors import UserError
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.layers import parameter
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
DELTA = Qwen35MoeConfig(
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=8,
    num_experts=4,
    **SIZES,
)
MAMBA = NemotronHConfig(
    num_hidden_layers=4,
    block_types=("mamba", "attention", "moe", "mlp"),
    mamba_num_heads=4,
    mamba_head_dim=4,
    ssm_state_size=8,
    n_groups=2,
    moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=8,
    n_routed_experts=4,
    **SIZES,
)
SINKS = GptOssConfig(num_hidden_layers=2, layer_types=("sliding_attention", "full_attention"), num_experts=4, **SIZES)


def abstract(cfg):
    return nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0)))


def specs_of(cfg, sizes, rules=TRAIN):
    """By dotted tree path."""
    flat = traverse_util.flatten_dict(partition_specs(abstract(cfg), rules, sizes))
    return {".".join(map(str, path)): spec for path, spec in flat.items()}


def test_a_tensor_axis_splits_heads_hidden_widths_and_the_vocabulary():
    specs = specs_of(DELTA, {"tensor": 2, "data": 4})
    columns, vector, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec("tensor")
    linear, full, experts = "layers.0.linear_attn.", "layers.1.self_attn.", "layers.0.mlp."
    expected = {
        "embed_tokens": rows,
        "lm_head.kernel": columns,
        "norm.weight": PartitionSpec(),
        linear + "in_proj_qkv.q.kernel": columns,
        linear + "in_proj_qkv.v.kernel": columns,
        linear + "conv1d.k.weight": rows,
        linear + "A_log": vector,
        linear + "norm.weight": PartitionSpec(),
        linear + "out_proj.kernel": rows,
        full + "qkv.q_proj.kernel": columns,
        full + "qkv.k_proj.kernel": columns,
        full + "q_norm.weight": PartitionSpec(),
        full + "o_proj.kernel": rows,
        experts + "gate.kernel": PartitionSpec(),
        experts + "experts.gate_proj": PartitionSpec(None, None, "tensor"),
        experts + "experts.down_proj": PartitionSpec(None, "tensor"),
        experts + "shared_expert.down_proj.kernel": rows,
        experts + "shared_expert_gate.kernel": PartitionSpec(),
    }
    assert {name: specs[name] for name in expected} == expected


def test_experts_come_before_their_hidden_width_where_both_ask_for_one_axis():
    specs = specs_of(SINKS, {"tensor": 2}, with_axes(TRAIN, {"expert": "tensor"}))
    assert specs["layers.0.mlp.experts.gate_up_proj"] == PartitionSpec("tensor")
    assert specs["layers.0.mlp.experts.down_proj_bias"] == PartitionSpec("tensor")
    both = specs_of(SINKS, {"tensor": 2, "context": 2}, with_axes(TRAIN, {"expert": ("context", "tensor")}))
    assert both["layers.0.mlp.experts.gate_up_proj"] == PartitionSpec(("context", "tensor"))
    apart = specs_of(SINKS, {"tensor": 2, "expert": 2})
    assert apart["layers.0.mlp.experts.gate_up_proj_bias"] == PartitionSpec("expert", "tensor")


def test_key_value_heads_fewer_than_the_ranks_stay_whole():
    specs = specs_of(SINKS, {"tensor": 4})
    assert specs["layers.0.self_attn.qkv.k_proj.kernel"] == PartitionSpec()
    assert specs["layers.0.self_attn.qkv.v_proj.bias"] == PartitionSpec()
    assert specs["layers.0.self_attn.sinks"] == PartitionSpec("tensor")


@pytest.mark.parametrize(
    ("cfg", "sizes", "message"),
    [
        (MAMBA, {"tensor": 4}, r"mixer.A_log: mixer_heads=2 must be a multiple of 4, .*\('tensor',\); use a smaller"),
        (DELTA, {"tensor": 8}, r"linear_attn.A_log: mixer_heads=2 must be a multiple of 8"),
        (SINKS, {"tensor": 3}, r"heads=4 must be a multiple of 3|kv_heads=2 must be a multiple of 3, .* or divide it"),
        (SINKS, {"expert": 3}, r"experts.down_proj: expert=4 must be a multiple of 3"),
    ],
    ids=["groups", "key heads", "heads", "experts"],
)
def test_what_cannot_be_split_evenly_is_refused_by_name(cfg, sizes, message):
    with pytest.raises(ValueError, match=message):
        specs_of(cfg, sizes)


def test_parts_are_not_cut_though_the_dim_could_be():
    """24 columns are 3 heads of 8: two ranks would have a head and a half each."""
    stated = Stated((16, 24), "float32", ("embed", "heads"), (("heads", 3),))
    with pytest.raises(ValueError, match=r"a\.b: heads=3 must be a multiple of 2"):
        partition_spec(("a", "b"), stated, TRAIN, {"tensor": 2})
    pairs = Stated((4, 16, 6), "float32", ("expert", "embed", "mlp_pairs"), (("mlp_pairs", 3),))
    with pytest.raises(ValueError, match=r"mlp_pairs=3 must be a multiple of 2"):
        partition_spec(("a",), pairs, TRAIN, {"tensor": 2})


def test_stacked_layers_go_over_the_stages():
    stated = Stated((6, 16, 24), "float32", ("layers", "embed", "heads"), (("heads", 3),))
    assert partition_spec(("a",), stated, TRAIN, {"stage": 2, "tensor": 3}) == PartitionSpec("stage", None, "tensor")
    assert partition_spec(("a",), stated, TRAIN, {"tensor": 3}) == PartitionSpec(None, None, "tensor")
    assert partition_spec(("a",), stated, ROLLOUT, {"stage": 2}) == PartitionSpec()
    assert local_shape(stated.shape, PartitionSpec("stage", None, "tensor"), {"stage": 2, "tensor": 3}) == (3, 16, 8)
    assert local_shape((8, 5), PartitionSpec(("a", "b")), {"a": 2, "b": 2}) == (2, 5)


@pytest.mark.parametrize("cfg", [DELTA, MAMBA, SINKS], ids=lambda cfg: type(cfg).__name__)
def test_every_parameter_states_axes_that_both_tables_know(cfg):
    module = abstract(cfg)
    stated = stated_parameters(module)
    params = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    assert len(stated) == len(params)
    named = {axis for one in stated.values() for axis in one.logical_axes}
    assert named <= TRAIN.keys() & ROLLOUT.keys()


def test_unknown_and_missing_axes_are_refused():
    stated = Stated((4,), "float32", ("strange",))
    with pytest.raises(ValueError, match=r"x: logical axis 'strange' must be in the table"):
        partition_spec(("x",), stated, TRAIN, {})

    class Plain(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jax.numpy.zeros(2))

    with pytest.raises(ValueError, match=r"weight has no logical_axes; make it with models.layers.parameter"):
        stated_parameters(Plain())
    with pytest.raises(ValueError, match=r"axes=.* must name each dim"):
        parameter(nnx.Rngs(0), (2, 3), ("embed",), nnx.initializers.zeros)


def test_meshes_are_made_in_the_order_of_the_axes_or_refused():
    mesh = make_mesh({"tensor": 1, "data": 1})
    assert mesh.axis_names == ("data", "tensor")
    for sizes, message in (
        ({"rows": 1}, "axes=['rows'] must be among"),
        ({"tensor": 0}, "tensor=0 must be >= 1; leave the axis out"),
        ({"data": 10**6}, "take 1000000 devices but there are"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make_mesh(sizes)
    assert [str(axis) for axis in MeshAxis] == ["data", "stage", "context", "expert", "tensor"]


@pytest.mark.parametrize(("in_use", "platform"), [(True, "cpu"), (False, "cpu"), (True, "gpu")])
def test_a_mesh_of_cpu_devices_and_programs_kept_on_disk_are_refused_together(in_use, platform, monkeypatch):
    """What XLA's CPU loads from there it runs wrongly: `make_mesh`."""
    config = {"jax_compilation_cache_dir": "/tmp/programs", "jax_enable_compilation_cache": in_use}
    monkeypatch.setattr("draftco_jax.distributed.axes.jax.config", SimpleNamespace(**config))
    mesh = make_mesh({"data": 1}, jax.devices()[:1])  # of one device, which collectives do not leave
    monkeypatch.setattr("draftco_jax.distributed.axes.Mesh", lambda *_: mesh)
    several = [SimpleNamespace(platform=platform)] * 2
    if in_use and platform == "cpu":
        with pytest.raises(UserError, match=r"^jax_compilation_cache_dir=/tmp/programs must .* 2 CPU .*=0$"):
            make_mesh({"data": 2}, several)
    else:
        assert make_mesh({"data": 2}, several) is mesh
