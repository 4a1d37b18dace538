"""Tests of the training loss against a slow float64 reference, and of what must not change it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.labels import Ahead
from draftco_jax.drafts.mtp.training import denominator, step_masks, steps_loss
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.numerics.shift import look_ahead

TEMPERATURE = 0.7
KEY = jax.random.key(0)

# style -> (embedding first, fed back after the final norm, norms multiply by 1 + weight, first embedding is zeroed)
STYLES = {
    "qwen3_5": (True, True, True, False),
    "deepseek": (True, False, False, True),
    "mimo": (False, True, False, False),
}


# ---- the reference: one document, one index, one step at a time, float64 ----


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def turned(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


class Reference:
    """The head as published, weights by their published names."""

    def __init__(self, cfg, tensors, style=None):
        self.cfg = cfg
        self.embedding_first, self.post_norm, self.offset, self.zeroed = STYLES[style or cfg.style]
        self.w = {name: np.asarray(t, np.float64) for name, t in tensors.items()}

    def normed(self, x, name):
        weight = self.w[f"mtp.{name}.weight"]
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * (1 + weight if self.offset else weight)

    def project(self, embed, hidden, position):
        """Layer input, query, key, value heads and gates."""
        cfg, layer = self.cfg, "layers.0."
        if self.zeroed and position == 0:
            embed = 0 * embed
        pair = [self.normed(embed, "pre_fc_norm_embedding"), self.normed(hidden, "pre_fc_norm_hidden")]
        x = self.w["mtp.fc.weight"] @ np.concatenate(pair if self.embedding_first else pair[::-1])
        u = self.normed(x, layer + "input_layernorm")
        q, k, v = (self.w[f"mtp.{layer}self_attn.{n}_proj.weight"] @ u for n in "qkv")
        q = q.reshape(cfg.num_attention_heads, -1)
        q, gate = (q[:, : cfg.head_dim], q[:, cfg.head_dim :]) if cfg.attention_output_gate else (q, None)
        q = self.normed(q, layer + "self_attn.q_norm")
        k = self.normed(k.reshape(-1, cfg.head_dim), layer + "self_attn.k_norm")
        r = round(cfg.head_dim * cfg.rotary_fraction)
        q, k = (np.hstack([turned(y[:, :r], position, cfg.rope_theta), y[:, r:]]) for y in (q, k))
        return x, q, k, v.reshape(-1, cfg.head_dim), gate

    def layer(self, projected, keys, values):
        """Output z of one query."""
        (x, q, *_, gate), cfg, layer = projected, self.cfg, "mtp.layers.0."
        group, heads = cfg.num_attention_heads // cfg.num_key_value_heads, []
        for n in range(cfg.num_attention_heads):
            weights = softmax(np.array([k[n // group] @ q[n] for k in keys]) / np.sqrt(cfg.head_dim))
            heads.append(sum(a * v[n // group] for a, v in zip(weights, values, strict=True)))
        heads = np.array(heads) if gate is None else np.array(heads) / (1 + np.exp(-gate))
        y = x + self.w[layer + "self_attn.o_proj.weight"] @ heads.reshape(-1)
        n = self.normed(y, "layers.0.post_attention_layernorm")
        g, up = (self.w[f"{layer}mlp.{name}_proj.weight"] @ n for name in ("gate", "up"))
        return y + self.w[layer + "mlp.down_proj.weight"] @ (g / (1 + np.exp(-g)) * up)

    def fed_back(self, z):
        return self.normed(z, "norm") if self.post_norm else z

    def outputs(self, tokens, hidden, embedding):
        """{(k, t): z}, for every step whose input token exists."""
        length, steps, found = len(tokens), self.cfg.steps, {}
        if self.cfg.attention_pattern == "step":
            states = list(hidden)
            for k in range(steps):
                row = [self.project(embedding[tokens[t + 1 + k]], states[t], t) for t in range(length - 1 - k)]
                for t in range(length - 1 - k):
                    found[k, t] = self.layer(row[t], [p[2] for p in row[: t + 1]], [p[3] for p in row[: t + 1]])
                states = [self.fed_back(found[k, t]) for t in range(length - 1 - k)]
            return found
        trunk = [self.project(embedding[tokens[s + 1]], hidden[s], s) for s in range(length - 1)]
        for t in range(length - 1):
            seen, state = trunk[: t + 1], hidden[t]
            for k in range(min(steps, length - 1 - t)):
                own = self.project(embedding[tokens[t + 1 + k]], state, t + k)
                seen = [*seen, own] if k > 0 else seen
                found[k, t] = self.layer(own, [p[2] for p in seen], [p[3] for p in seen])
                state = self.fed_back(found[k, t])
        return found

    def document(self, tokens, labels, hidden, head, embedding):
        """(step, index, loss, acceptance) of every supervised label."""
        cfg, found = self.cfg.loss, []
        for (k, t), z in self.outputs(tokens, hidden, embedding).items():
            label = t + 2 + k
            if label < len(tokens) and labels[label] > 0:
                q = softmax(self.normed(z, "norm") @ head / TEMPERATURE)
                p = softmax(hidden[t + 1 + k] @ head / TEMPERATURE)
                loss = -cfg.hard_cross_entropy * np.log(q[tokens[label]]) - cfg.soft_cross_entropy * (p @ np.log(q))
                found.append((k, t, loss + cfg.l1 * np.abs(p - q).sum(), np.minimum(p, q).sum()))
        return found

    def loss(self, documents):
        """Loss over all labels, then per step: mean loss, mean acceptance; then tau_prob."""
        found, taus, steps = [], [], self.cfg.steps
        for document in documents:
            terms = self.document(*document)
            found += terms
            for t in {t for k, t, *_ in terms if k == 0}:
                by_step = [dict((k, a) for k, s, _, a in terms if s == t).get(k, 0.0) for k in range(steps)]
                taus.append(1 + np.cumprod(by_step).sum())
        weight = np.array([self.cfg.step_decay**k for k in range(steps)])
        weight /= weight.sum()
        total = sum(weight[k] * loss for k, _, loss, _ in found) / sum(weight[k] for k, *_ in found)
        per_step = [[np.mean([f[i] for f in found if f[0] == k]) for k in range(steps)] for i in (2, 3)]
        return total, *per_step, np.mean(taus)


def split_documents(documents, target):
    """What the reference reads, document by document."""
    head, embedding = (np.asarray(a, np.float64) for a in (target.head, target.embedding))
    return [(d.tokens, d.labels, d.hidden.astype(np.float64), head, embedding) for d in documents]


# ---- the loss under test ----


def loss_of(head, sampling=SamplingConfig(temperature=TEMPERATURE)):  # noqa: B008
    context = TrainingContext(sampling=sampling, chunk_tokens=32, draft_length=9, tile=5)

    def loss(params, target, batch, denominator):
        return steps_loss(head.merge(params), target, batch, denominator=denominator, key=KEY, context=context)

    return loss


@pytest.fixture(scope="module")
def run(head):
    """(params, target, batch, denominator) -> (loss, report), (gradients of params, gradients of target)."""
    return jax.jit(jax.value_and_grad(loss_of(head), argnums=(0, 1), has_aux=True))


@pytest.fixture(scope="module")
def packed(head, run, lay_out):
    """Batch, target, and what the loss says about them."""
    batch, target = lay_out("packed")
    return batch, target, run(head.params, target, batch, denominator(batch, head.cfg, KEY))


def numbers(report):
    return np.hstack([report.losses, report.acceptances, report.tau_prob])


def test_loss_and_report_equal_the_reference(head, packed, documents):
    _, target, ((loss, report), _) = packed
    reference = Reference(head.cfg, to_tensors(head.params, prefix="mtp."))
    expected, *of_report = reference.loss(split_documents(documents, target))
    # A mean over some 30 float32 terms; measured 4e-7.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(numbers(report), np.hstack(of_report), rtol=2e-6)


def test_another_style_is_another_loss(head, packed, documents):
    """So the test above would see a wrong order, feedback, norm or first embedding."""
    _, target, ((loss, _), _) = packed
    tensors, texts = to_tensors(head.params, prefix="mtp."), split_documents(documents, target)
    for i in range(4):
        wrong = Reference(head.cfg, tensors)
        names = ("embedding_first", "post_norm", "offset", "zeroed")
        setattr(wrong, names[i], not getattr(wrong, names[i]))
        assert abs(wrong.loss(texts)[0] - float(loss)) > 1e-3, names[i]


def test_gradients_equal_finite_differences_of_the_reference(head, packed, documents):
    """Along one random direction of every array; central differences in float64 are good to 1e-8.

    `scale` is the size of such a derivative. float32 leaves some 1e-6 of it.
    """
    _, target, (_, (gradients, _)) = packed
    tensors = {name: np.asarray(t, np.float64) for name, t in to_tensors(head.params, prefix="mtp.").items()}
    texts, rng, step = split_documents(documents, target), np.random.default_rng(4), 1e-5
    found_gradients = to_tensors(gradients, prefix="mtp.")
    assert found_gradients.keys() == tensors.keys()
    for name, gradient in found_gradients.items():
        direction = rng.normal(size=gradient.shape)
        up, down = (
            Reference(head.cfg, tensors | {name: tensors[name] + sign * step * direction}).loss(texts)[0]
            for sign in (1, -1)
        )
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(gradient.size)
        found = float((gradient.astype(np.float64) * direction).sum())
        np.testing.assert_allclose(found, (up - down) / (2 * step), rtol=0, atol=5e-6 * scale, err_msg=name)
        assert scale > 1e-3, f"{name}: the tolerance must be small beside the values"


def test_bug_case_b07_hidden_states_head_and_embedding_get_exactly_no_gradient(packed):
    _, _, (_, (_, of_target)) = packed
    for name, gradient in of_target._asdict().items():
        assert (np.asarray(gradient) == 0).all(), name


def test_bug_cases_b02_and_b15_packed_documents_equal_the_documents_alone(head, run, packed, lay_out):
    _, _, ((loss, report), (gradients, _)) = packed
    batch, target = lay_out("alone")
    (alone, alone_report), (alone_gradients, _) = run(head.params, target, batch, denominator(batch, head.cfg, KEY))
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    np.testing.assert_allclose(numbers(alone_report), numbers(report), rtol=2e-6)
    # float32 sums in another order.
    for one, other in zip(*map(jax.tree.leaves, (alone_gradients, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_bug_case_b16_micro_batches_with_the_global_denominator_add_up(head, run, lay_out):
    batch, target = lay_out("alone")

    def only(rows):
        """The same shapes with the other rows empty."""
        keep = np.isin(np.arange(batch.tokens.shape[0]), rows)[:, None]
        return jax.tree.map(lambda a: jnp.where(keep, a, jnp.zeros_like(a)), batch)

    parts = [only([0, 3]), only([1, 2, 4])]
    count = sum(denominator(part, head.cfg, KEY) for part in parts)
    np.testing.assert_allclose(count, denominator(batch, head.cfg, KEY), rtol=1e-6)
    (whole, _), (gradients, _) = run(head.params, target, batch, count)
    results = [run(head.params, target, part, count) for part in parts]
    np.testing.assert_allclose(sum(loss for (loss, _), _ in results), whole, rtol=1e-6)
    summed = jax.tree.map(lambda a, b: a + b, *(gradient for _, (gradient, _) in results))
    for one, other in zip(*map(jax.tree.leaves, (summed, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_bug_case_b06_a_wrong_guess_is_never_read_back(head, run, packed):
    """The head's favourite is often a token that no text holds; what such tokens embed to changes nothing."""
    batch, target, ((loss, report), (gradients, _)) = packed
    unseen = np.setdiff1d(np.arange(head.cfg.vocab_size), np.unique(batch.tokens))

    @jax.jit
    def favourites(params):
        draft, embeds = head.merge(params), [target.embedding[look_ahead(batch.tokens, 1)]]
        outputs = draft.unroll(embeds, target.hidden, batch.positions, batch.segment_ids)
        return jnp.argmax(draft.norm(outputs[0]) @ target.head, axis=-1)

    guesses = np.asarray(favourites(head.params))
    live = np.asarray(step_masks(Ahead(batch, 3, WHOLE_ROWS), 2)).min(axis=0) > 0
    assert np.isin(guesses[live], unseen).sum() >= 3
    other = target._replace(embedding=target.embedding.at[unseen].set(5.0))
    count = denominator(batch, head.cfg, KEY)
    (again, again_report), (again_gradients, _) = run(head.params, other, batch, count)
    assert again == loss
    np.testing.assert_array_equal(numbers(again_report), numbers(report))
    jax.tree.map(np.testing.assert_array_equal, again_gradients, gradients)


def test_a_batch_without_labels_gives_zero(head, run, lay_out):
    batch, target = lay_out("packed")
    batch = batch._replace(label_mask=jnp.zeros_like(batch.label_mask))
    (loss, report), (gradients, _) = run(head.params, target, batch, denominator(batch, head.cfg, KEY))
    assert loss == 0 and (numbers(report)[:-1] == 0).all()
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradients))
