"""The engine with a draft of every family: the texts follow the policy's law, whatever proposes.

Weights are random and strong, so that no family is a good draft here: what is tested is that a bad one does no harm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine, Request
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.drafts.base import Context, DraftConfig
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.token_tree import balanced
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Publisher

GREEDY, UNTOUCHED = SamplingConfig(temperature=0.0), SamplingConfig()
ALARM = 1e-6  # false alarms over the keys, which are fixed here
K = 3


class Drafted(NamedTuple):
    """A draft of some family beside a toy's policy."""

    cfg: DraftConfig
    graphs: tuple[ModelGraph, ModelGraph]
    draft: Params  # in the rollout layout


def config_of(name: str, policy_cfg) -> DraftConfig:
    block = {"mask_token_id": 0, "num_hidden_layers": 2, "tap_layers": (0,), "block_size": 4}
    spark = block | {"markov_rank": 4, "loss_decay_gamma": 4.0}
    return {
        "dflash": lambda: DFlashConfig.for_target(policy_cfg, **block),
        "dflash sampled": lambda: DFlashConfig.for_target(policy_cfg, **block, proposals="sample"),
        "dflash sliding": lambda: DFlashConfig.for_target(
            policy_cfg, **block, layer_types=("sliding_attention", "full_attention"), sliding_window=3
        ),
        "dspark": lambda: DSparkConfig.for_target(policy_cfg, **spark),
        "dspark rnn": lambda: DSparkConfig.for_target(policy_cfg, **spark, markov_head_type="rnn"),
        "dspark fill-in": lambda: DSparkConfig.for_target(
            policy_cfg, **spark, sample_from_anchor=False, markov_head_type="gated"
        ),
        "mtp": lambda: MtpConfig.for_target(policy_cfg),
        "ngram": lambda: NGramConfig(min_match=1),
        "suffix": lambda: SuffixConfig(history_tokens=12, min_probability=0.0),
        "previous": lambda: PreviousConfig(policy=policy_cfg, history_tokens=12),
        "self_int8": SelfInt8Config,
    }[name]()


NAMES = ("dflash", "dflash sampled", "dflash sliding", "dspark", "dspark rnn", "dspark fill-in", "mtp", "ngram",
         "suffix", "previous", "self_int8")  # fmt: skip


def slow_but(*fast: str) -> list:
    """Every draft; those that are not fast run in `make test-all`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def lively(leaf: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    noise = rng.normal(size=leaf.shape)
    return jnp.asarray(1 + 0.2 * noise if len(leaf.shape) == 1 else 0.4 * noise, leaf.dtype)


@pytest.fixture(scope="module")
def drafted():
    """(toy, name) -> a draft; "previous" has the toy's bigram policy as the old one, and "self_int8" is made of that
    one, not of the policy it drafts for: its guesses in the policy's cache are then far from what belongs there."""
    made = {}

    def make(toy, name: str) -> Drafted:
        if (toy.vocab, name) not in made:
            cfg, rng = config_of(name, toy.policy_cfg), np.random.default_rng(7)
            abstract = abstract_params(cfg.build)
            params = jax.tree.map(lambda leaf: lively(leaf, rng), abstract)
            if name == "previous":
                params = {"policy": toy.policies["bigram"]}
            publisher = Publisher(toy.policy_graph, graph_of(cfg.build))
            of = toy.policies["bigram" if name == "self_int8" else "deep"]
            weights = publisher.publish(of, params, PolicyVersion(0))
            graphs = publisher.rollout_graphs(toy.policies["deep"], params)
            assert graphs[1] is not None
            made[toy.vocab, name] = Drafted(cfg, (graphs[0], graphs[1]), weights.draft)
        return made[toy.vocab, name]

    return make


@pytest.fixture(scope="module")
def with_context(small_toy):
    """A batch with what a draft may look at: rows of other texts, pairs of siblings, or the texts of another policy."""

    def add(request: Request, cfg: DraftConfig, toy, shape, pad: int = -1) -> Request:
        rows = np.arange(request.prompts.shape[0], dtype=np.int32)
        siblings = np.stack([rows // 2 * 2, rows // 2 * 2 + 1], axis=1)
        if isinstance(cfg, PreviousConfig):
            keys = jax.vmap(lambda key: jax.random.fold_in(key, 99))(request.keys)
            old = toy.generate("bigram", "good", request._replace(keys=keys), 0, shape, UNTOUCHED)
            written = np.arange(old.tokens.shape[1])[None] < old.lengths[:, None]
            history = np.where(written, old.tokens, pad)
        else:
            history = np.random.default_rng(3).integers(-1, toy.vocab, (len(rows), 12))
        return request._replace(context=Context(jnp.asarray(history, jnp.int32), jnp.asarray(siblings)))

    return add


def generate(toy, draft: Drafted, request: Request, k: int, shape, sampling: SamplingConfig, slots=None) -> Rollouts:
    engine = Engine(*draft.graphs, shape=shape, sampling=sampling)
    policy = toy.published("deep", None)[0]
    return jax.tree.map(np.asarray, engine.generate(policy, draft.draft, request, k, slots))


def test_every_family_of_the_catalog_is_here():
    assert {name.split()[0] for name in NAMES} | {"eagle3"} == set(FAMILIES)


@pytest.mark.parametrize("name", slow_but("dflash", "mtp", "ngram", "suffix"))
def test_bug_case_b39_greedy_texts_are_those_of_plain_decoding(
    toy, drafted, with_context, mixed_requests, greedy_shape, name
):
    draft = drafted(toy, name)
    request = with_context(mixed_requests, draft.cfg, toy, greedy_shape)
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    rollouts = generate(toy, draft, request, K, greedy_shape, GREEDY)
    for field in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(rollouts, field), getattr(plain, field), err_msg=field)
    assert (rollouts.proposed <= K * rollouts.rounds).all() and rollouts.proposed.sum() > 0
    assert (rollouts.accepted.sum(axis=1) <= rollouts.proposed).all()


# One for each way to propose; what a draft computes before it does so no right engine can tell.
@pytest.mark.parametrize(
    "name", slow_but("dflash sampled", "dspark rnn", "mtp", "ngram", "suffix", "previous", "self_int8")
)
def test_texts_follow_the_law_of_the_policy(small_toy, drafted, with_context, law_batch, law_shape, p_value, name):
    draft = drafted(small_toy, name)
    request = with_context(law_batch, draft.cfg, small_toy, law_shape)
    rollouts = generate(small_toy, draft, request, K, law_shape, UNTOUCHED)
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    rate = rollouts.accepted.sum() / rollouts.proposed.sum()
    print(f"{name}: p-value {p:.2g}, accepted {rate:.2f} of {rollouts.proposed.sum()} proposed")
    assert p > ALARM
    assert 0.02 < rate < 0.98, "a draft that is always or never right would show little"


@pytest.mark.parametrize("name", slow_but("dflash"))
def test_greedy_texts_with_a_tree_are_those_of_plain_decoding(
    toy, drafted, with_context, mixed_requests, greedy_shape, name
):
    draft, shape = drafted(toy, name), replace(greedy_shape, verification="tree", tree=balanced(2, 2, 1))
    request = with_context(mixed_requests, draft.cfg, toy, greedy_shape)
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    rollouts = generate(toy, draft, request, K, shape, GREEDY)
    for field in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(rollouts, field), getattr(plain, field), err_msg=field)
    copies = name in ("ngram", "suffix", "previous", "self_int8")  # a law of one token leaves nothing beside the line
    assert (rollouts.proposed <= (K if copies else 10) * rollouts.rounds).all() and rollouts.proposed.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_texts_follow_the_law_of_the_policy_with_a_tree(
    small_toy, drafted, with_context, law_batch, law_shape, p_value, name
):
    draft, shape = drafted(small_toy, name), replace(law_shape, verification="tree", tree=balanced(2, 2, 1))
    request = with_context(law_batch, draft.cfg, small_toy, law_shape)
    rollouts = generate(small_toy, draft, request, K, shape, UNTOUCHED)
    p = p_value(small_toy, "deep", rollouts, UNTOUCHED)
    print(f"{name}: p-value {p:.2g}, accepted {rollouts.accepted.sum() / rollouts.rounds.sum():.2f} a round")
    assert p > ALARM
    assert rollouts.accepted.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bug_case_b37_in_slots_a_draft_sees_its_own_request_and_no_other(
    toy, drafted, with_context, mixed_requests, sampled_shape, name
):
    """The texts of the static batch, in which every request has a row to itself, with the same counts of a draft."""
    draft, sampling = drafted(toy, name), GREEDY if name == "suffix" else UNTOUCHED
    request = with_context(mixed_requests, draft.cfg, toy, sampled_shape)
    slots = SlotShape(slots=3, draft_lengths=(K,), page=2, chunk=2, walk=4, poison=True)
    found = generate(toy, draft, request, K, sampled_shape, sampling, slots)
    wanted = generate(toy, draft, request, K, sampled_shape, sampling)
    fields = ["tokens", "lengths", "finished"]
    if name != "suffix":  # siblings that wait or have ended say nothing
        fields += ["rounds", "committed", "accepted", "proposed"]
    for field in fields:
        np.testing.assert_array_equal(getattr(found, field), getattr(wanted, field), err_msg=field)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5)
    assert found.accepted.sum() > 0
