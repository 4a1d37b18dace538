"""Reported faults of batches under context parallelism: what is laid on which rank, labels, one whole step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from draftco_jax.context_parallel import PackedRows, Zigzag, from_ranks, to_ranks
from draftco_jax.data.packing import pack_supervised
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.labels import Ahead
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.numerics.shift import look_ahead, same_document
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.update import Optimizers, batch_spec, init_state, make_update, place_batch


def mesh_of(ranks):
    return Mesh(np.array(jax.devices()[:ranks]).reshape(1, ranks), ("data", "context"))


def rows_on(ranks, **options):
    return PackedRows(ranks=ranks, context_axis="context", row_axes=("data",), tile=16, **options)


def documents(*lengths, vocabulary=17):
    """Examples of so many tokens, one prompt token where there are several."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, vocabulary, n).tolist() for n in lengths]
    return [(tuple(x[: len(x) > 1]), tuple(x[len(x) > 1 :])) for x in ids]


def test_report_05_every_array_of_a_batch_is_spread_alike():
    """Positions sharded in another way than segment ids: a shape mismatch in one ring, a wrong mask in another."""
    packed, mesh = rows_on(4), mesh_of(4)
    placed = place_batch(pack_supervised(documents(5, 7, 3, 1), 16, 2), packed, mesh, draft_cfg=None)
    wanted = NamedSharding(mesh, batch_spec(packed))
    arrays = {name: value for name, value in placed._asdict().items() if value is not None}
    for name, value in arrays.items():
        assert value.sharding.is_equivalent_to(wanted, value.ndim), name
        assert value.addressable_shards[0].data.shape == (2, 4), name


def test_bug_case_b48_b49_documents_of_3_and_5_on_two_ranks_are_laid_out_once_and_all_counted():
    batch = pack_supervised(documents(3, 5), 8, 1)
    placed = place_batch(batch, rows_on(2), mesh_of(2), draft_cfg=None)
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    for name, value in batch._asdict().items():
        if value is not None:
            np.testing.assert_array_equal(getattr(placed, name), np.asarray(value)[:, order], err_msg=name)
    assert int((placed.segment_ids > 0).sum()) == 8


def test_report_08_bug_case_b47_a_row_of_13_tokens_on_two_ranks_is_refused():
    batch = pack_supervised(documents(13), 13, 1)
    with pytest.raises(ValueError, match="13.*16"):
        place_batch(batch, rows_on(2), mesh_of(2), draft_cfg=None)


def test_report_08_bug_case_b47_the_refusal_names_the_length_of_the_row():
    batch = pack_supervised(documents(15), 15, 1)
    with pytest.raises(ValueError, match="tokens=15 .*16"):
        place_batch(batch, rows_on(2), mesh_of(2), draft_cfg=None)


def test_positions_that_are_not_restarted_are_refused_before_anything_is_laid_out():
    """A ring that trusts them would show document 2 the tokens of document 1 (bug case b02)."""
    batch = pack_supervised(documents(3, 5), 8, 1)
    running_on = batch._replace(positions=np.arange(8, dtype=np.int32)[None])
    with pytest.raises(ValueError, match=r"positions\[0, 3\]=3 must be 0, its place in document 2"):
        place_batch(running_on, rows_on(2), mesh_of(2), draft_cfg=None)


REACH = 4
STEPS = range(REACH + 1)


@pytest.fixture(scope="module")
def shifted():
    """`Ahead` of one batch on 4 ranks, all steps, back in the natural order; and the batch."""
    packed, mesh = rows_on(4), mesh_of(4)
    batch = pack_supervised(documents(7, 1, 13, 2, 6), 32, 1)
    layout, spec = packed.layout(8), PartitionSpec(None, "context")

    def local(batch):
        ahead = Ahead(batch, REACH, packed)
        names = ("tokens", "positions", "segment_ids", "label_mask")
        return [({n: ahead.at(n, s) for n in names}, ahead.tokens(s), ahead.same_document(s)) for s in STEPS]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=spec))
    back = np.argsort(layout.order())
    return batch, jax.tree.map(
        lambda x: np.asarray(x)[:, back], mapped(place_batch(batch, packed, mesh, draft_cfg=None))
    )


@pytest.mark.parametrize("steps", STEPS)
def test_bug_case_b14_b15_draft_labels_ids_positions_and_masks_are_shifted_alike_on_four_ranks(shifted, steps):
    """As often as on one rank, and inside each document, also where a document goes on on another rank."""
    batch, found = shifted
    arrays, labels, same = found[steps]
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, look_ahead(jnp.asarray(getattr(batch, name)), steps), err_msg=name)
    inside = np.asarray(same_document(jnp.asarray(batch.segment_ids), steps))
    np.testing.assert_array_equal(same, inside)
    np.testing.assert_array_equal(labels, np.where(inside, arrays["tokens"], 0))
    # A label belongs to its document: position, id and token of the same place.
    own = np.asarray(batch.positions)
    np.testing.assert_array_equal(arrays["positions"][inside], own[inside] + steps)
    if steps:
        layout = Zigzag(ranks=4, tokens=32)
        rolled = from_ranks(jnp.roll(to_ranks(jnp.asarray(batch.tokens), layout), -steps, axis=1), layout)
        assert np.any((np.asarray(rolled) != arrays["tokens"])[inside]), "a roll of what the ranks hold must show"


POLICY = dataclasses.replace(
    Qwen3Config.tiny(vocab_size=17, hidden_size=16, intermediate_size=16),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_hidden_layers=1,
)
DRAFT = DFlashConfig.for_target(
    POLICY,
    mask_token_id=16,
    num_hidden_layers=1,
    block_size=3,
    num_anchors=3,
    loss=DraftLossConfig(hard_cross_entropy=1.0),
)


def training_batch():
    """Documents of 7, 1, 13 and 9 tokens, and of 29: no length is a multiple of 2 C, padding in both tails."""
    batch = pack_supervised(documents(7, 1, 13, 9, 29), 32, 2)
    rng = np.random.default_rng(1)
    mask = np.asarray(batch.label_mask)
    return batch._replace(
        label_logprobs=(rng.normal(-2.8, 0.2, mask.shape) * mask).astype(np.float32),
        label_advantages=(rng.normal(0, 1, mask.shape) * mask).astype(np.float32),
        label_rewards=mask,
    )


@pytest.fixture(scope="module")
def first_step():
    """State and metrics after one optimizer step of policy and draft on so many ranks."""
    policy_graph, policy = initialise(POLICY.build, jax.random.key(1))
    draft_graph, draft = initialise(DRAFT.build, jax.random.key(2))
    policy, draft = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, (policy, draft))
    optimizers = Optimizers(*(make_optimizer(OptimizerConfig(learning_rate=1e-3), 5) for _ in range(2)))

    def step(ranks):
        packed, mesh = rows_on(ranks), mesh_of(ranks)
        spec = ObjectiveSpec(
            policy_graph=policy_graph,
            draft_graph=draft_graph,
            draft_cfg=DRAFT,
            algorithm=GrpoConfig(),
            sampling=SamplingConfig(temperature=0.8),
            chunk_tokens=16,
            draft_length=2,
            packed=packed,
        )
        batch = place_batch(training_batch(), packed, mesh, draft_cfg=None)
        state = init_state(policy, draft, optimizers)
        state, metrics = make_update(spec, optimizers, mesh)(state, batch, jnp.float32(1.0))
        return state, metrics, (policy, draft)

    return step


def test_report_04_bug_case_b46_b56_the_first_step_on_two_ranks_is_that_on_one(first_step):
    """Losses, both gradient norms, and what the optimizers made of every single tensor (not the loss alone)."""
    (one, expected, before), (two, found, _) = first_step(1), first_step(2)
    assert found.keys() == expected.keys() and {"policy/gradient_norm", "draft/gradient_norm"} <= found.keys()
    for name, value in expected.items():
        # float32 sums in another order.
        np.testing.assert_allclose(found[name], value, rtol=4e-6, atol=1e-7, err_msg=name)
    assert float(expected["draft/gradient_norm"]) > 0 and float(expected["policy/gradient_norm"]) > 0
    # First moments of the optimizer are the gradients of each tensor, scaled: every one must be that of one rank.
    for a, b in zip(
        jax.tree.leaves((one.policy_optimizer, one.draft_optimizer)),
        jax.tree.leaves((two.policy_optimizer, two.draft_optimizer)),
        strict=True,
    ):
        largest = float(jnp.max(jnp.abs(a))) if a.size else 0.0
        np.testing.assert_allclose(b, a, rtol=0, atol=4e-6 * largest)
    moved = [
        bool(jnp.any(a != b)) for a, b in zip(*map(jax.tree.leaves, (before, (one.policy, one.draft))), strict=True)
    ]
    assert all(moved), "a tensor that does not move shows nothing"
