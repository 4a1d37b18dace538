"""Heads whose body is blocks of a policy family: packed rows, gradients, rollouts, configs and files."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.config import config_registry
from draftco_jax.config_io import from_json, to_json
from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.mtp.checkpoint import load_mtp, save_mtp
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.mtp.training import denominator, steps_loss
from draftco_jax.models.families import policy_configs
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

KEY = jax.random.key(0)
CONTEXT = TrainingContext(sampling=SamplingConfig(temperature=0.7), chunk_tokens=32, draft_length=9, tile=5)
TINY = {cls.__name__: cls.tiny() for cls in policy_configs()}


def drawn(build, seed: int):
    """Weights far from a flat law."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype),
        abstract_params(build),
    )


def test_packed_documents_equal_the_documents_alone_and_no_gradient_leaves_the_head(block_head, lay_out):
    def loss(params, target, batch, count):
        return steps_loss(block_head.merge(params), target, batch, denominator=count, key=KEY, context=CONTEXT)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    found = {}
    for layout in ("packed", "alone"):
        batch, target = lay_out(layout)
        found[layout] = run(block_head.params, target, batch, denominator(batch, block_head.cfg, KEY))
    ((one, report), (gradients, of_target)), ((other, alone), (of_alone, _)) = found["packed"], found["alone"]
    np.testing.assert_allclose(other, one, rtol=1e-6)
    for of_one, of_other in zip(report[:3], alone[:3], strict=True):
        np.testing.assert_allclose(of_other, of_one, rtol=2e-6)
    for (path, leaf), twin in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(of_alone), strict=True):
        # float32 sums in another order.
        np.testing.assert_allclose(twin, leaf, rtol=1e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))
        # The correction of Nemotron's router chooses experts and is no part of their weights.
        chooses_only = "e_score_correction_bias" in jax.tree_util.keystr(path)
        assert chooses_only != bool(np.abs(leaf).max() > 1e-4), path
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(of_target))


def test_a_head_is_whole_on_every_rank_of_axes_that_split_the_policys_weights(block_head, lay_out):
    """Outside of any mesh: an axis that was asked for would be an error."""
    batch, target = lay_out("packed")
    split = PackedRows(row_axes=("data",), tensor_axis="tensor", expert_axis="data")

    def run(packed):
        embeds = [target.embedding[batch.tokens]] * 2
        return block_head.merge().unroll(embeds, target.hidden, batch.positions, batch.segment_ids, packed)

    found, whole = jax.jit(lambda: (run(split), run(WHOLE_ROWS)))()
    jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_greedy_texts_with_a_head_of_experts_are_those_of_plain_decoding():
    # A layer of each kind.
    policy_cfg = replace(
        Qwen35MoeConfig.tiny(), num_hidden_layers=2, layer_types=Qwen35MoeConfig.tiny().layer_types[:2]
    )
    cfg = MtpConfig.for_target(policy_cfg, like_policy=True)
    policy, head = drawn(policy_cfg.build, 1), drawn(cfg.build, 2)
    publisher = Publisher(graph_of(policy_cfg.build), graph_of(cfg.build))
    version, graphs = publisher.publish(policy, head, PolicyVersion(0)), publisher.rollout_graphs(policy, head)
    shape = EngineShape(prompt_capacity=4, max_new_tokens=12, stop_ids=(0,), pad_id=0)
    engine = Engine(*graphs, shape=shape, sampling=SamplingConfig(temperature=0.0))
    rows = 5
    prompts = np.random.default_rng(3).integers(1, policy_cfg.vocab_size, (rows, 4)).astype(np.int32)
    request = Request(
        jnp.asarray(prompts),
        jnp.asarray([4, 3, 2, 4, 1], jnp.int32),
        request_keys(KEY, rows),
        no_context(rows),
    )
    plain = engine.generate(version.policy, None, request)
    drafted = engine.generate(version.policy, version.draft, request, 3)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.lengths, plain.lengths)
    assert int(drafted.proposed.sum()) > 0 and int(plain.lengths.sum()) > 20


@pytest.mark.parametrize("name", TINY)
def test_every_policy_family_has_a_head_of_its_own_blocks_that_survives_its_file(name, tmp_path):
    policy = TINY[name]
    cfg = MtpConfig.for_target(policy, like_policy=True, steps=2)
    cfg.check_target(policy)
    assert from_json(MtpConfig, to_json(cfg), config_registry()) == cfg
    layer = cfg.layer
    assert type(layer) is type(policy) and layer.num_hidden_layers == (2 if name == "NemotronHConfig" else 1)
    assert cfg.norm_rule == policy.norm_rule
    params = drawn(cfg.build, 4)
    save_mtp(tmp_path / "head", cfg, graph_of(cfg.build), params)
    found, _, read = load_mtp(tmp_path / "head", cfg)
    assert found == cfg
    assert jax.tree.structure(read) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"hidden_size": 32}, "hidden_size=32 must equal that of layer, 16"),
        ({"rope_theta": 5.0}, "rope_theta=5.0 must equal that of layer"),
        ({"attention_output_gate": True}, "attention_output_gate=True, rotary_fraction=1.0 must be left out"),
        ({"rotary_fraction": 0.5}, "rotary_fraction=0.5 must be left out"),
        ({"layer": TINY["Qwen35MoeConfig"]}, "'linear_attention', 'full_attention'.* nothing recurrent"),
        ({"layer": replace(TINY["NemotronHConfig"], num_hidden_layers=1, block_types=("moe",))}, "must have attention"),
        ({"layer": TINY["GptOssConfig"]}, "'sliding_attention'"),
    ],
)
def test_bodies_that_no_chain_can_run_are_refused(changes, pattern):
    policy = TINY["Qwen35MoeConfig"]
    if "layer" in changes:
        policy = changes["layer"]
    with pytest.raises(ValueError, match=pattern):
        MtpConfig.for_target(policy, like_policy=True, **changes)
