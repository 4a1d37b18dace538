"""Rollouts over data and tensor axes are those of one device: the same tokens, log-probs to rounding."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import PackedRows
from draftco_jax.decoding.engine import Engine, EngineShape, Request, request_keys
from draftco_jax.decoding.sharded import Devices, padded
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.speculation_control import Budget
from draftco_jax.distributed.axes import make_mesh
from draftco_jax.drafts.base import Context
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.update import place_policy
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

K, ROWS, CAPACITY, NEW = 2, 7, 5, 10  # 7 rows: one is padded
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
DENSE = Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
DELTA = Qwen35MoeConfig(
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=6,
    shared_expert_intermediate_size=8,
    num_experts=4,
    partial_rotary_factor=0.5,
    **EXPERTS,
    **SIZES,
)
MAMBA = NemotronHConfig(
    num_hidden_layers=4,
    block_types=("mamba", "attention", "moe", "mlp"),
    mamba_num_heads=4,
    mamba_head_dim=4,
    ssm_state_size=8,
    n_groups=2,
    moe_shared_expert_intermediate_size=8,
    n_routed_experts=4,
    chunk_size=8,
    **EXPERTS,
    **SIZES,
)
SHAPE = EngineShape(prompt_capacity=CAPACITY, max_new_tokens=NEW, stop_ids=(1,), pad_id=0)
SAMPLED = SamplingConfig()
OVER = PackedRows(row_axes=("data",), tensor_axis="tensor")


def lively(params):
    """Matrices of 0.02 make laws that are all but uniform, which no wrong weight would change."""
    rng = np.random.default_rng(5)
    draw = lambda leaf: leaf * 5 if leaf.ndim > 1 else leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, params)


def requests(rows=ROWS):
    lengths = np.resize(np.array([5, 3, 1, 4, 2, 5, 4, 3], np.int32), rows)
    prompts = np.random.default_rng(3).integers(2, 24, (rows, CAPACITY)).astype(np.int32)
    prompts[np.arange(CAPACITY)[None] >= lengths[:, None]] = 0
    none = jnp.zeros((rows, 0), jnp.int32)
    return Request(
        jnp.asarray(prompts), jnp.asarray(lengths), request_keys(jax.random.key(5), rows), Context(none, none)
    )


class Setup:
    """A policy and a draft, published on one device and over a mesh, and an engine for each."""

    def __init__(self, cfg, sizes, packed=OVER, draft=None, sampling=SAMPLED):
        graph, policy = initialise(cfg.build, jax.random.key(1))
        policy, draft = lively(policy), draft or Eagle3Config.for_target(cfg)
        draft_graph, draft_weights = initialise(draft.build, jax.random.key(2))
        self.mesh = make_mesh(sizes)
        self.train_graphs, self.train_weights = (graph, draft_graph), (policy, draft_weights)
        one = Publisher(graph, draft_graph)
        many = Publisher(graph, draft_graph, mesh=self.mesh, packed=packed, over_mesh=True)
        placed = place_policy(policy, graph, packed, self.mesh)
        whole = jax.device_put(draft_weights, jax.NamedSharding(self.mesh, jax.P()))
        self.one, self.many = (
            publisher.publish(*trees, PolicyVersion(0))
            for publisher, trees in ((one, (policy, draft_weights)), (many, (placed, whole)))
        )
        sampled = {"shape": SHAPE, "sampling": sampling}
        self.alone = Engine(*one.rollout_graphs(policy, draft_weights), **sampled)
        self.graphs = many.rollout_graphs(policy, draft_weights)
        self.together = Engine(*self.graphs, **sampled, devices=Devices(self.mesh, packed))

    def both(self, k, request=None, slots=None, alone=True):
        request = requests() if request is None else request
        weights = lambda published: (published.policy, published.draft if k else None)  # noqa: E731
        alone = self.alone.generate(*weights(self.one), request, k, slots) if alone else None
        return alone, self.together.generate(*weights(self.many), request, k, slots)


def assert_same(together, alone, rounds=True):
    assert len(set(np.asarray(alone.lengths).tolist())) > 1, "rows of one length would show little"
    names = ("tokens", "lengths", "finished") + (("rounds", "committed", "accepted", "proposed") if rounds else ())
    for name in names:
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name), err_msg=name)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def dense():
    return Setup(DENSE, {"data": 2, "tensor": 2})


@pytest.mark.parametrize("k", [0, K])
def test_data_2_x_tensor_2_gives_the_tokens_of_one_device(dense, k):
    alone, together = dense.both(k)
    if k:
        assert np.asarray(alone.accepted).sum() > 0, "drafts that are never accepted would show little"
    assert_same(together, alone)


COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)")
GROUPS = re.compile(r"replica_groups=(\S+?),? ")


def collectives_in_loops(hlo):
    """(kind, replica groups) of every collective outside of the entry computation."""
    found, entry = set(), False
    for line in hlo.splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        elif not entry and (match := COLLECTIVE.search(line)):
            groups = GROUPS.search(match[2] + " ")
            found.add((match[1], groups[1] if groups else "none"))
    return found


def test_no_collective_in_the_loop_goes_over_data(dense):
    weights = dense.many.policy, dense.many.draft
    program = dense.together._speculative.lower(weights, requests(), draft_length=K)  # noqa: SLF001
    found = collectives_in_loops(program.compile().as_text())
    # Devices 0 and 1, 2 and 3 are the tensor ranks of a data shard.
    assert {kind for kind, _ in found} >= {"all-reduce", "all-gather"}
    assert {groups for _, groups in found} <= {"{{0,1},{2,3}}", "[2,2]<=[4]"}, found


def test_each_device_holds_its_part_of_the_weights_and_of_the_keys(dense):
    layer = dense.many.policy["layers"][0]
    kernels = {name: layer["self_attn"]["qkv"][f"{name}_proj"]["kernel"] for name in "qkv"}
    kernels |= {"gate": layer["mlp"]["gate_up"]["gate_proj"]["kernel"], "down": layer["mlp"]["down_proj"]["kernel"]}
    held = {name: kernel.addressable_shards[0].data.shape for name, kernel in kernels.items()}
    assert held == {"q": (16, 16), "k": (16, 8), "v": (16, 8), "gate": (16, 12), "down": (12, 16)}
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, dense.many.policy)
    caches = jax.shard_map(
        lambda weights: dense.graphs[0].merge(weights).empty_cache(1, 9).layers[0].keys,
        mesh=dense.mesh,
        in_specs=(specs,),
        out_specs=jax.P(None, "tensor"),
        check_vma=False,
    )
    assert jax.eval_shape(caches, dense.many.policy).shape == (1, 2, 9, 8), "one of two key-value heads on each rank"


GROUP = 3
TEXTS = SuffixConfig()


def groups_of_three(shift=0):
    """Five prompts, three requests each. Over two devices 9 and 6 of them: groups are padded whole."""
    request = requests(5 * GROUP)
    request = request._replace(
        prompts=jnp.repeat(request.prompts[::GROUP], GROUP, axis=0),
        prompt_lengths=jnp.repeat(request.prompt_lengths[::GROUP], GROUP),
    )
    rows = np.repeat(np.arange(5 * GROUP, dtype=np.int32).reshape(-1, GROUP), GROUP, axis=0)
    return with_siblings(request, (rows + shift) % (5 * GROUP))


def with_siblings(request, rows):
    return request._replace(context=Context(jnp.full((len(rows), 4), -1, jnp.int32), jnp.asarray(rows)))


def test_siblings_are_kept_on_one_device_and_copied_from():
    setup = Setup(DENSE, {"data": 2}, PackedRows(row_axes=("data",)), TEXTS, SamplingConfig(temperature=0.3))
    request = groups_of_three()
    alone, together = setup.both(K, request)
    assert_same(together, alone)
    lonely = with_siblings(request, np.full((5 * GROUP, GROUP), -1, np.int32))
    lonely = setup.alone.generate(setup.one.policy, setup.one.draft, lonely, K)
    # The second device counts its rows from 0 again, so that its siblings must be seen to matter.
    assert (np.asarray(alone.proposed) != np.asarray(lonely.proposed))[3 * GROUP :].any()
    with pytest.raises(ValueError, match=r"siblings of request 0 must be in its group of 3 .* one is request 3; put"):
        setup.both(K, groups_of_three(shift=1), alone=False)


def test_requests_are_padded_in_whole_groups_with_copies_that_have_no_siblings():
    request = padded(groups_of_three(), 2)
    assert request.prompts.shape == (18, CAPACITY)
    siblings = np.asarray(request.context.siblings)
    assert siblings[14].tolist() == [12, 13, 14] and (siblings[15:] == -1).all()
    for array in (jax.random.key_data(request.keys), request.prompts, request.prompt_lengths):
        assert (np.asarray(array)[15:] == np.asarray(array)[14]).all()
    assert padded(requests(8), 2).prompts.shape == (8, CAPACITY) and padded(requests(), 4).keys.shape == (8,)


def test_what_devices_cannot_share_is_refused(dense):
    devices = dense.together.devices
    asked = {"shape": dataclasses.replace(SHAPE, verify_budget=4), "sampling": SAMPLED}
    with pytest.raises(ValueError, match="verify_budget=4 must be none with requests over 2 devices"):
        Engine(*dense.graphs, **asked, devices=devices)
    with pytest.raises(ValueError, match="slots=3 must be a multiple of 2, .* use 4"):
        devices.slots_of_one(SlotShape(slots=3))
    with pytest.raises(ValueError, match="rule of the slots must be none over a mesh"):
        devices.slots_of_one(SlotShape(slots=2, draft_lengths=(0, K), rule=Budget(lengths=(0, K), peak=4)))
    with pytest.raises(ValueError, match="options of each request must be None over a mesh"):
        devices.check_request(requests()._replace(options=()))
    with pytest.raises(ValueError, match="serve must have devices=None"):
        dense.together.serve(dense.many.policy, None, requests(), SlotShape(slots=2))
    with pytest.raises(ValueError, match="policy=Decoder must be split over mesh axis 'tensor'"):
        fused = Publisher(*dense.train_graphs).rollout_graphs(*dense.train_weights)
        Engine(*fused, shape=SHAPE, sampling=SAMPLED, devices=devices).generate(dense.one.policy, None, requests())


@pytest.mark.slow
def test_slots_of_each_device_serve_its_own_requests(dense):
    alone, together = dense.both(K, slots=SlotShape(slots=4, draft_lengths=(K,), staging_rows=1))
    assert_same(together, alone)


HYBRIDS = {
    "delta net, experts over tensor": (DELTA, dataclasses.replace(OVER, expert_axis="tensor")),
    "Mamba-2, hidden widths of experts over tensor": (MAMBA, OVER),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRIDS)
def test_states_of_recurrent_layers_and_experts_are_split_too(case):
    setup = Setup(HYBRIDS[case][0], {"data": 2, "tensor": 2}, HYBRIDS[case][1])
    for k in (0, K):
        assert_same(*reversed(setup.both(k)))


@pytest.mark.slow
def test_tensor_4_with_key_value_heads_shared_by_two_ranks():
    setup = Setup(DENSE, {"tensor": 4}, PackedRows(tensor_axis="tensor"))
    assert_same(*reversed(setup.both(K)))
