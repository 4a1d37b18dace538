"""Tests of the training-time-test loss against a slow float64 reference, and of what must not change it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Target, TrainingContext
from draftco_jax.drafts.eagle3 import training
from draftco_jax.drafts.eagle3.checkpoint import graph_with_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import look_ahead, pass_masks, passes_loss
from draftco_jax.models.functional import abstract_params
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

TEMPERATURE = 0.7
RULES = ("label", "official")
KEPT_COUNT = 11  # ids of the fixture's reduced vocabulary
KEY = jax.random.key(0)  # this family draws nothing


def denominator(batch, cfg):
    return training.denominator(batch, cfg, KEY)


def context(temperature=TEMPERATURE, chunk_tokens=32):
    """A tile smaller than the vocabulary, so that several are walked."""
    return TrainingContext(SamplingConfig(temperature=temperature), chunk_tokens, draft_length=9, tile=8)


# ---- the reference: one document, one index, one pass at a time, float64 ----


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def normed(x, weight):
    return x / np.sqrt((x * x).mean() + 1e-6) * weight


def turned(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


class Reference:
    """The draft as written in the paper, weights by their published names."""

    def __init__(self, cfg, tensors, kept):
        self.cfg, self.kept = cfg, kept
        self.w = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def project(self, embed, hidden, position):
        """Query, key, value heads of [norm(embedding) ; norm(hidden)]."""
        w, cfg, layer = self.w, self.cfg, "midlayer."
        u = np.concatenate(
            [
                normed(embed, w[layer + "input_layernorm.weight"]),
                normed(hidden, w[layer + "hidden_norm.weight"]),
            ]
        )
        q, k, v = ((w[f"{layer}self_attn.{n}_proj.weight"] @ u).reshape(-1, cfg.head_dim) for n in "qkv")
        if cfg.qk_norm:
            q, k = (
                np.stack([normed(head, w[f"{layer}self_attn.{n}_norm.weight"]) for head in heads])
                for n, heads in (("q", q), ("k", k))
            )
        return turned(q, position, cfg.rope_theta), turned(k, position, cfg.rope_theta), v

    def layer(self, hidden, q, keys, values):
        w, cfg, layer = self.w, self.cfg, "midlayer."
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        heads = []
        for n in range(cfg.num_attention_heads):
            weights = softmax(np.array([k[n // group] @ q[n] for k in keys]) / np.sqrt(cfg.head_dim))
            heads.append(sum(a * v[n // group] for a, v in zip(weights, values, strict=True)))
        residual = normed(hidden, w[layer + "hidden_norm.weight"]) if cfg.norm_before_residual else hidden
        y = residual + w[layer + "self_attn.o_proj.weight"] @ np.concatenate(heads)
        n = normed(y, w[layer + "post_attention_layernorm.weight"])
        gate, up = (w[f"{layer}mlp.{name}_proj.weight"] @ n for name in ("gate", "up"))
        z = y + w[layer + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return normed(z, w["norm.weight"]) if cfg.norm_output else z

    def fuse(self, taps):
        w, count = self.w, len(self.cfg.tap_layers)
        if self.cfg.norm_before_fc:
            taps = normed(taps, w["input_norm.weight"])
        if self.cfg.fc_norm:
            parts = np.split(taps, count)
            taps = np.concatenate([normed(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        return w["fc.weight"] @ taps

    def document(self, tokens, labels, taps, hidden, head, embedding, temperature):
        """(pass, anchor, cross-entropy, acceptance, learnable) of every supervised label."""
        length, found = len(tokens), []
        states = [self.fuse(tap) for tap in taps]
        trunk = [self.project(embedding[tokens[s + 1]], states[s], s) for s in range(length - 1)]
        for t in range(length - 2):
            state = states[t]
            keys, values = [k for _, k, _ in trunk[: t + 1]], [v for _, _, v in trunk[: t + 1]]
            for k in range(self.cfg.passes):
                if t + 2 + k >= length:
                    break
                q, key, value = self.project(embedding[tokens[t + 1 + k]], state, t + k)
                if k > 0:
                    keys, values = [*keys, key], [*values, value]
                state = self.layer(state, q, keys, values)
                if labels[t + 2 + k] > 0:
                    read = state if self.cfg.norm_output else normed(state, self.w["norm.weight"])
                    logits = self.w["lm_head.weight"] @ read / temperature
                    teacher = hidden[t + 1 + k] @ head / temperature
                    q_law, p_law = np.zeros(teacher.size), softmax(teacher)
                    q_law[self.kept] = softmax(logits)
                    cross_entropy = -softmax(teacher[self.kept]) @ np.log(softmax(logits))
                    learnable = float(teacher.argmax() in self.kept)
                    found.append((k, t, cross_entropy, np.minimum(p_law, q_law).sum(), learnable))
        return found

    def loss(self, documents, temperature):
        """Loss over all labels, then per pass: mean loss, mean acceptance; then tau_prob."""
        found, tau, anchors = [], 0.0, 0
        for document in documents:
            terms = self.document(*document, temperature)
            found += terms
            for t in {t for k, t, *_ in terms if k == 0}:
                by_pass = {k: a for k, s, _, a, _ in terms if s == t}
                reached, anchors = 1.0, anchors + 1
                tau += 1.0
                for k in range(self.cfg.passes):
                    reached *= by_pass.get(k, 0.0)
                    tau += reached
        weight = [self.cfg.pass_decay**k for k in range(self.cfg.passes)]
        total = sum(weight[k] * ce * learnable for k, _, ce, _, learnable in found)
        found = [(k, t, ce * learnable, a) for k, t, ce, a, learnable in found]
        of_pass = lambda k, i: np.mean([term[i] for term in found if term[0] == k])  # noqa: E731
        per_pass = [[of_pass(k, i) for k in range(self.cfg.passes)] for i in (2, 3)]
        return total / sum(weight[k] for k, *_ in found), *per_pass, tau / anchors


def split_documents(batch, target):
    """What the reference reads, document by document."""
    arrays = [np.asarray(a, np.float64 if a.dtype == jnp.float32 else np.int64) for a in (*batch[:4], *target)]
    tokens, _, segments, labels, taps, hidden, head, embedding = arrays
    for row in range(len(tokens)):
        for segment in range(1, segments[row].max() + 1):
            cells = segments[row] == segment
            yield tokens[row, cells], labels[row, cells], taps[row, cells], hidden[row, cells], head, embedding


# ---- the loss under test ----


def differentiated(draft):
    """(params, target, batch, denominator) -> (loss, report), (gradients of params, gradients of target)."""

    def loss(params, target, batch, denominator):
        draft_model = draft.graph.merge(params)
        return passes_loss(draft_model, target, batch, denominator=denominator, key=KEY, context=context())

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.fixture(scope="module")
def run(draft):
    return differentiated(draft)


@pytest.fixture(scope="module")
def packed(draft, run, lay_out_target):
    """Batch, target, and what the loss says about them."""
    batch, target = lay_out_target("packed")
    return batch, target, run(draft.params, target, batch, denominator(batch, draft.cfg))


# Flags that belong together, by what they are known as; one with the official number of passes.
VARIANTS = {
    "seven passes": {"passes": 7},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": KEPT_COUNT},
    "DeepSpec": {"qk_norm": True, "passes": 7},
}


# DeepSpec's has seven passes too.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name == "seven passes" else name for name in VARIANTS],
)
def variant(request, make_draft, lay_out_target):
    draft, (batch, target) = make_draft(**VARIANTS[request.param]), lay_out_target("packed")
    return draft, (batch, target, differentiated(draft)(draft.params, target, batch, denominator(batch, draft.cfg)))


def test_every_variant_equals_the_reference(variant):
    draft, packed = variant
    test_loss_and_report_equal_the_reference(draft, packed)
    test_gradients_equal_finite_differences_of_the_reference(draft, packed)


def test_loss_and_report_equal_the_reference(draft, packed):
    batch, target, ((loss, report), _) = packed
    reference = Reference(draft.cfg, to_tensors(draft.params, prefix=""), draft.kept)
    documents = list(split_documents(batch, target))
    assert len(documents) == 5
    expected, losses, acceptances, tau = reference.loss(documents, TEMPERATURE)
    # A mean over some 30 float32 terms.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(report.losses, losses, rtol=1e-6)
    np.testing.assert_allclose(report.acceptances, acceptances, rtol=2e-6)
    np.testing.assert_allclose(report.tau_prob, tau, rtol=2e-6)


def test_gradients_equal_finite_differences_of_the_reference(draft, packed):
    """Along one random direction of every array; central differences in float64 are good to 1e-8.

    `scale` is the size of such a derivative. float32 leaves 1.5e-6 of it.
    """
    batch, target, (_, (gradients, _)) = packed
    tensors = {name: np.asarray(t, np.float64) for name, t in to_tensors(draft.params, prefix="").items()}
    documents, rng, step = list(split_documents(batch, target)), np.random.default_rng(4), 1e-5
    for name, gradient in to_tensors(gradients, prefix="").items():
        direction = rng.normal(size=gradient.shape)
        values = [
            Reference(draft.cfg, tensors | {name: tensors[name] + sign * step * direction}, draft.kept)
            for sign in (1, -1)
        ]
        up, down = (reference.loss(documents, TEMPERATURE)[0] for reference in values)
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(gradient.size)
        found = float((gradient.astype(np.float64) * direction).sum())
        np.testing.assert_allclose(found, (up - down) / (2 * step), rtol=0, atol=5e-6 * scale, err_msg=name)
        assert scale > 1e-3, f"{name}: the tolerance must be small beside the values"


def test_bug_case_b07_teacher_taps_head_and_embedding_get_exactly_no_gradient(packed):
    _, _, (_, (_, of_target)) = packed
    for name, gradient in of_target._asdict().items():
        assert (np.asarray(gradient) == 0).all(), name


def test_bug_cases_b02_and_b15_packed_documents_equal_the_documents_alone(draft, run, packed, lay_out_target):
    _, _, ((loss, report), (gradients, _)) = packed
    batch, target = lay_out_target("alone")
    (alone, alone_report), (alone_gradients, _) = run(draft.params, target, batch, denominator(batch, draft.cfg))
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    np.testing.assert_allclose(np.hstack(alone_report[:3]), np.hstack(report[:3]), rtol=2e-6)
    # float32 sums in another order.
    for one, other in zip(*map(jax.tree.leaves, (alone_gradients, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_bug_case_b16_micro_batches_with_the_global_denominator_add_up(draft, run, lay_out_target):
    batch, target = lay_out_target("alone")

    def only(rows):
        """The same shapes with the other rows empty."""
        keep = lambda a: a * jnp.isin(jnp.arange(a.shape[0]), jnp.array(rows))[:, None].astype(a.dtype)  # noqa: E731
        return jax.tree.map(keep, batch)

    parts = [only([0, 3]), only([1, 2, 4])]
    count = sum(denominator(part, draft.cfg) for part in parts)
    np.testing.assert_allclose(count, denominator(batch, draft.cfg), rtol=1e-6)
    (whole, _), (gradients, _) = run(draft.params, target, batch, count)
    results = [run(draft.params, target, part, count) for part in parts]
    np.testing.assert_allclose(sum(loss for (loss, _), _ in results), whole, rtol=1e-6)
    summed = jax.tree.map(lambda a, b: a + b, *(gradient for _, (gradient, _) in results))
    for one, other in zip(*map(jax.tree.leaves, (summed, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_without_labels_gives_zero(draft, run, lay_out_target):
    batch, target = lay_out_target("packed")
    batch = batch._replace(label_mask=jnp.zeros_like(batch.label_mask))
    (loss, report), (gradients, _) = run(draft.params, target, batch, denominator(batch, draft.cfg))
    assert loss == 0 and (np.hstack(report[:3]) == 0).all()
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradients))


def test_greedy_laws_are_refused(full_draft, lay_out_target):
    batch, target = lay_out_target("packed")

    def loss(params):
        draft, greedy = full_draft.graph.merge(params), context(temperature=0.0)
        return passes_loss(draft, target, batch, denominator=jnp.float32(1.0), key=KEY, context=greedy)

    with pytest.raises(ValueError, match="temperature=0"):
        jax.eval_shape(loss, full_draft.params)


# ---- masks ----


def row(labels, segments=None):
    """One row of a batch with these labels."""
    segments = [1] * len(labels) if segments is None else segments
    ids, padding = np.zeros((1, 8), np.int32), [0] * (8 - len(labels))
    segments, labels = np.int32([segments + padding]), np.float32([labels + padding])
    return PackedBatch(*(jnp.asarray(a) for a in (ids, ids, segments, labels, labels, labels, labels, ids)))


def masks_of(batch, cfg):
    return pass_masks(look_ahead(batch, cfg), cfg)


@pytest.fixture(scope="module")
def live(make_draft):
    """(batch, passes, rule) -> the live indices of the first row, by pass."""
    masks = {rule: jax.jit(partial(masks_of, cfg=make_draft(passes=4, label_mask=rule).cfg)) for rule in RULES}

    def find(batch, passes, rule="label"):
        return [np.flatnonzero(mask[0]).tolist() for mask in masks[rule](batch)[:passes]]

    return find


def test_bug_case_b01_the_label_decides_so_the_first_answer_token_is_learnt(live):
    # Pass 0 at t learns x_{t+2}: the token before the last prompt token is live, the last two of the answer are not.
    assert live(row([0, 0, 1, 1, 1, 0]), 2) == [[0, 1, 2], [0, 1]]


def test_bug_case_b01_the_first_answer_token_alone_has_a_gradient(draft, run, lay_out_target):
    batch, target = lay_out_target("alone")
    first = np.zeros(batch.label_mask.shape, np.float32)
    first[3, 3] = 1.0  # prompt of three
    batch = batch._replace(label_mask=jnp.asarray(first))
    assert float(masks_of(batch, draft.cfg)[0].sum()) == 1.0
    (_, report), (gradients, _) = run(draft.params, target, batch, denominator(batch, draft.cfg))
    assert float(report.losses[0]) > 0
    learnable = np.argmax(target.hidden[3, 2] @ target.head) in draft.kept
    assert (max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-4) == learnable


def test_bug_case_b14_after_k_passes_the_mask_marks_the_rows_whose_label_is_real(live):
    assert live(row([1, 1, 1, 0]), 3) == [[0], [], []]
    assert live(row([1] * 7), 4) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2], [0, 1]]


def test_bug_case_b02_no_label_comes_from_another_document_or_from_padding(live):
    batch = row([0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2, 0])
    assert live(batch, 3) == [[0, 3, 4], [3], []]


def test_the_official_mask_is_that_of_the_token_read(live):
    # Pass k at t asks for x_{t+k}; the policy's law at t + 1 + k must exist, so the last token of a document is out.
    assert live(row([0, 0, 1, 1, 1, 0]), 3, "official") == [[2, 3, 4], [1, 2, 3], [0, 1, 2]]
    assert live(row([0, 0, 1, 1]), 2, "official") == [[2], [1]]
    assert live(row([0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]), 2, "official") == [[1, 3, 4], [0, 3]]


def test_denominator_is_the_weighted_count_of_live_labels(full_draft):
    cfg = full_draft.cfg
    np.testing.assert_allclose(denominator(row([0, 0, 1, 1, 1, 0]), cfg), 3 + 0.8 * 2 + 0.64 * 1, rtol=1e-6)


# ---- the draft vocabulary ----


@pytest.fixture(scope="module")
def exact():
    """A one-pass draft over ids 4, 6, 1 of 8 whose state IS its tap, and a head equal to the teacher's rows.

    Returns (teacher states of the four labels) -> loss and report; each label's teacher law is that of its state.
    """
    kept = np.array([4, 6, 1], np.int32)
    sizes = {"vocab_size": 8, "draft_vocab_size": 3, "hidden_size": 8, "intermediate_size": 4, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    cfg = Eagle3Config(tap_layers=(0,), passes=1, **sizes, **heads)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(leaf.ndim == 1)), abstract_params(cfg.build))
    teacher_head = 10.0 * jnp.eye(8)
    params = params | {"fc": {"kernel": jnp.eye(8)}, "lm_head": {"kernel": teacher_head[:, kept]}}
    graph = graph_with_map(cfg, kept)

    @jax.jit
    def run(states):
        batch = row([1] * 6)
        pad = jnp.zeros((1, 1, 8))
        normed_states = states * jax.lax.rsqrt(jnp.mean(states**2, axis=-1, keepdims=True) + 1e-6)
        taps = jnp.concatenate([states[None], *[pad] * 4], axis=1)
        hidden = jnp.concatenate([pad, normed_states[None], *[pad] * 3], axis=1)
        return passes_loss(
            graph.merge(params),
            Target(taps, hidden, teacher_head, jnp.zeros((8, 8))),
            batch,
            denominator=denominator(batch, cfg),
            key=KEY,
            context=context(temperature=1.0, chunk_tokens=64),
        )

    return kept, run


def test_bug_case_b03_teacher_and_draft_meet_in_the_draft_vocabulary(exact):
    kept, run = exact
    states = np.full((4, 8), -9.0, np.float32)  # ids outside the map have no probability to speak of
    states[:, kept] = np.random.default_rng(5).uniform(8.5, 9.5, size=(4, 3))
    loss, report = run(jnp.asarray(states))
    rms = np.sqrt((states.astype(np.float64) ** 2).mean(axis=-1, keepdims=True))
    entropies = [-(p * np.log(p)).sum() for p in map(softmax, 10.0 * (states / rms)[:, kept])]
    np.testing.assert_allclose(loss, np.mean(entropies), rtol=1e-5)
    np.testing.assert_allclose(report.acceptances, [1.0], rtol=1e-5)


def test_bug_case_b20_labels_outside_the_draft_vocabulary_count_as_rejected(exact):
    kept, run = exact
    states = np.full((4, 8), -9.0, np.float32)
    states[np.arange(4), [4, 6, 0, 1]] = 9.0  # the third is sure of an id that the draft cannot say
    loss, report = run(jnp.asarray(states))
    np.testing.assert_allclose(report.acceptances, [0.75], atol=1e-3)
    # It is not learnt from, but it stays in the denominator, which is known before the teacher is.
    np.testing.assert_allclose(loss, 0.75 * float(run(jnp.asarray(states[[0, 1, 3, 3]]))[0]), rtol=1e-4)


# ---- memory ----


def test_bug_cases_b17_and_b18_no_residual_holds_a_vocabulary_of_every_token(make_draft):
    rows, tokens, vocab, kept = 2, 64, 997, 11
    draft = make_draft(vocab_size=vocab, draft_vocab_size=kept)
    wide = make_draft(vocab_size=vocab, draft_vocab_size=vocab)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    i32 = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    target = Target(f32(rows, tokens, 32), f32(rows, tokens, 16), f32(16, vocab), f32(vocab, 16))
    batch = PackedBatch(i32, i32, i32, *[f32(rows, tokens)] * 4, i32)
    for model in (draft, wide):

        def saved(params, target, batch, model=model):
            loss = lambda p: passes_loss(  # noqa: E731
                model.graph.merge(p),
                target,
                batch,
                denominator=target.head[0, 0],
                key=KEY,
                context=context(chunk_tokens=16),
            )[0]
            return jax.vjp(loss, params)[1]

        sizes = [leaf.size for leaf in jax.tree.leaves(jax.eval_shape(saved, model.params, target, batch))]
        assert 0 < max(sizes) < rows * tokens * vocab / 3
