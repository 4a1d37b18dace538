"""The static engine with token trees: law, greedy texts, log-probs and caches are those of reading the text itself."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import tree_drafts, tree_rounds, trees
from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.module import Eagle3
from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.token_tree import Tree, balanced, caterpillar
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import SamplingConfig, log_law
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Publisher

GREEDY, UNTOUCHED = SamplingConfig(temperature=0.0), SamplingConfig()
ALARM, BROKEN = 1e-6, 1e-9  # as in test_engine_law
DEPTH = 2


def law_of_tree(shape: EngineShape, tree: Tree) -> EngineShape:
    return replace(shape, verification="tree", tree=tree)


def report(name: str, p: float, rollouts: Rollouts) -> None:
    print(f"{name}: p-value {p:.2g}, accepted {rollouts.accepted.sum(0) / rollouts.rounds.sum()} of a round")


@pytest.mark.parametrize("draft", ["good", "random", "wrong"])
def test_texts_follow_the_law_of_the_policy(small_toy, law_batch, law_shape, p_value, draft):
    shape = law_of_tree(law_shape, balanced(2, 2))
    rollouts = small_toy.generate("deep", draft, law_batch, DEPTH, shape, UNTOUCHED)
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    report(draft, p, rollouts)
    assert p > ALARM
    assert (rollouts.proposed == 6 * rollouts.rounds).all()


class Nothing:
    """What no draft is an instance of."""


def rolled_out_anew(toy, request, shape, draft="good"):
    """By an engine that is traced now, with what was exchanged."""
    weights = toy.published("deep", draft)
    engine = Engine(*toy.graphs, shape=shape, sampling=UNTOUCHED)
    return jax.tree.map(np.asarray, engine.generate(*weights, request, DEPTH))


@pytest.mark.slow
def test_texts_follow_the_law_of_the_policy_with_candidates_beside_a_line(
    small_toy, law_batch, law_shape, p_value, monkeypatch
):
    monkeypatch.setattr(tree_drafts, "GrowsTrees", Nothing)
    rollouts = rolled_out_anew(small_toy, law_batch, law_of_tree(law_shape, caterpillar(2, 2)))
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    report("beside a line", p, rollouts)
    assert p > ALARM
    assert (rollouts.proposed == 4 * rollouts.rounds).all()


def judge_without_siblings(law, q, token, uniform):
    """The residual after a refused sibling is not taken: its law, unlike that of a first child, has a token less."""
    accepted, left = RIGHT_JUDGE(law, q, token, uniform)
    return accepted, jnp.where(jnp.all(q > 0, axis=-1, keepdims=True), left, law)


RIGHT_JUDGE = trees.judge


@pytest.fixture(
    params=[
        "sibling left out of the residual",
        pytest.param("one uniform proposes and judges", marks=pytest.mark.slow),
    ]
)
def broken_rule(request, monkeypatch) -> str:
    """One wrong rule in what is traced from now on."""
    if request.param == "sibling left out of the residual":
        monkeypatch.setattr(trees, "judge", judge_without_siblings)
    else:
        monkeypatch.setattr(tree_rounds, "ACCEPT", tree_rounds.PROPOSE)
    return request.param


def test_a_broken_rule_is_caught(small_toy, law_batch, law_shape, p_value, broken_rule):
    rollouts = rolled_out_anew(small_toy, law_batch, law_of_tree(law_shape, balanced(2, 2)), "wrong")
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    report(broken_rule, p, rollouts)
    assert p < BROKEN


def test_greedy_texts_are_those_of_plain_decoding_in_fewer_rounds(toy, mixed_requests, greedy_shape):
    shape = law_of_tree(greedy_shape, balanced(2, 2, 1, 1))
    for draft in ("good", "random"):
        found = toy.generate("deep", draft, mixed_requests, 4, shape, GREEDY)
        plain = toy.generate("deep", draft, mixed_requests, 0, greedy_shape, GREEDY)
        line = toy.generate("deep", draft, mixed_requests, 4, greedy_shape, GREEDY)
        for field in ("tokens", "lengths", "finished"):
            np.testing.assert_array_equal(getattr(found, field), getattr(plain, field), err_msg=field)
        assert (found.rounds <= line.rounds).all() and found.rounds.sum() < line.rounds.sum()
        assert (found.committed == line.committed).all()


# ---- windows, sinks and experts: everything that a rollout records ----

LENGTHS = np.array([4, 2, 1, 3], np.int32)
TREE = balanced(3, 2)


class Noted(NamedTuple):
    """The draft's state at the beginning of a round."""

    anchor: np.ndarray
    hidden: np.ndarray
    keys: np.ndarray
    values: np.ndarray


class Recorded(NamedTuple):
    rollouts: Rollouts
    rounds: list[Noted]
    logprobs: np.ndarray  # [B, S] of each token, by one packed forward over the texts
    experts: np.ndarray  # [B, S, M, k]
    hidden: np.ndarray  # the draft's states by one pass over the texts, and its keys and values
    cache: tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Rollouts of a policy with windows of 4, sinks and experts, and the same texts read at once."""
    cfg = replace(
        GptOssConfig.tiny(), vocab_size=8, num_hidden_layers=2, layer_types=("sliding_attention", "full_attention")
    )
    draft_cfg = Eagle3Config.for_target(cfg, tap_layers=(0, 1))
    graph, params = initialise(cfg.build, jax.random.key(1))
    draft_graph, draft = initialise(draft_cfg.build, jax.random.key(2))
    params, draft = (jax.tree.map(lambda x: x * 6 if x.ndim >= 2 else x, tree) for tree in (params, draft))
    publisher = Publisher(graph, draft_graph)
    weights = publisher.publish(params, draft, PolicyVersion(0))
    graphs = publisher.rollout_graphs(params, draft)
    prompts = jnp.asarray(np.random.default_rng(3).integers(2, 8, (4, 4)), jnp.int32)
    request = Request(prompts, jnp.asarray(LENGTHS), request_keys(jax.random.key(5), 4), no_context(4))
    shape = EngineShape(
        prompt_capacity=4, max_new_tokens=20, stop_ids=(), pad_id=0, record_experts=True, verification="tree",
        tree=TREE,
    )  # fmt: skip
    rounds: list[Noted] = []
    begin = Eagle3.begin_tree

    def begin_and_note(draft, state, call):
        note = lambda *arrays: rounds.append(Noted(*map(np.asarray, arrays)))  # noqa: E731
        jax.debug.callback(note, call.anchor, state.hidden, *state.cache.layers[0], ordered=True)
        return begin(draft, state, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "begin_tree", begin_and_note)
        engine = Engine(*graphs, shape=shape, sampling=UNTOUCHED)
        rollouts = engine.generate(weights.policy, weights.draft, request, TREE.depth)
    jax.effects_barrier()

    @jax.jit
    def read(params, draft, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        policy, module = graph.merge(params), draft_graph.merge(draft)
        found = policy(tokens, positions, jnp.ones_like(tokens), tap_layers=draft_cfg.tap_layers)
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        logprobs = pick(log_law(policy.logits(found.hidden), UNTOUCHED), following)
        cache = module.empty_cache(tokens.shape[0], tokens.shape[1])
        embeds = policy.embed_tokens[...][following]
        states, cache = module.step(embeds, module.fuse(found.taps), jnp.zeros_like(tokens[:, 0]), cache)
        return jnp.pad(logprobs[:, :-1], ((0, 0), (1, 0))), found.routing.ids, states, tuple(cache.layers[0])

    return jax.tree.map(np.asarray, Recorded(rollouts, rounds, *read(params, draft, rollouts.tokens)))


def test_rounds_of_every_kind_are_recorded(recorded):
    rollouts = recorded.rollouts
    assert (rollouts.accepted.sum(0) > 0).all() and rollouts.accepted[:, 0].sum() < rollouts.rounds.sum()
    assert len(recorded.rounds) == rollouts.rounds.max() > 4
    assert (rollouts.lengths > LENGTHS + 8).any(), "windows of 4 must have been left behind"
    assert (rollouts.committed == rollouts.lengths - LENGTHS - 1).all()
    assert (rollouts.proposed == TREE.drafted * rollouts.rounds).all()


def test_logprobs_equal_one_forward_of_the_policy_over_the_text(recorded):
    rollouts, places = recorded.rollouts, np.arange(24)[None]
    response = (places >= LENGTHS[:, None]) & (places < rollouts.lengths[:, None])
    difference = np.abs(rollouts.logprobs - recorded.logprobs)[response].max()
    print(f"max difference {difference:.2g} over {response.sum()} tokens")
    assert difference < 1e-5


def test_recorded_experts_are_those_of_one_forward_over_the_text(recorded):
    for row, length in enumerate(recorded.rollouts.lengths):
        found, wanted = recorded.rollouts.experts[row], np.sort(recorded.experts[row], axis=-1)
        np.testing.assert_array_equal(np.sort(found[: length - 1], axis=-1), wanted[: length - 1])
        assert (found[length - 1 :] == -1).all()


def test_the_drafts_cache_and_state_are_those_of_the_committed_text_under_true_features(recorded):
    compared = 0
    for noted in recorded.rounds:
        for row in np.flatnonzero(noted.anchor < recorded.rollouts.lengths - 1):
            anchor = noted.anchor[row]
            np.testing.assert_allclose(noted.hidden[row], recorded.hidden[row, anchor - 1], atol=2e-5, rtol=1e-4)
            for kept, true in zip((noted.keys, noted.values), recorded.cache, strict=True):
                np.testing.assert_allclose(kept[row, :, :anchor], true[row, :, :anchor], atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared == recorded.rollouts.rounds.sum()


# ---- what is refused ----


def test_shapes_that_do_not_fit_are_refused(law_shape):
    tree = balanced(2, 2)
    for changes, says in (
        ({"verification": "tree"}, "tree=None must be given with verification=tree"),
        ({"tree": tree}, "must be given with verification=tree and with no other, here token"),
        ({"verification": "tree", "tree": tree, "verify_budget": 4}, "verify_budget=4 must be None with verification"),
        ({"verification": "tree", "tree": Tree((-1, 0, 1, 0))}, "must go level by level"),
    ):
        with pytest.raises(ValueError, match=says):
            replace(law_shape, **changes)


def test_lengths_beyond_the_tree_and_slots_are_refused(small_toy, law_batch, law_shape):
    engine = Engine(*small_toy.graphs, shape=law_of_tree(law_shape, balanced(2, 2)), sampling=UNTOUCHED)
    weights = small_toy.published("deep", "good")
    with pytest.raises(ValueError, match="draft_length=3 must be <= 2, the depth of"):
        engine.generate(*weights, law_batch, 3)
    with pytest.raises(ValueError, match="verification=tree must be used without slots"):
        engine.generate(*weights, law_batch, 2, slots=4)
