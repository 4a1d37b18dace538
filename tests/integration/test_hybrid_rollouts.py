"""Rollouts of every policy family, the recurrent ones included: speculative = plain = a second reading from scratch.

Recurrent layers cannot overwrite a rejected token as a cache does. That no rejected draft leaves a trace is seen in the
greedy text, held to one for whose every token all before it is read again, and in the log-probs of sampled text, held
to one packed forward. A scripted draft, that text with faults at chosen places, makes each number of accepted tokens
from 0 to k occur.

k is fixed in a call of the engine: it changes from call to call, and within a request by a call that goes on from the
text of another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.base import Context, DraftConfig
from draftco_jax.drafts.matching import copied
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.compute import FLOAT32, ComputeConfig
from draftco_jax.models.functional import graph_of, initialise, split
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.layer_runs import stack_layers
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.numerics.rows import pick, row_at
from draftco_jax.numerics.sampling import SamplingConfig, log_law
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher


def half(cfg, *patterns):
    """The first half of its layers, which holds one of each kind: compiling is what these tests wait for."""
    layers = cfg.num_hidden_layers // 2
    return replace(cfg, num_hidden_layers=layers, **{name: getattr(cfg, name)[:layers] for name in patterns})


DEEP = "qwen3_5_moe, two layers of each kind"
POLICIES = {
    "llama": half(LlamaConfig.tiny()),
    "qwen3": Qwen3Config.tiny(hidden_size=16, intermediate_size=32),
    "qwen3_moe": half(Qwen3MoeConfig.tiny()),
    "qwen3_5_moe": half(Qwen35MoeConfig.tiny(), "layer_types"),
    "nemotron_h": half(NemotronHConfig.tiny(), "block_types"),
    "nemotron_h_clamped": half(replace(NemotronHConfig.tiny(), time_step_limit=(0.01, 0.05)), "block_types"),
    "gpt_oss": half(GptOssConfig.tiny(), "layer_types"),
}
HYBRIDS = ("qwen3_5_moe", "nemotron_h")
BFLOAT16 = ComputeConfig(dtype="bfloat16")

VOCABULARY, CAPACITY, NEW = 32, 12, 24
AHEAD = 16  # tokens that the oracle knows beyond NEW: blocks reach over the end, and one call goes on from another
LENGTHS = np.array([5, 3, 1, 4, 2, 5, 1, 3], np.int32)
ROWS = np.arange(len(LENGTHS))


class ScriptConfig(DraftConfig):
    """A draft that says what it is told."""

    tap_layers: ClassVar[tuple[int, ...]] = ()


class Script(nnx.Module):
    """Proposes, for the places after the anchor, the tokens that the request's history has there."""

    def __init__(self):
        self.cfg = ScriptConfig()

    def empty_state(self, batch, capacity, context):
        return context.history

    def absorb(self, state, features, shared):
        return state

    def propose(self, state, newest, anchor, uniforms, sampling, shared):
        steps = jnp.arange(uniforms.shape[1], dtype=jnp.int32)[None]
        places = jnp.minimum(anchor[:, None] + 1 + steps, state.shape[1] - 1)
        tokens = jnp.take_along_axis(state, places, axis=1)
        return copied(tokens, jnp.full_like(anchor, uniforms.shape[1]), shared.embedding.shape[0]), state


class Policy:
    """One family with weights far from uniform laws, and what it says by the slow way."""

    def __init__(self, family):
        self.cfg = Qwen35MoeConfig.tiny() if family == DEEP else POLICIES[family]
        self.graph = graph_of(self.cfg.build)
        params = jax.jit(lambda key: initialise(self.cfg.build, key)[1])(jax.random.key(1))
        # Weights of 0.02 say nearly the same everywhere; these have a mind of their own, and the last norm sharpens it.
        params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
        params["norm"]["weight"] += 4
        self.params = params
        self.prompts = np.random.default_rng(3).integers(2, VOCABULARY, (len(ROWS), CAPACITY)).astype(np.int32)
        self.prompts[np.arange(CAPACITY)[None] >= LENGTHS[:, None]] = 0
        self.text = self._read_again()
        self.stop = self._stop()
        self.scripts, self.no_weights = split(Script())
        self.engines = {}

    def _read_again(self):
        """Greedy text [B, CAPACITY + NEW + AHEAD]: for each token a packed forward over all before it, no cache."""

        @jax.jit
        def following(params, tokens, lengths):
            places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
            policy = self.graph.merge(params)
            hidden = policy(tokens, places, (places < lengths[:, None]).astype(jnp.int32)).hidden
            return jnp.argmax(policy.logits(row_at(hidden, lengths - 1)), axis=-1)

        text = np.pad(self.prompts, ((0, 0), (0, NEW + AHEAD)))
        for count in range(NEW + AHEAD):
            text[ROWS, LENGTHS + count] = following(self.params, jnp.asarray(text), jnp.asarray(LENGTHS + count))
        return text

    def _stop(self):
        """The token that ends most requests at their third to sixteenth token, and leaves at least three alone."""
        said = np.stack([self.text[row, LENGTHS[row] : LENGTHS[row] + NEW] for row in ROWS])
        hits = said[:, :, None] == np.arange(VOCABULARY)
        first = np.where(hits.any(1), hits.argmax(1), NEW)
        ends = ((first >= 2) & (first < 16)).sum(0) * ((first == NEW).sum(0) >= 3) * (first.min(0) > 0)
        assert ends.max() > 0, "no token ends some requests and not others"
        return int(ends.argmax())

    def script(self, k, text=None):
        """The text with faults such that rounds accept b, b + 1, .. k, 0, 1, .. drafts, b the request's number."""
        script = (self.text if text is None else text).copy()
        for row in ROWS:
            place, run = LENGTHS[row] + 1, row % (k + 1)
            while place + run < script.shape[1]:
                place += run
                if run < k:
                    script[row, place] = (script[row, place] + 1 + run) % VOCABULARY
                place, run = place + 1, (run + 1) % (k + 1)
        return script

    def request(self, script=None):
        context = no_context(len(ROWS))
        if script is not None:
            context = Context(jnp.asarray(script), context.siblings)
        keys = request_keys(jax.random.key(5), len(ROWS))
        return Request(jnp.asarray(self.prompts), jnp.asarray(LENGTHS), keys, context)

    def engine(self, compute=FLOAT32):
        """Greedy, with the scripted draft; and the weights it takes."""
        if compute not in self.engines:
            self.engines[compute] = self._engine(compute)
        return self.engines[compute]

    def _engine(self, compute):
        publisher = Publisher(graph_of(partial(self.cfg.build, compute=compute)), self.scripts)
        engine = Engine(
            *publisher.rollout_graphs(self.params, self.no_weights),
            shape=EngineShape(prompt_capacity=CAPACITY, max_new_tokens=NEW, stop_ids=(self.stop,), pad_id=0),
            sampling=SamplingConfig(temperature=0.0),
        )
        return engine, publisher.publish(self.params, self.no_weights, PolicyVersion(0))

    def roll(self, request, k, compute=FLOAT32):
        engine, weights = self.engine(compute)
        return jax.tree.map(np.asarray, engine.generate(weights.policy, weights.draft, request, k))

    def check_text(self, rollouts):
        """Tokens, lengths and ends are those of the oracle."""
        for row in ROWS:
            start = rollouts.prompt_lengths[row]
            wanted = self.text[row, : start + NEW]
            stops = np.flatnonzero(wanted[start:] == self.stop)
            wanted = wanted[: start + stops[0] + 1] if len(stops) else wanted
            np.testing.assert_array_equal(rollouts.tokens[row, : rollouts.lengths[row]], wanted, err_msg=f"row {row}")
            assert rollouts.finished[row] == bool(len(stops))


policy_of = cache(Policy)


def check_rounds(rollouts, k):
    """Every number of accepted drafts occurred, and with k of 4 and 7 a stop before the end of what was accepted."""
    reached = np.concatenate([rollouts.rounds[:, None], rollouts.accepted, 0 * rollouts.rounds[:, None]], axis=1)
    exactly = (reached[:, :-1] - reached[:, 1:]).sum(0)
    assert exactly.shape == (k + 1,) and (exactly > 0).all(), exactly
    cut = rollouts.finished & (rollouts.committed < rollouts.rounds + rollouts.accepted.sum(1))
    assert k not in (4, 7) or cut.any(), "no stop token inside a block"  # with others it is a matter of chance


# Every kind of memory once, in the cheapest family that has it: all tokens, the last ones, a state. That every family
# reads on from its cache as it reads whole rows is held by tests/golden/test_families.py.
FAST = {"llama": (0, 4), "qwen3_5_moe": (4,), "nemotron_h": (0, 1, 4, 7), "gpt_oss": (4,)}


def cases():
    """Every k from 0 to 7; those whose compilation is worth its time in every run are not marked slow."""
    for family in POLICIES:
        for k in range(8):
            fast = k in FAST.get(family, ())
            yield pytest.param(family, k, marks=() if fast else pytest.mark.slow, id=f"{family}-{k}")


@pytest.mark.parametrize(("family", "k"), list(cases()))
def test_greedy_text_is_that_of_reading_again_from_scratch(family, k):
    policy = policy_of(family)
    rollouts = policy.roll(policy.request(policy.script(k)), k)
    policy.check_text(rollouts)
    assert rollouts.finished.any() and not rollouts.finished.all()
    if k:
        check_rounds(rollouts, k)


@pytest.mark.parametrize("family", ["nemotron_h", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_a_request_goes_on_with_another_k(family):
    """The text of a call with k = 7, cut at different lengths, is the prompt of calls with k = 4, 1 and 0."""
    policy = policy_of(family)
    first = policy.roll(policy.request(policy.script(7)), 7)
    lengths = np.minimum(LENGTHS + 7, first.lengths - first.finished).astype(np.int32)
    prompts = np.where(np.arange(CAPACITY)[None] < lengths[:, None], first.tokens[:, :CAPACITY], 0)
    for k in (4, 1, 0):
        request = policy.request(policy.script(k))._replace(
            prompts=jnp.asarray(prompts), prompt_lengths=jnp.asarray(lengths)
        )
        policy.check_text(policy.roll(request, k))


def read_once(policy, rollouts, sampling):
    """Log-prob of each token by one packed forward over the finished texts; entry t is of token t."""

    @jax.jit
    def read(params, tokens, lengths):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        module = policy.graph.merge(params)
        hidden = module(tokens, places, (places < lengths[:, None]).astype(jnp.int32)).hidden
        return pick(log_law(module.logits(hidden[:, :-1]), sampling), tokens[:, 1:])

    found = read(policy.params, jnp.asarray(rollouts.tokens), jnp.asarray(rollouts.lengths))
    return np.pad(np.asarray(found), ((0, 0), (1, 0)))


@pytest.mark.parametrize(
    "family",
    [name if name in ("llama", *HYBRIDS) else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
def test_log_probs_of_sampled_text_are_those_of_one_packed_reading(family):
    policy, k, sampling = policy_of(family), 4, SamplingConfig(temperature=1.0)
    draft_graph, draft = initialise(NGramConfig(min_match=1, max_match=2).build, jax.random.key(2))
    publisher = Publisher(policy.graph, draft_graph)
    weights = publisher.publish(policy.params, draft, PolicyVersion(0))
    shape = EngineShape(prompt_capacity=CAPACITY, max_new_tokens=NEW, stop_ids=(), pad_id=0)
    engine = Engine(*publisher.rollout_graphs(policy.params, draft), shape=shape, sampling=sampling)
    rollouts = jax.tree.map(np.asarray, engine.generate(weights.policy, weights.draft, policy.request(), k))
    assert 0 < rollouts.accepted.sum() < rollouts.proposed.sum(), "only kept and rejected drafts together show anything"
    places = np.arange(rollouts.tokens.shape[1])[None]
    response = (places >= LENGTHS[:, None]) & (places < rollouts.lengths[:, None])
    again = read_once(policy, rollouts, sampling)
    # Measured 2e-6.
    np.testing.assert_allclose(rollouts.logprobs[response], again[response], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_stacked_layers_roll_out_as_layers_one_by_one():
    policy, k, compute = policy_of(DEEP), 4, ComputeConfig(scan_layers=True)
    graph = graph_of(partial(policy.cfg.build, compute=compute))
    stacked = stack_layers(policy.params, policy.cfg.runs)
    one_by_one, weights = policy.engine()
    engine = Engine(graph, policy.scripts, shape=one_by_one.shape, sampling=one_by_one.sampling)
    request = policy.request(policy.script(k))
    rollouts = jax.tree.map(np.asarray, engine.generate(stacked, policy.no_weights, request, k))
    policy.check_text(rollouts)
    check_rounds(rollouts, k)
    published = Publisher(graph, policy.scripts).publish(stacked, policy.no_weights, PolicyVersion(0))
    jax.tree.map(np.testing.assert_array_equal, published.policy, weights.policy)


@pytest.mark.parametrize("family", [pytest.param("qwen3_5_moe", marks=pytest.mark.slow), "llama"])
def test_bfloat16_speculative_text_is_plain_text(family):
    policy, k = policy_of(family), 4
    plain = policy.roll(policy.request(policy.script(0)), 0, BFLOAT16)
    text = policy.text.copy()
    text[:, : plain.tokens.shape[1]] = plain.tokens
    rollouts = policy.roll(policy.request(policy.script(k, text)), k, BFLOAT16)
    check_rounds(rollouts, k)
    np.testing.assert_array_equal(rollouts.tokens, plain.tokens)
