"""Toy models whose laws are known, and the compiled programs that the tests of this folder share.

The policy's embedding table is one-hot, so the weights of both models can be written down. With its layers switched off
the policy is a bigram model, and the draft below IS that model; with them on, the same draft is good but not exact.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import chi2

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import ModelGraph, Params, abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Publisher

EPS = 1e-12  # so small that a normed one-hot vector is sqrt(D) times one-hot to float32 rounding
HEAD_WIDTH = 8
SELF_ATTENTION = 60.0  # makes the scores of a query's own index larger than all others by hundreds


class Toy:
    """A policy and a draft of one structure with several sets of weights; programs are compiled once and shared.

    policies: "bigram" (law of the next token depends on the last one only), "deep" (on the whole prefix), "flat" (the
    uniform law), "cycle" (x + 1 follows x, 0 the last token), "loop" (the last three tokens in turn, for ever).
    drafts: "good" (equal to the bigram policy, close to the deep one), "cycle" and "loop" (equal to those policies),
    "wrong" (its likeliest token is the bigram policy's least likely one), "random".
    """

    def __init__(self, vocab: int, *, layers: int, kept: tuple[int, ...] = (), seed: int = 0) -> None:
        self.vocab = vocab
        self.policy_cfg = policy_cfg = Qwen3Config(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=HEAD_WIDTH,
            rope_theta=100.0,
            rms_norm_eps=EPS,
            max_position_embeddings=64,
        )
        self.draft_cfg = Eagle3Config.for_target(
            policy_cfg, num_key_value_heads=2, rope_theta=10.0, draft_vocab_size=len(kept) or vocab
        )
        self.policy_graph = graph_of(policy_cfg.build)
        self.draft_graph = _graph_with_map(self.draft_cfg, kept)
        self._write_weights(policy_cfg, np.asarray(kept or range(vocab)), seed)
        publisher = Publisher(self.policy_graph, self.draft_graph)
        self.graphs = publisher.rollout_graphs(self.policies["bigram"], self.drafts["good"])
        self._published = {}
        for policy, draft in zip(self.policies, self.drafts, strict=True):
            version = publisher.publish(self.policies[policy], self.drafts[draft], PolicyVersion(0))
            self._published |= {("policy", policy): version.policy, ("draft", draft): version.draft}
        self._engines: dict[tuple, Engine] = {}
        self._logits = jax.jit(partial(_teacher_forced, self.policy_graph))

    def _write_weights(self, policy_cfg: Qwen3Config, kept: np.ndarray, seed: int) -> None:
        rng = np.random.default_rng(seed)
        abstract = abstract_params(policy_cfg.build)
        width = policy_cfg.hidden_size
        heads = {
            "bigram": rng.normal(0, 0.35, (width, self.vocab)) + 0.1 * _successor_head(width, self.vocab, self.vocab),
            "flat": np.zeros((width, self.vocab)),
            "cycle": _successor_head(width, self.vocab, self.vocab),
            "loop": _successor_head(width, self.vocab, 3),
        }
        heads["deep"] = heads["bigram"]
        self.policies = {
            name: _policy_weights(abstract, head, layers=0.02 if name == "deep" else 0.0, seed=seed + 1)
            for name, head in heads.items()
        }
        abstract = abstract_params(self.draft_cfg.build)
        self.drafts = {
            "good": _bigram_draft(abstract, heads["bigram"][:, kept]),
            "cycle": _bigram_draft(abstract, heads["cycle"][:, kept]),
            "loop": _bigram_draft(abstract, heads["loop"][:, kept]),
            "wrong": _bigram_draft(abstract, -heads["bigram"][:, kept]),
            "random": _random_weights(abstract, np.random.default_rng(seed + 2), 0.4),
        }

    def published(self, policy: str, draft: str | None) -> tuple[Params, Params | None]:
        """Weights as the engine takes them."""
        return self._published["policy", policy], None if draft is None else self._published["draft", draft]

    def engine(self, shape: EngineShape, sampling: SamplingConfig) -> Engine:
        key = (shape, sampling)
        if key not in self._engines:
            self._engines[key] = Engine(*self.graphs, shape=shape, sampling=sampling)
        return self._engines[key]

    def generate(
        self, policy: str, draft: str, request: Request, k: int, shape: EngineShape, sampling: SamplingConfig
    ) -> Rollouts:
        """Roll out with numpy results; k = 0 decodes plainly."""
        weights = self.published(policy, draft if k else None)
        return jax.tree.map(np.asarray, self.engine(shape, sampling).generate(*weights, request, k))

    def logits(self, policy: str, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, S, V] of one forward in the train layout; entry t speaks of token t + 1."""
        return np.asarray(self._logits(self.policies[policy], jnp.asarray(tokens)))


def _graph_with_map(cfg: Eagle3Config, kept: tuple[int, ...]) -> ModelGraph:
    if not kept:
        return graph_of(cfg.build)
    graphdef, _, _ = nnx.split(nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0))), nnx.Param, ...)
    return ModelGraph(graphdef, {"draft_to_target": jnp.asarray(kept, jnp.int32)})


def _teacher_forced(graph: ModelGraph, params: Params, tokens: jax.Array) -> jax.Array:
    policy = graph.merge(params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden, *_ = policy(tokens, positions, jnp.ones_like(tokens))
    return policy.logits(hidden)


def _random_weights(abstract: Params, rng: np.random.Generator, scale: float) -> Params:
    """Normal matrices, norm weights of 1."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(
            np.ones(leaf.shape) if len(leaf.shape) == 1 else rng.normal(0, scale, leaf.shape), leaf.dtype
        )

    return jax.tree.map(fill, abstract)


def _policy_weights(abstract: Params, head: np.ndarray, *, layers: float, seed: int) -> Params:
    """One-hot embedding and the given head; `layers` scales what the blocks add to the residual stream."""
    params = _random_weights(abstract, np.random.default_rng(seed), 0.5)
    params["embed_tokens"] = jnp.eye(*params["embed_tokens"].shape)
    params["lm_head"]["kernel"] = jnp.asarray(head, jnp.float32)
    for block in params["layers"].values():
        block["self_attn"]["o_proj"]["kernel"] *= 3 * layers  # what the rest of the prefix says
        block["mlp"]["down_proj"]["kernel"] *= layers
    return params


def _successor_head(width: int, vocab: int, period: int) -> np.ndarray:
    """Head under which x is followed, nearly surely, by the next one of the last `period` tokens."""
    head = np.zeros((width, vocab))
    tokens = np.arange(vocab)
    head[tokens, vocab - period + (tokens + 1 - vocab) % period] = 5.0
    return head


def _bigram_draft(abstract: Params, head: np.ndarray) -> Params:
    """The draft that equals the bigram policy with this head.

    Queries and keys are constants before the rotation, so scores are largest at distance 0, and the softmax is one-hot
    there: each index reads itself only. The value of [e_x ; h] is e_x - h, hence y = h + (e_x - h) = e_x whatever was
    fed back, and the policy's head does the rest.
    """
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(len(leaf.shape) == 1), leaf.dtype), abstract)
    layer = params["midlayer"]
    taps, width = params["fc"]["kernel"].shape
    params["fc"]["kernel"] = jnp.eye(taps, width)  # the first tap as it is
    first_halves = (np.arange(width) % HEAD_WIDTH < HEAD_WIDTH // 2).astype(np.float32)
    constant = np.concatenate([np.ones((width, width)), np.zeros((width, width))]) * first_halves
    for name in ("q_proj", "k_proj"):
        layer["self_attn"]["qkv"][name]["kernel"] = jnp.asarray(SELF_ATTENTION * constant, jnp.float32)
    layer["self_attn"]["qkv"]["v_proj"]["kernel"] = jnp.concatenate([jnp.eye(width), -jnp.eye(width)])
    layer["self_attn"]["o_proj"]["kernel"] = jnp.eye(width) / width**0.5
    params["lm_head"]["kernel"] = jnp.asarray(head, jnp.float32)
    return params


@pytest.fixture(scope="session")
def toy() -> Toy:
    """Seven tokens: texts long enough for stops, caches, log-probs."""
    return Toy(7, layers=2)


@pytest.fixture(scope="session")
def small_toy() -> Toy:
    """Four tokens: few enough texts to know the law of each."""
    return Toy(4, layers=1)


@pytest.fixture(scope="session")
def small_toy_with_reduced_draft() -> Toy:
    """Four tokens, of which the draft knows 0, 2 and 3."""
    return Toy(4, layers=1, kept=(0, 2, 3))


@pytest.fixture(scope="session")
def greedy_shape() -> EngineShape:
    """The padding id is the stop id, so nothing may be read off the values of unwritten cells."""
    return EngineShape(prompt_capacity=5, max_new_tokens=12, stop_ids=(3,), pad_id=3)


@pytest.fixture(scope="session")
def sampled_shape() -> EngineShape:
    """Two stop ids; the padding id is an ordinary token of the vocabulary."""
    return EngineShape(prompt_capacity=5, max_new_tokens=12, stop_ids=(1, 4), pad_id=0)


@pytest.fixture(scope="session")
def mixed_requests(toy) -> Request:
    """Eight requests with prompts of 1 to 5 tokens; cells after a prompt hold tokens that must not be read."""
    rng = np.random.default_rng(5)
    return Request(
        jnp.asarray(rng.integers(0, toy.vocab, (8, 5)), jnp.int32),
        jnp.asarray([1, 5, 3, 2, 4, 5, 1, 3], jnp.int32),
        request_keys(jax.random.key(11), 8),
        no_context(8),
    )


LAW_REQUESTS = 8192  # half of them for each prompt
LAW_PROMPTS = ((1,), (2, 1, 0))
LAW_STOP = 3
LAW_TOKENS = 4
Text = tuple[int, ...]


@pytest.fixture(scope="session")
def law_shape() -> EngineShape:
    """Texts so short that the law of each is known."""
    return EngineShape(prompt_capacity=3, max_new_tokens=LAW_TOKENS, stop_ids=(LAW_STOP,), pad_id=0)


@pytest.fixture(scope="session")
def law_batch() -> Request:
    """Thousands of requests for two prompts, in turn."""
    rows = [prompt + (0,) * (3 - len(prompt)) for prompt in LAW_PROMPTS] * (LAW_REQUESTS // 2)
    lengths = [len(prompt) for prompt in LAW_PROMPTS] * (LAW_REQUESTS // 2)
    keys = request_keys(jax.random.key(2024), LAW_REQUESTS)
    tokens, lengths = jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
    return Request(tokens, lengths, keys, no_context(LAW_REQUESTS))


def exact_laws(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """Tempered and filtered laws of the rows of logits, float64, token by token."""
    laws = np.zeros(logits.shape)
    for place in np.ndindex(logits.shape[:-1]):
        scaled = logits[place].astype(np.float64) / sampling.temperature
        order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
        weights = np.exp(scaled[order] - scaled.max())
        weights /= weights.sum()
        inside = np.cumsum(weights) - weights < sampling.top_p
        laws[(*place, order[inside])] = weights[inside] / weights[inside].sum()
    return laws


def text_law(toy, policy: str, prompt: Text, sampling: SamplingConfig) -> dict[Text, float]:
    """Probability of every response: a text that ends with the stop token, or LAW_TOKENS tokens without one."""
    continuations = np.array(list(itertools.product(range(toy.vocab), repeat=LAW_TOKENS)))
    rows = np.concatenate([np.tile(prompt, (len(continuations), 1)), continuations], axis=1)
    padded = np.zeros((len(rows), 3 + LAW_TOKENS), np.int32)
    padded[:, : rows.shape[1]] = rows
    logits = toy.logits(policy, padded)[:, len(prompt) - 1 : len(prompt) - 1 + LAW_TOKENS]
    laws = exact_laws(logits, sampling)
    law: dict[Text, float] = {}
    for tokens, conditionals in zip(continuations, laws, strict=True):
        stops = np.flatnonzero(tokens == LAW_STOP)
        length = stops[0] + 1 if len(stops) else LAW_TOKENS
        law[tuple(map(int, tokens[:length]))] = float(np.prod(conditionals[np.arange(length), tokens[:length]]))
    assert abs(sum(law.values()) - 1) < 1e-12
    return law


def chi_square(counts: Counter, law: dict[Text, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; texts expected fewer than five times are one class."""
    assert all(law[text] > 0 for text in counts), "a text of probability 0 was emitted"
    total = sum(counts.values())
    cells = [(counts[text], total * p) for text, p in law.items() if total * p >= 5]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] >= 5:
        cells.append(rest)
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


@pytest.fixture(scope="session")
def text_laws():
    """(toy, policy, sampling) -> the exact law of the texts that answer each prompt."""
    return lambda toy, policy, sampling: [text_law(toy, policy, prompt, sampling) for prompt in LAW_PROMPTS]


@pytest.fixture(scope="session")
def p_value(responses, text_laws):
    """Probability that a right engine is as far from the exact law as these rollouts of `law_batch`."""

    def evaluate(toy, policy, rollouts, sampling) -> float:
        statistic, freedom = 0.0, 0
        texts = [tuple(text) for text in responses(rollouts)]
        for start, law in enumerate(text_laws(toy, policy, sampling)):
            parts = chi_square(Counter(texts[start::2]), law)
            statistic, freedom = statistic + parts[0], freedom + parts[1]
        return float(chi2.sf(statistic, freedom))

    return evaluate


@pytest.fixture(scope="session")
def select():
    """Requests at these places of a batch, in this order."""

    def pick(request: Request, places: list[int]) -> Request:
        return jax.tree.map(lambda field: field[jnp.asarray(places)], request)

    return pick


@pytest.fixture(scope="session")
def responses():
    """Response tokens of each row, by lengths."""

    def cut(rollouts: Rollouts) -> list[list[int]]:
        rows = zip(rollouts.tokens, rollouts.prompt_lengths, rollouts.lengths, strict=True)
        return [list(map(int, tokens[start:end])) for tokens, start, end in rows]

    return cut


@pytest.fixture(scope="session")
def rational():
    """The module `rational.py`; files of tests are imported alone, so they cannot import one another."""
    spec = importlib.util.spec_from_file_location("rational", Path(__file__).with_name("rational.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
