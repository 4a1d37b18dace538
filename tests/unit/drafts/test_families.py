"""What holds for the training of every family in the catalog."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared, TrainingContext
from draftco_jax.drafts.catalog import FAMILIES, catalog_of, family_named, family_of
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.errors import UserError
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig

POLICY = Qwen3Config.tiny(vocab_size=19, hidden_size=16, intermediate_size=24)  # the sizes of the packed documents
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
BLOCK = NARROW | {"mask_token_id": 0, "num_hidden_layers": 1, "block_size": 4}
CONFIGS = {
    "eagle3": Eagle3Config.for_target(POLICY, passes=2, **NARROW),
    "dflash": DFlashConfig.for_target(POLICY, **BLOCK),
    "dspark": DSparkConfig.for_target(POLICY, markov_rank=4, **BLOCK),
    "mtp": MtpConfig.for_target(POLICY, steps=2, **NARROW),
}
CONTEXT = TrainingContext(SamplingConfig(), chunk_tokens=32, draft_length=3, tile=8)
KEY = jax.random.key(3)


@pytest.fixture(scope="module", params=CONFIGS)
def trained(request, lay_out_target):
    """Packed rows, what the policy made of them, and ``(target) -> (loss, report), gradients``."""
    cfg = CONFIGS[request.param]
    family, graph, (batch, target) = family_of(cfg), graph_of(cfg.build), lay_out_target("packed")
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape) + (leaf.ndim == 1), leaf.dtype),
        abstract_params(cfg.build),
    )
    assert family.loss is not None and family.denominator is not None
    count = jax.jit(lambda batch: family.denominator(batch, cfg, KEY))(batch)

    def loss(params, target):
        return family.loss(graph.merge(params), target, batch, denominator=count, key=KEY, context=CONTEXT)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return batch, target, lambda target: run(params, target)


def test_every_trained_family_is_here():
    assert {name for name, family in FAMILIES.items() if family.trained} == CONFIGS.keys()


def test_bug_case_b11_a_token_without_a_hidden_state_is_dropped_from_the_draft_loss(trained):
    """The last token of a document was sampled and never read: what stands there changes nothing, bit for bit."""
    batch, target, run = trained
    segments = np.asarray(batch.segment_ids)
    after = np.concatenate([segments[:, 1:], np.zeros_like(segments[:, :1])], axis=1)
    never_read = jnp.asarray((segments == 0) | (segments != after))[..., None]
    garbage = target._replace(
        taps=jnp.where(never_read, 77.0, target.taps), hidden=jnp.where(never_read, -55.0, target.hidden)
    )
    before, changed = run(target), run(garbage)
    assert float(before[0][0]) > 0
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_losses_of_every_step_and_its_acceptance_are_reported(trained):
    _, _, run = trained
    (loss, report), gradients = run(trained[1])
    steps = report.losses.shape[0]
    assert report.acceptances.shape == (steps,) and steps >= 2
    assert np.isfinite(report.losses).all() and ((report.acceptances >= 0) & (report.acceptances <= 1)).all()
    assert 1.0 <= float(report.tau_prob) <= 1.0 + min(steps, CONTEXT.draft_length)
    assert float(loss) > 0 and any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")], ids=str
)
def test_policy_and_draft_may_have_different_types_in_a_rollout(name, dtypes):
    """Laws are float32 and the generate loop can carry the state, whichever of both is in half precision."""
    of_policy, of_draft = (jnp.dtype(name) for name in dtypes)
    graph, width = graph_of(CONFIGS[name].build), POLICY.hidden_size
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, of_draft), abstract_params(CONFIGS[name].build))
    at, tokens, none = jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 0), jnp.int32)
    taps = jnp.zeros((2, 3, len(CONFIGS[name].tap_layers) * width), of_policy)
    hidden = jnp.zeros((2, 3, width), of_policy)

    def rounds(params):
        draft = graph.merge(params)
        shared = Shared(jnp.zeros((POLICY.vocab_size, width), of_policy), jnp.zeros((width, 19), of_policy))
        features = Features(tokens, tokens, taps, hidden, at, at)
        before = draft.absorb(draft.empty_state(2, 9, Context(none, none)), features, shared)
        proposal, after = draft.propose(before, at, at + 1, jnp.zeros((2, 3)), SamplingConfig(), shared)
        return before, draft.absorb(after, features, shared), proposal.laws

    before, after, laws = jax.eval_shape(rounds, params)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [a.dtype for a in jax.tree.leaves(before)] == [a.dtype for a in jax.tree.leaves(after)]
    assert laws.dtype == jnp.float32 and laws.shape == (2, 3, POLICY.vocab_size)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_draft_is_drawn_from_the_law_of_its_own_place_in_the_round(name):
    """What may be drawn at a place of a request depends on how many tokens come before it: a family says which one."""
    cfg = replace(CONFIGS[name], proposals="sample") if name == "dflash" else CONFIGS[name]
    graph, width = graph_of(cfg.build), POLICY.hidden_size
    asked = []

    class Places(SamplingConfig):
        def law(self, logits, first=0, ids=None):
            rows = logits.shape[1] if logits.ndim == 3 else 1
            asked.extend(range(first, first + rows))
            assert logits.shape[0] == 2 and (logits.shape[-1] == POLICY.vocab_size) == (ids is None)
            return super().law(logits)

    def propose(params):
        draft, at, none = graph.merge(params), jnp.zeros(2, jnp.int32), jnp.zeros((2, 0), jnp.int32)
        shared = Shared(jnp.zeros((POLICY.vocab_size, width)), jnp.zeros((width, 19)))
        state = draft.empty_state(2, 9, Context(none, none))
        return draft.propose(state, at, at + 1, jnp.zeros((2, 3)), Places(), shared)[0]

    jax.eval_shape(propose, abstract_params(cfg.build))
    assert asked == [0, 1, 2]


def test_the_catalog_refuses_duplicates_and_names_what_there_is():
    assert list(catalog_of(FAMILIES.values())) == list(FAMILIES)
    with pytest.raises(ValueError, match="draft family eagle3 .* is in the catalog already"):
        catalog_of((FAMILIES["eagle3"], FAMILIES["eagle3"]))
    with pytest.raises(TypeError):
        FAMILIES["other"] = FAMILIES["mtp"]  # type: ignore[index]
    with pytest.raises(UserError, match="draft family eagle4 is unknown; there are: eagle3, dflash, dspark, mtp"):
        family_named("eagle4")
    with pytest.raises(UserError, match="draft=DraftConfig is of no family"):
        from draftco_jax.drafts.base import DraftConfig

        family_of(DraftConfig())
