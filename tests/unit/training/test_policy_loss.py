"""The policy's loss as the config names it: against loops over documents in numpy, packed, in parts, and refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.training.algorithm import GrpoConfig, advantages_of
from draftco_jax.training.objective import Counts, global_counts, objective
from draftco_jax.training.policy_loss import labels_of, policy_loss, policy_metrics

GSPO = GrpoConfig(
    policy_loss="gspo", clip_low=0.1, clip_high=0.1, aggregation="sequence", sequence_error_limit=2.2
)  # fmt: skip
MASKED = GrpoConfig(
    aggregation="fixed_length",
    fixed_length=9,
    correction="sequence_mask",
    correction_low=0.7,
    correction_high=1.3,
    kl_coefficient=0.5,
    kl_estimator="k2",
    entropy_coefficient=0.25,
)
CISPO = GrpoConfig(
    policy_loss="cispo", batch_normalise=True, correction="icepop", correction_low=0.5, correction_high=1.5,
    kl_coefficient=0.1, kl_estimator="k1", kl_in="reward",
)  # fmt: skip
FILTERED = GrpoConfig(dual_clip=1.5, sequence_error_limit=2.2, kl_coefficient=0.2, entropy_coefficient=0.1)
TIS = GrpoConfig(correction="tis", correction_high=1.2, aggregation="sequence")


def documents_of(batch):
    """(row, indices of the states whose next token is a label) of each document that has some."""
    mask, segments = np.asarray(batch.label_mask), np.asarray(batch.segment_ids)
    for row in range(len(mask)):
        for segment in range(1, segments[row].max() + 1):
            at = [t for t in range(1, mask.shape[1]) if segments[row, t] == segment == segments[row, t - 1]]
            labels = [t - 1 for t in at if mask[row, t] > 0]
            if labels:
                yield row, np.array(labels)


def kl(a, b, estimator):
    d = b - a
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[estimator]


def by_hand(cfg, batch, logprobs, entropies, reference):
    """Loss, and the share of tokens that a correction left out, by loops."""
    documents = list(documents_of(batch))
    logprobs, entropies, reference = (np.asarray(x, np.float64) for x in (logprobs, entropies, reference))
    gen, adv = (np.roll(np.asarray(x, np.float64), -1, 1) for x in (batch.label_logprobs, batch.label_advantages))
    if cfg.kl_in == "reward":
        adv = adv - cfg.kl_coefficient * kl(gen, reference, cfg.kl_estimator)
    if cfg.batch_normalise:
        every = np.concatenate([adv[row, at] for row, at in documents])
        adv = (adv - every.mean()) / every.std()
    tokens, loss, left_out = sum(at.size for _, at in documents), 0.0, 0
    scale = {"token": tokens, "sequence": len(documents), "fixed_length": len(documents) * (cfg.fixed_length or 0)}
    for row, at in documents:
        x, a, d = logprobs[row, at], adv[row, at], logprobs[row, at] - gen[row, at]
        weight = np.ones_like(x)
        if cfg.correction == "tis":
            weight = np.minimum(np.exp(d), cfg.correction_high)
            left_out += (np.exp(d) > cfg.correction_high).sum()
        if cfg.correction == "icepop":
            weight = np.where((np.exp(d) >= cfg.correction_low) & (np.exp(d) <= cfg.correction_high), np.exp(d), 0)
            left_out += (weight == 0).sum()
        if cfg.correction == "sequence_mask":
            weight = np.exp(d) * (cfg.correction_low <= np.exp(d.mean()) <= cfg.correction_high)
            left_out += (weight == 0).sum()
        if cfg.sequence_error_limit is not None:
            weight = weight * (np.exp(np.abs(d)).mean() <= cfg.sequence_error_limit)
            left_out += (weight == 0).sum()
        ratio = np.exp(d) if cfg.correction == "none" else np.ones_like(d)
        ratio = np.full_like(d, np.exp(d.mean())) if cfg.policy_loss == "gspo" else ratio
        clip = np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
        objective = clip * a * x if cfg.policy_loss == "cispo" else np.minimum(ratio * a, clip * a)
        if cfg.dual_clip is not None:
            objective = np.where(a < 0, np.maximum(objective, cfg.dual_clip * a), objective)
        kept = weight > 0  # what a correction leaves out teaches nothing
        per_token = -weight * objective - cfg.entropy_coefficient * kept * entropies[row, at]
        if cfg.kl_in == "loss":
            per_token += cfg.kl_coefficient * kept * kl(x, reference[row, at], cfg.kl_estimator)
        loss += per_token.sum() / (at.size if cfg.aggregation == "sequence" else 1)
    return loss / scale[cfg.aggregation], left_out / tokens


@pytest.fixture(scope="module")
def laws(batch):
    """Log-probs, entropies and the reference's log-probs of the label of each index; anything under the mask."""
    rng = np.random.default_rng(5)
    mask = np.asarray(labels_of(batch, WHOLE_ROWS, None).mask)
    near = lambda: np.float32(np.roll(batch.label_logprobs, -1, 1) + rng.normal(0, 0.8, mask.shape))  # noqa: E731
    entropies = np.float32(rng.random(mask.shape))
    return tuple(jnp.asarray(np.where(mask > 0, x, np.float32(np.nan))) for x in (near(), entropies, near()))


@pytest.mark.parametrize(
    "cfg", [GSPO, MASKED, CISPO, TIS, FILTERED], ids=["gspo", "sequence_mask", "cispo", "tis", "filter"]
)
def test_each_named_loss_equals_loops_over_documents(batch, laws, cfg):
    logprobs, entropies, reference = laws
    given = reference if cfg.kl_coefficient > 0 else None
    counts = global_counts(batch, None, jax.random.key(0), WHOLE_ROWS, cfg)
    labels = labels_of(batch, WHOLE_ROWS, given, cfg)

    def loss(x):
        value, *logged = policy_loss(
            x, entropies, labels, counts.policy_tokens, counts.loss_denominator, cfg, WHOLE_ROWS
        )  # fmt: skip
        return value, logged

    (value, (sums, maxima)), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    expected, left_out = by_hand(cfg, batch, *laws)
    np.testing.assert_allclose(value, expected, rtol=2e-6, atol=5e-7)  # float32 terms near 1 that all but cancel
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[np.asarray(labels.mask) == 0] == 0).all()
    metrics = policy_metrics(sums, maxima, with_reference=given is not None)
    shares = [metrics[f"correction/{x}_fraction"] for x in ("masked", "truncated", "filtered") if
              f"correction/{x}_fraction" in metrics]  # fmt: skip
    assert 0 < left_out < 1
    np.testing.assert_allclose(shares, [left_out], rtol=1e-6)
    assert all(np.isfinite(m) for m in metrics.values())


def test_the_usual_loss_logs_what_it_always_has(batch, laws):
    labels = labels_of(batch, WHOLE_ROWS, None)
    count = jnp.sum(labels.mask)
    assert labels.weights is labels.mask
    _, sums, maxima = policy_loss(*laws[:2], labels, count, count, GrpoConfig(), WHOLE_ROWS)
    assert sums.extra == {}
    assert len(policy_metrics(sums, maxima, with_reference=False)) == 7


def test_losses_of_sequences_do_not_depend_on_packing_or_micro_batches(setup, batch, lay_out):
    """Through the policy: value, metrics that are means, and every gradient."""
    spec = dataclasses.replace(setup.spec, draft_graph=None, draft_cfg=None, algorithm=GSPO)
    key = spec.draft_key(jnp.int32(0))
    differentiate = jax.value_and_grad(objective, has_aux=True)
    run = jax.jit(lambda batch, counts: differentiate(
        {"policy": setup.policy}, batch, counts, jnp.float32(0.0), None, None, spec, key
    ))  # fmt: skip
    of = lambda batch: global_counts(batch, None, key, WHOLE_ROWS, GSPO)  # noqa: E731
    whole, alone = run(batch, of(batch)), run(lay_out("alone"), of(lay_out("alone")))
    kept = [jnp.isin(jnp.arange(5), jnp.array(rows))[:, None] for rows in ([0, 4], [1], [2, 3])]
    parts = [jax.tree.map(lambda x, k=k: x * k.astype(x.dtype), batch) for k in kept]
    total = jax.tree.map(lambda *x: sum(x), *map(of, parts))
    assert total == Counts(*map(float, of(batch)))
    added = jax.tree.map(lambda *x: sum(x), *(run(part, of(batch)) for part in parts))
    assert 0 < whole[0][1]["correction/filtered_fraction"] < 1
    for other in (alone, added):
        np.testing.assert_allclose(other[0][0], whole[0][0], rtol=2e-6)
        for name in ("policy/loss", "policy/ratio_mean", "correction/filtered_fraction", "policy/clip_high_fraction"):
            np.testing.assert_allclose(other[0][1][name], whole[0][1][name], rtol=2e-6)
        for a, b in zip(jax.tree.leaves(other[1]), jax.tree.leaves(whole[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_rewards_are_scaled_then_shaped_then_compared():
    rewards, tokens = jnp.asarray([[1.0, 0.0, 1.0]], jnp.float32), jnp.asarray([[8, 3, 10]], jnp.int32)
    cfg = GrpoConfig(reward_range=(-1.0, 1.0), overlong_buffer=4, std_normalise=False)
    advantages, shaped = advantages_of(cfg, rewards, tokens, max_response_tokens=10)
    np.testing.assert_array_equal(shaped, [[0.5, -1, 0]])
    np.testing.assert_allclose(advantages, np.array([[4, -5, 1]]) / 6, rtol=1e-6)
    raw = GrpoConfig(group_baseline=False, std_normalise=False)
    np.testing.assert_array_equal(advantages_of(raw, rewards, tokens, max_response_tokens=10)[0], rewards)


REFUSED = [
    ({"policy_loss": "gspo"}, "aggregation=token must be sequence with policy_loss=gspo"),
    ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 must be > 1 with policy_loss=clip"),
    ({"dual_clip": 1.0}, "dual_clip=1.0 must be > 1"),
    ({"dual_clip": 3.0, "correction": "tis", "correction_high": 2.0}, "dual_clip=3.0 must be none with correction=tis"),
    ({"kl_in": "reward"}, "kl_coefficient=0.0 must be > 0 with kl_in=reward"),
    ({"clip_high": float("nan")}, "clip_high=nan must be > 0"),
    ({"kl_coefficient": float("nan")}, "kl_coefficient=nan must be >= 0"),
    ({"leave_one_out": True, "overlong_buffer": 8}, "overlong_buffer=8 must be 0 with leave_one_out=True"),
    ({"aggregation": "fixed_length"}, "fixed_length=None must be a number with aggregation=fixed_length"),
    ({"fixed_length": 8}, "fixed_length=8 must be a number with aggregation=fixed_length and none otherwise"),
    ({"aggregation": "fixed_length", "fixed_length": 0}, "fixed_length=0 must be >= 1"),
    ({"kl_estimator": "k1"}, "kl_estimator=k1 must be k2 or k3 with kl_in=loss"),
    (
        {"policy_loss": "gspo", "aggregation": "sequence", "kl_in": "reward", "kl_coefficient": 0.1},
        "kl_in=reward must be loss with",
    ),
    ({"group_baseline": False}, "group_baseline=False must come with std_normalise=False"),
    ({"sample_std": True, "std_normalise": False}, "sample_std=True must be False with std_normalise=False"),
    ({"correction": "tis"}, "correction_low=None and correction_high=None must be 0 <= low < high with correction=tis"),
    ({"correction": "icepop", "correction_high": 2.0}, "must be 0 <= low < high with correction=icepop"),
    ({"correction_high": 2.0}, "correction_high=2.0 must be none with correction=none"),
    ({"policy_loss": "gspo", "aggregation": "sequence", "correction": "tis", "correction_high": 2.0},
     "correction=tis must be none with policy_loss=gspo"),
    ({"sequence_error_limit": 1.0}, "sequence_error_limit=1.0 must be > 1"),
    ({"reward_range": (1.0, 1.0)}, r"reward_range=\(1.0, 1.0\) must be a low and a high end"),
    ({"overlong_buffer": -1}, "overlong_buffer=-1 must be >= 0"),
    ({"entropy_coefficient": -0.1}, "entropy_coefficient=-0.1 must be >= 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_would_mean_nothing_or_something_else_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GrpoConfig(**changes)
