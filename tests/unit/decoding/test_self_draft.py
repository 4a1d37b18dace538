"""The policy's int8 copy as a draft: it is of the published version, has no cache, and leaves no trace in the policy's.

A round is played by hand over the policy's cache, in rows and in pages, beside a verify forward over a cache that was
never lent. Both are one program, so they are compared bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.context_parallel import PackedRows
from draftco_jax.decoding.control import start
from draftco_jax.decoding.engine import Engine
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.speculation_control import CostModel
from draftco_jax.drafts.base import Context, Shared, borrowed, given_back
from draftco_jax.drafts.self_int8 import SELF_INT8
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.models.functional import ModelGraph, graph_of, initialise
from draftco_jax.models.paged_cache import paged
from draftco_jax.models.quantised import quantise
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.tensor_decoder import TensorDecoder
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import SamplingConfig, draw, law
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

GREEDY, UNTOUCHED = SamplingConfig(temperature=0.0), SamplingConfig()
K, CAPACITY, PAGE = 3, 12, 2


class Own(NamedTuple):
    """A policy and its own copy, published."""

    publisher: Publisher
    graphs: tuple[ModelGraph, ModelGraph]
    weights: Published


@pytest.fixture(scope="module")
def own(toy) -> Own:
    publisher = Publisher(toy.policy_graph, graph_of(SelfInt8Config().build))
    policy = toy.policies["deep"]
    graphs = publisher.rollout_graphs(policy, {})
    assert graphs[1] is not None
    return Own(publisher, (graphs[0], graphs[1]), publisher.publish(policy, {}, PolicyVersion(4)))


def test_publish_makes_the_codes_anew_and_of_one_version_with_the_policy(toy, own):
    policy = toy.policies["deep"]
    moved = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.roll(leaf, 1, axis=-1), policy)
    again = own.publisher.publish(moved, {}, PolicyVersion(5))
    for published, version in ((own.weights, 4), (again, 5)):
        assert published.stamped_draft.version == published.stamped_policy.version == PolicyVersion(version)
        of, copy = published.policy, published.draft["policy"]
        head = {"values": copy["head_values"], "scales": copy["head_scales"]}
        for codes, kernel in (
            (copy["layers"][1]["self_attn"]["qkv"]["side_by_side"], of["layers"][1]["self_attn"]["qkv"]["kernel"]),
            (copy["layers"][0]["mlp"]["down_proj"], of["layers"][0]["mlp"]["down_proj"]["kernel"]),
            (head, of["lm_head"]["kernel"]),
        ):
            wanted = quantise(kernel, summed=0)
            np.testing.assert_array_equal(codes["values"], wanted.values)
            np.testing.assert_allclose(codes["scales"], wanted.scales, rtol=1e-6)
        rows = quantise(of["embed_tokens"], summed=1)
        np.testing.assert_array_equal(copy["embed_values"], rows.values)
        norms = (tree["layers"][0]["input_layernorm"]["weight"] for tree in (copy, of))
        np.testing.assert_array_equal(*norms)
    old, new = (published.draft["policy"]["head_values"] for published in (own.weights, again))
    assert (old != new).any()


def test_there_is_nothing_to_train_save_or_load_and_no_state_beside_the_policys_cache(own):
    assert not SELF_INT8.trained and SELF_INT8.save is SELF_INT8.load is None
    draft = own.graphs[1].merge(own.weights.draft)
    context = Context(jnp.zeros((2, 0), jnp.int32), jnp.zeros((2, 0), jnp.int32))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(draft.empty_state(2, 1000, context))) == 0
    matrices = [leaf for leaf in jax.tree.leaves(own.weights.policy) if leaf.ndim > 1]
    codes = [leaf for leaf in jax.tree.leaves(own.weights.draft) if leaf.ndim > 1]
    assert {leaf.dtype for leaf in codes} == {jnp.dtype("int8")}
    assert sum(leaf.nbytes for leaf in codes) == sum(leaf.nbytes for leaf in matrices) / 4


class Played(NamedTuple):
    """A round over a cache that was lent, and the forward of its block over one that was not."""

    drafts: Any  # i32[B, K]
    laws: Any  # f32[B, K, V]
    lent: Any  # layers after the draft
    verified: Any  # hidden, layers
    never_lent: Any  # the same


def round_of(graphs, weights, cache, newest, anchor, live, spoil) -> Played:
    """`spoil`: fill what the draft wrote with something else before the verify forward."""
    policy_weights, draft_weights = weights
    policy, draft = graphs[0].merge(policy_weights), graphs[1].merge(draft_weights)
    uniforms = jax.random.uniform(jax.random.key(3), (newest.shape[0], K))
    state = borrowed(draft, (), cache, live)
    proposal, state = draft.propose(state, newest, anchor, uniforms, UNTOUCHED, Shared(*policy.tables("float32")))
    state, lent = given_back(draft, state, cache)
    assert state == () and type(lent) is type(cache)
    block = jnp.concatenate([newest[:, None], proposal.tokens], axis=1)
    active = jnp.broadcast_to(live[:, None], block.shape)

    def verified(layers):
        out = policy.step(block, anchor, cache._replace(layers=layers), tap_layers=(), active=active)
        return out.hidden, out.cache.layers

    # One loop body, so that both are one piece of program and round alike.
    fill = lambda now, before: jnp.where(spoil & (now != before), jnp.asarray(1e3, now.dtype), now)  # noqa: E731
    written = jax.tree.map(fill, lent.layers, cache.layers)
    both = jax.lax.map(verified, jax.tree.map(lambda *pair: jnp.stack(pair), written, cache.layers))
    of = lambda number: jax.tree.map(lambda leaf: leaf[number], both)  # noqa: E731
    return Played(proposal.tokens, proposal.laws, lent.layers, of(0), of(1))


def read_prompts(graph, weights, prompts, lengths, pages: bool):
    policy = graph.merge(weights)
    cache = policy.empty_cache(prompts.shape[0], CAPACITY, K)
    if pages:
        columns = CAPACITY // PAGE
        table = 1 + jnp.arange(prompts.shape[0] * columns, dtype=jnp.int32).reshape(-1, 1, columns)
        cache = paged(cache, 1 + table.size, PAGE, table)
    active = jnp.arange(prompts.shape[1])[None] < lengths[:, None]
    start = jnp.zeros_like(lengths)
    return policy.step(prompts, start, cache, tap_layers=(), lengths=lengths, active=active).cache


def slots_of(pool, pages: bool):
    """Keys of a layer as [B, K, S, H], of the rows' own pages in order."""
    pool = np.asarray(pool)
    if not pages:
        return pool
    rows = pool[:, 1:].reshape(pool.shape[0], -1, CAPACITY, pool.shape[-1])
    return np.swapaxes(rows, 0, 1)


PROMPTS = jnp.asarray([[1, 2, 3, 4], [5, 6, 0, 0], [2, 4, 1, 0]], jnp.int32)
LENGTHS = jnp.asarray([4, 2, 3], jnp.int32)
NEWEST, ALL = jnp.asarray([5, 1, 6], jnp.int32), jnp.ones(3, bool)


@pytest.fixture(scope="module")
def prompt_cache(own):
    """The policy's cache of the prompts, in rows or in pages."""
    read = jax.jit(partial(read_prompts, own.graphs[0]), static_argnames="pages")
    return lambda pages: read(own.weights.policy, PROMPTS, LENGTHS, pages=pages)


@pytest.fixture(scope="module")
def play(own):
    """A round over a cache; the same program for all of one kind."""
    weights = own.weights.policy, own.weights.draft
    run = jax.jit(partial(round_of, own.graphs))
    return lambda cache, live=ALL, spoil=False: run(weights, cache, NEWEST, LENGTHS, live, jnp.asarray(spoil))


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_the_verify_forward_rewrites_what_the_draft_wrote_bit_for_bit_and_reads_none_of_it(play, prompt_cache, pages):
    cache, live = prompt_cache(pages), jnp.asarray([True, True, False])
    for spoil in (True, False):
        found = play(cache, live, spoil)
        jax.tree.map(np.testing.assert_array_equal, found.verified, found.never_lent)
    for layer, (now, before) in enumerate(zip(found.lent, cache.layers, strict=True)):
        changed = np.any(slots_of(now.keys, pages) != slots_of(before.keys, pages), axis=(1, 3))
        exact = slots_of(found.never_lent[1][layer].keys, pages)
        slots, lengths = np.arange(CAPACITY), np.asarray(LENGTHS)[:, None]
        wanted = (slots >= lengths) & (slots < lengths + K)
        if pages:
            wanted &= np.asarray(live)[:, None]  # pages of a row that does not decode may be another's
        np.testing.assert_array_equal(changed, wanted)
        off = np.abs(slots_of(now.keys, pages) - exact)[np.broadcast_to(wanted[:, None, :, None], exact.shape)]
        assert 1e-4 < off.max() < 0.5, "guesses are near what belongs there, and not the same"


def test_a_draft_reads_nothing_that_an_earlier_round_left_behind_its_anchor(play, prompt_cache):
    cache = prompt_cache(pages=False)
    behind = jnp.arange(CAPACITY)[None, None, :, None] >= LENGTHS[:, None, None, None]
    stale = cache._replace(layers=jax.tree.map(lambda leaf: jnp.where(behind, 1e3, leaf), cache.layers))
    one, other = play(cache), play(stale)
    np.testing.assert_array_equal(one.laws, other.laws)
    np.testing.assert_array_equal(one.drafts, other.drafts)


def test_drafts_are_drawn_from_the_laws_of_the_int8_policy_over_the_exact_prompt(own, play, prompt_cache):
    """By one forward of the copy over the drafted block at once, where drafting takes one step a token."""
    cache = prompt_cache(pages=False)
    found = play(cache)
    block = jnp.concatenate([NEWEST[:, None], found.drafts[:, :-1]], axis=1)

    @jax.jit
    def at_once(weights):
        copy = own.graphs[1].merge(weights).policy
        return law(copy.logits(copy.step(block, LENGTHS, cache, tap_layers=()).hidden), UNTOUCHED)

    np.testing.assert_allclose(found.laws, at_once(own.weights.draft), atol=1e-5)
    uniforms = jax.random.uniform(jax.random.key(3), (3, K))
    np.testing.assert_array_equal(found.drafts, draw(found.laws, uniforms))


@pytest.mark.slow
def test_a_recurrent_state_is_drafted_from_and_comes_back_as_it_was():
    cfg = Qwen35MoeConfig.tiny()
    _, policy = initialise(cfg.build, jax.random.key(0))
    publisher = Publisher(graph_of(cfg.build), graph_of(SelfInt8Config().build))
    graphs, weights = publisher.rollout_graphs(policy, {}), publisher.publish(policy, {}, PolicyVersion(0))
    cache = jax.jit(partial(read_prompts, graphs[0], pages=False))(weights.policy, PROMPTS, LENGTHS)
    run = jax.jit(partial(round_of, graphs))
    found = run((weights.policy, weights.draft), cache, NEWEST, LENGTHS, ALL, jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, found.verified, found.never_lent)
    for kind, now, before in zip(cfg.layer_types, found.lent, cache.layers, strict=True):
        same = [bool((a == b).all()) for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(before), strict=True)]
        assert all(same) if kind == "linear_attention" else not any(same)


def test_log_probs_at_temperature_1_are_those_of_one_teacher_forced_forward(toy, own, mixed_requests, sampled_shape):
    engine = Engine(*own.graphs, shape=sampled_shape, sampling=UNTOUCHED)
    rollouts = jax.device_get(engine.generate(own.weights.policy, own.weights.draft, mixed_requests, K))
    assert rollouts.accepted.sum() > 0.8 * rollouts.proposed.sum()
    laws = jax.nn.log_softmax(jnp.asarray(toy.logits("deep", rollouts.tokens)))
    again = np.pad(np.asarray(pick(laws[:, :-1], jnp.asarray(rollouts.tokens[:, 1:]))), ((0, 0), (1, 0)))
    places = np.arange(rollouts.tokens.shape[1])[None]
    response = (places >= rollouts.prompt_lengths[:, None]) & (places < rollouts.lengths[:, None])
    np.testing.assert_allclose(rollouts.logprobs[response], again[response], rtol=0, atol=1e-5)


def test_slots_that_are_refilled_give_each_request_its_own_text_with_speculation_on_and_off(
    toy, own, mixed_requests, greedy_shape
):
    """Eight requests through three slots; a rule may choose plain rounds, and does where a draft step costs more."""
    engine = Engine(*own.graphs, shape=greedy_shape, sampling=GREEDY)
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    rule = CostModel(lengths=(0, K))
    slots = SlotShape(slots=3, draft_lengths=(0, K), rule=rule, page=2, chunk=2, walk=4, poison=True)
    for seconds, drafted in (((1.0, 1.1), True), ((1.0, 50.0), False)):
        control = start(rule, jax.random.key(0), jnp.asarray(seconds))
        served = engine.serve(own.weights.policy, own.weights.draft, mixed_requests, slots, control)
        found = jax.device_get(served.rollouts)
        for field in ("tokens", "lengths", "finished"):
            np.testing.assert_array_equal(getattr(found, field), getattr(plain, field), err_msg=field)
        plain_rounds, rounds = np.asarray(served.ledger.rounds)
        assert rounds > plain_rounds if drafted else plain_rounds > rounds


def test_weights_that_are_split_are_refused_in_a_line(toy):
    policy = TensorDecoder(toy.policy_cfg, PackedRows(tensor_axis="tensor"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="whole on each device.* use mesh.tensor=1"):
        SelfInt8Config().build(nnx.Rngs(0)).made_of(policy)
