"""A tied policy, a draft of a reduced vocabulary with its own head, a ragged batch, and the compiled joint update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.eagle3.checkpoint import graph_with_map
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec, objective
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.update import Optimizers, TrainState, init_state, make_update
from draftco_jax.types import PackedBatch

VOCAB, ROWS, TOKENS, STEPS = 23, 5, 12, 5
KEPT = np.array([0, 2, 3, 5, 6, 9, 10, 13, 14, 17, 19, 20, 22], np.int32)
POLICY = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=1e4,
    tie_word_embeddings=True,
)
DRAFT = Eagle3Config.for_target(POLICY, draft_vocab_size=KEPT.size, passes=2)
POLICY_RATE, DRAFT_RATE = 1e-3, 4e-3


class Setup(NamedTuple):
    """Structures, weights, and what is fixed when the update is compiled."""

    policy_cfg: Qwen3Config
    draft_cfg: Eagle3Config
    policy: dict[str, Any]
    draft: dict[str, Any]
    spec: ObjectiveSpec
    optimizers: Optimizers


def lively(params, seed):
    """Weights of such a size that attention is not flat, and norms that are not 1: a mistake in either shows."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else noise * leaf.shape[-1] ** -0.5, leaf.dtype)

    return jax.tree.map(draw, params)


@pytest.fixture(scope="session")
def setup() -> Setup:
    spec = ObjectiveSpec(
        policy_graph=graph_of(POLICY.build),
        draft_graph=graph_with_map(DRAFT, KEPT),
        draft_cfg=DRAFT,
        algorithm=GrpoConfig(),
        sampling=SamplingConfig(temperature=0.9),
        chunk_tokens=32,
        draft_length=4,
    )
    optimizers = Optimizers(
        policy=make_optimizer(OptimizerConfig(learning_rate=POLICY_RATE), STEPS),
        draft=make_optimizer(OptimizerConfig(learning_rate=DRAFT_RATE), STEPS),
    )
    policy, draft = lively(abstract_params(POLICY.build), 1), lively(abstract_params(DRAFT.build), 2)
    return Setup(POLICY, DRAFT, policy, draft, spec, optimizers)


LENGTHS, PROMPTS = (7, 4, 9, 3, 6), (2, 1, 4, 1, 3)
PACKED = ((0, 0), (0, 7), (1, 0), (1, 9), (2, 0))  # rows 3 and 4 are padding
ALONE = ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0))


@pytest.fixture(scope="session")
def lay_out() -> Callable[[str], PackedBatch]:
    """ "packed" or "alone" -> the same five documents, several or one to a row."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]
    logprobs = [rng.normal(-3.0, 0.5, n).astype(np.float32) for n in LENGTHS]
    advantages = rng.normal(size=len(LENGTHS)).astype(np.float32)

    def make(layout: str) -> PackedBatch:
        arrays = [np.zeros((ROWS, TOKENS), dtype) for dtype in [np.int32] * 3 + [np.float32] * 4 + [np.int32]]
        tokens, positions, segments, mask, generator, advantage, reward, ids = arrays
        for i, (row, start) in enumerate({"packed": PACKED, "alone": ALONE}[layout]):
            cells = slice(start, start + LENGTHS[i])
            index = np.arange(LENGTHS[i])
            sampled = np.float32(index >= PROMPTS[i])
            tokens[row, cells], positions[row, cells], mask[row, cells] = texts[i], index, sampled
            segments[row, cells] = segments[row].max() + 1
            generator[row, cells], advantage[row, cells] = logprobs[i] * sampled, advantages[i] * sampled
            reward[row, cells], ids[row, cells] = (i % 2) * sampled, 70 + i
        return PackedBatch(*(jnp.asarray(a) for a in arrays))

    return make


@pytest.fixture(scope="session")
def batch(lay_out) -> PackedBatch:
    return lay_out("packed")


@pytest.fixture(scope="session")
def gradient(setup):
    """(batch, counts, lambda) -> (loss, metrics), gradients of policy and draft."""
    differentiate = jax.value_and_grad(objective, has_aux=True)
    key = setup.spec.draft_key(jnp.int32(0))
    compiled = jax.jit(lambda params, *rest: differentiate(params, *rest, None, None, setup.spec, key))
    params = {"policy": setup.policy, "draft": setup.draft}
    return lambda batch, counts, weight=1.0: compiled(params, batch, counts, jnp.float32(weight))


@pytest.fixture(scope="session")
def update(setup):
    """(state, batch, lambda, frozen draft or None) -> state, metrics. One compiled program per kind of call."""
    compiled = make_update(setup.spec, setup.optimizers)
    return lambda state, batch, weight, twin=None: compiled(state, batch, jnp.float32(weight), None, twin)


@pytest.fixture(scope="session")
def start(setup) -> TrainState:
    return init_state(setup.policy, setup.draft, setup.optimizers)


@pytest.fixture(scope="session")
def trained(start, update, batch):
    """lambda and twin -> the state after five updates on one batch."""
    found: dict[Any, TrainState] = {}

    def run(weight, twin=None) -> TrainState:
        key = (weight, twin is not None)
        if key not in found:
            state = start
            for _ in range(STEPS):
                state, _ = update(state, batch, weight, twin)
            found[key] = state
        return found[key]

    return run
