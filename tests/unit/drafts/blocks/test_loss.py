"""Tests of the block losses against a slow float64 reference, and of what must not change them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target, TrainingContext
from draftco_jax.drafts.blocks.anchors import select_anchors
from draftco_jax.drafts.blocks.training import draft_acceptance, forward, likeliest, look_ahead
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.numerics.sampling import SamplingConfig, law
from draftco_jax.types import PackedBatch

KEY = jax.random.key(11)
TEMPERATURE = 0.7  # that of the context fixture
SIZES = {
    "tap_layers": (0, 1),
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mask_token_id": 0,
    "loss": DraftLossConfig(hard_cross_entropy=1.0),
}
ONE_LAYER = DFlashConfig(**SIZES, block_size=4)
PLAIN_SPARK = DSparkConfig(**SIZES, block_size=3, markov_rank=5, enable_confidence_head=False)


def chosen(batch, cfg, places):
    """Anchors of each document, counted from its start."""
    anchors, keep = (np.asarray(a) for a in select_anchors(KEY, look_ahead(batch, cfg), cfg))
    segments, found = np.asarray(batch.segment_ids), []
    for row, start in places:
        own = [a for a in anchors[row][keep[row]] if segments[row, a] == segments[row, start]]
        found.append([int(a) - start for a in own])
    return found


@pytest.fixture(scope="module")
def compared(case, reference, losses, denominators, lay_out_target, split_documents):
    """What the draft's loss says of the packed rows, and a function that gives the reference's word for it."""
    batch, target = lay_out_target("packed")
    documents, places = split_documents(batch, target)
    anchors = chosen(batch, case.cfg, places)
    assert sum(map(len, anchors)) >= 8 and max(map(len, anchors)) == case.cfg.num_anchors
    tables = np.asarray(target.head, np.float64), np.asarray(target.embedding, np.float64)

    def slow(tensors, frozen=None):
        return reference(case.cfg, tensors).loss(documents, anchors, *tables, TEMPERATURE, frozen)

    count = denominators(case.cfg)(batch, KEY)
    return losses(case.cfg)(case.params, target, batch, KEY, count), count, slow


def test_loss_and_report_are_those_of_the_reference(case, compared):
    ((loss, report), _), count, slow = compared
    total, weights, found, _ = slow(to_tensors(case.params, prefix=""))
    # float32 sums of some dozens of numbers near 1: measured 3e-7.
    np.testing.assert_allclose(count, weights, rtol=1e-6)
    np.testing.assert_allclose(loss, total, rtol=5e-6)
    for i in range(case.cfg.max_draft_length):
        of_draft = [(value, accepted) for _, _, step, value, accepted, _ in found if step == i]
        value, accepted = np.mean(of_draft, axis=0) if of_draft else (0.0, 0.0)
        np.testing.assert_allclose(report.losses[i], value, rtol=2e-5, err_msg=f"draft {i}")
        np.testing.assert_allclose(report.acceptances[i], accepted, rtol=2e-5, err_msg=f"draft {i}")
    np.testing.assert_allclose(report.extra["accuracy"], np.mean([hit for *_, hit in found]), rtol=1e-6)
    blocks = {}
    for number, anchor, i, _, accepted, _ in found:
        blocks.setdefault((number, anchor), {})[i] = accepted
    lengths = []
    for block in blocks.values():
        reached = np.cumprod([block.get(i, 0.0) for i in range(case.cfg.max_draft_length)])
        lengths.append(1 + reached.sum())
    np.testing.assert_allclose(report.tau_prob, np.mean(lengths), rtol=1e-5)


def test_gradients_are_the_slope_of_the_reference(case, compared):
    (_, (gradients, _)), _, slow = compared
    tensors = {name: np.asarray(t, np.float64) for name, t in to_tensors(case.params, prefix="").items()}
    constants = slow(tensors)[3]
    gradient = to_tensors(gradients, prefix="")
    rng = np.random.default_rng(8)
    for name, tensor in tensors.items():
        direction = rng.normal(size=tensor.shape) / np.sqrt(tensor.size)
        step = 1e-5
        up, down = (slow(tensors | {name: tensor + s * direction}, constants)[0] for s in (step, -step))
        expected, found = (up - down) / (2 * step), float((gradient[name] * direction).sum())
        # Central differences in float64 are good to 1e-9 here; float32 rounding of the gradient is what is left.
        bound = 1e-5 * max(1.0, float(np.abs(gradient[name]).max()))
        assert abs(found - expected) < bound, (name, found, expected)
        assert np.abs(gradient[name]).max() > 1e-3, f"{name}: the bound must be small beside the values"


def test_bug_case_b07_nothing_of_the_policy_gets_a_gradient(compared):
    (_, (gradients, of_target)), *_ = compared
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 0
    for name, leaf in of_target._asdict().items():
        assert not np.any(leaf), name


def test_bug_cases_b02_and_b15_packed_documents_give_what_they_give_alone(
    case, compared, losses, denominators, lay_out_target
):
    ((loss, report), (gradients, _)), count, _ = compared
    batch, target = lay_out_target("alone")
    np.testing.assert_allclose(denominators(case.cfg)(batch, KEY), count, rtol=1e-6)
    (alone, alone_report), (alone_gradients, _) = losses(case.cfg)(case.params, target, batch, KEY, count)
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    # Sums in another order; dead drafts have 0 / 1 on both sides.
    for one, other in zip(report[:3], alone_report[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(alone_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(one).max()))


def test_bug_case_b16_parts_of_a_batch_under_the_summed_denominator_give_the_whole(
    case, compared, losses, denominators, lay_out_target
):
    ((loss, _), (gradients, _)), count, _ = compared
    batch, target = lay_out_target("packed")
    parts = []
    for row in (0, 1):  # the labels of the other row are gone, so no anchor is legal there
        mask = jnp.zeros_like(batch.label_mask).at[row].set(batch.label_mask[row])
        parts.append(batch._replace(label_mask=mask))
    total = sum(denominators(case.cfg)(part, KEY) for part in parts)
    np.testing.assert_allclose(total, count, rtol=1e-6)
    ran = [losses(case.cfg)(case.params, target, part, KEY, total) for part in parts]
    np.testing.assert_allclose(sum(r[0][0] for r in ran), loss, rtol=1e-6)
    summed = jax.tree.map(lambda a, b: a + b, *(r[1][0] for r in ran))
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(one).max()))


def test_bug_case_b01_the_first_answer_token_alone_has_a_gradient(case, losses, denominators, lay_out_target):
    batch, target = lay_out_target("alone")
    mask = jnp.zeros_like(batch.label_mask).at[3, 3].set(1.0)  # prompt of three
    batch = batch._replace(label_mask=mask)
    count = denominators(case.cfg)(batch, KEY)
    assert float(count) == 1.0
    (loss, _), (gradients, _) = losses(case.cfg)(case.params, target, batch, KEY, count)
    assert float(loss) > 0 and max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-3


def test_rows_without_any_label_give_zero(case, losses, lay_out_target):
    batch, target = lay_out_target("packed")
    batch = batch._replace(label_mask=jnp.zeros_like(batch.label_mask))
    (loss, report), (gradients, _) = losses(case.cfg)(case.params, target, batch, KEY, jnp.float32(0.0))
    assert float(loss) == 0.0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert not np.any(report.losses) and float(report.tau_prob) == 0.0


# ---- the same numbers by other ways ----


def test_a_tiled_argmax_is_the_argmax(lay_out_target):
    rng = np.random.default_rng(3)
    features = jnp.asarray(rng.normal(size=(40, 6)).round(), jnp.float32)  # whole numbers: many are equal
    kernel = jnp.asarray(rng.normal(size=(6, 19)).round(), jnp.float32)
    for tile in (4, 8, 18, 19, 64):
        np.testing.assert_array_equal(likeliest(features, kernel, tile), np.argmax(features @ kernel, axis=-1))


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.5), SamplingConfig(top_k=3, top_p=0.8)], ids=str)
def test_acceptance_is_that_of_the_filtered_laws_however_the_drafts_are_chosen(make_case, lay_out_target, sampling):
    case = make_case(ONE_LAYER)
    batch, target = lay_out_target("alone")
    context = TrainingContext(sampling, chunk_tokens=64, draft_length=3, tile=8)

    @jax.jit
    def run(params, target):
        anchors, keep = select_anchors(KEY, look_ahead(batch, case.cfg), case.cfg)
        ran = forward(case.graph.merge(params), target, batch, anchors, keep, context, with_teacher=True)
        modes = (draft_acceptance(ran, target, context, proposes_mode=m) for m in (True, False))
        before = ran.blocks.place - 1  # on one device rows are extended at their end alone
        return ran.features, before, *modes

    features, before, of_mode, of_draw = run(case.params, target)
    rows = np.arange(5)[:, None, None]
    hidden = np.pad(target.hidden, ((0, 0), (0, 3), (0, 0)))
    p = np.asarray(law(hidden[rows, np.asarray(before)] @ target.head, sampling))
    z = features @ target.head
    q, best = np.asarray(law(z, sampling)), np.argmax(z, axis=-1)
    np.testing.assert_allclose(np.moveaxis(of_draw, 0, -1), np.minimum(p, q).sum(-1), rtol=0, atol=2e-6)
    expected = np.take_along_axis(p, best[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.moveaxis(of_mode, 0, -1), expected, rtol=0, atol=2e-6)


def test_acceptance_without_the_policys_states_is_estimated_from_the_label_it_drew(make_case, lay_out_target):
    """Averaged over labels drawn from p, both estimates are the acceptance itself; here by enumeration of labels."""
    case = make_case(ONE_LAYER)
    batch, target = lay_out_target("alone")
    context = TrainingContext(SamplingConfig(), chunk_tokens=64, draft_length=3)
    row, at = 3, 4
    p = np.asarray(law(target.hidden[row, at - 1] @ target.head, SamplingConfig()))
    anchors = jnp.zeros((5, 1), jnp.int32).at[row, 0].set(at - 1)
    keep = jnp.zeros((5, 1), bool).at[row, 0].set(True)

    @jax.jit
    def run(params, tokens, logprobs, target):
        rows = batch._replace(tokens=tokens, label_logprobs=logprobs)
        known = target.hidden is not None
        ran = forward(case.graph.merge(params), target, rows, anchors, keep, context, with_teacher=known)
        return [draft_acceptance(ran, target, context, proposes_mode=m)[0, row, 0] for m in (True, False)]

    exact = run(case.params, batch.tokens, batch.label_logprobs, target)
    estimates = [
        run(
            case.params,
            batch.tokens.at[row, at].set(label),
            batch.label_logprobs.at[row, at].set(float(np.log(p[label]))),
            target._replace(hidden=None),
        )
        for label in range(p.size)
    ]
    np.testing.assert_allclose(p @ np.asarray(estimates), exact, rtol=1e-5)


def test_bug_case_b09_a_loss_without_a_teacher_asks_for_none_and_is_the_plain_cross_entropy(
    make_case, lay_out_target, reference, split_documents, losses, denominators
):
    for cfg in (ONE_LAYER, PLAIN_SPARK):
        case = make_case(cfg)
        batch, target = lay_out_target("packed")
        documents, places = split_documents(batch, target)
        tables = np.asarray(target.head, np.float64), np.asarray(target.embedding, np.float64)
        slow = reference(cfg, to_tensors(case.params, prefix=""))
        total = slow.loss(documents, chosen(batch, cfg, places), *tables, TEMPERATURE)[0]
        count = denominators(cfg)(batch, KEY)
        (loss, _), _ = losses(cfg)(case.params, target._replace(hidden=None), batch, KEY, count)
        np.testing.assert_allclose(loss, total, rtol=5e-6)


def test_a_loss_that_compares_laws_refuses_to_run_without_the_policys_states(make_case, lay_out_target, losses):
    batch, target = lay_out_target("packed")
    cfg = replace(PLAIN_SPARK, loss=DraftLossConfig(hard_cross_entropy=0.1, l1=0.9))
    with pytest.raises(ValueError, match=r"target.hidden=None must be the policy's states .*; pass them"):
        losses(cfg)(make_case(cfg).params, target._replace(hidden=None), batch, KEY, jnp.float32(1.0))


def test_weights_of_answers_go_into_loss_and_denominator(make_case, lay_out_target, losses, denominators):
    weighed = replace(ONE_LAYER, loss=DraftLossConfig(hard_cross_entropy=1.0, sample_weights="reward"))
    case = make_case(ONE_LAYER)
    batch, target = lay_out_target("alone")
    rewards = jnp.asarray([1.0, 0.0, 0.0, 0.0, 0.0])[:, None] * jnp.ones_like(batch.label_mask)
    only = batch._replace(label_mask=batch.label_mask * rewards)
    found = {}
    for name, cfg, rows in (
        ("weighed", weighed, batch._replace(label_rewards=rewards)),
        ("all", ONE_LAYER, batch),
        ("first", ONE_LAYER, only),
    ):
        count = denominators(cfg)(rows, KEY)
        found[name] = count, count * losses(cfg)(case.params, target, rows, KEY, count)[0][0]
    for weighed_sum, everything, first in zip(*(found[n] for n in ("weighed", "all", "first")), strict=True):
        np.testing.assert_allclose(weighed_sum, 0.1 * everything + 0.9 * first, rtol=1e-5)


# ---- memory ----


def test_bug_cases_b17_and_b18_no_residual_holds_a_vocabulary_of_every_label(case):
    rows, tokens, vocab = 2, 32, 997
    cfg = replace(case.cfg, vocab_size=vocab)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    i32 = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    target = Target(f32(rows, tokens, 32), f32(rows, tokens, 16), f32(16, vocab), f32(vocab, 16))
    batch = PackedBatch(i32, i32, i32, *[f32(rows, tokens)] * 4, i32)
    context = TrainingContext(SamplingConfig(), chunk_tokens=16, draft_length=3, tile=64)

    def saved(params, target, batch):
        loss = lambda p: case.training.blocks_loss(  # noqa: E731
            graph_of(cfg.build).merge(p), target, batch, denominator=jnp.float32(1.0), key=KEY, context=context
        )[0]
        return jax.vjp(loss, params)[1]

    sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(saved, abstract_params(cfg.build), target, batch))]
    assert 0 < max(sizes) < rows * tokens * cfg.max_draft_length * vocab / 3
