"""A generate call is one program: static shapes, one loop, no host in between, no index outside its array."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

from draftco_jax.decoding.engine import Engine, EngineShape, generate_plain, generate_speculative
from draftco_jax.numerics.sampling import SamplingConfig

SAMPLING = SamplingConfig()
GREEDY = SamplingConfig(temperature=0.0)
K = 3


@pytest.mark.parametrize("k", [0, K])
def test_a_call_moves_nothing_between_host_and_device(toy, mixed_requests, sampled_shape, k):
    weights = toy.published("deep", "good" if k else None)
    engine = toy.engine(sampled_shape, SAMPLING)
    jax.block_until_ready(engine.generate(*weights, mixed_requests, k))  # compiled now
    with jax.transfer_guard("disallow"):
        rollouts = jax.block_until_ready(engine.generate(*weights, mixed_requests, k))
    assert rollouts.rounds.sum() > 8 or k == 0


def primitives(jaxpr: jex_core.Jaxpr) -> Iterator[str]:
    """Names of the primitives of a program; bodies of loops and branches are left out, calls are followed."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name not in ("while", "scan", "cond"):
            for inner in jex_core.jaxprs_in_params(equation.params):
                yield from primitives(inner)


@pytest.mark.parametrize("k", [0, K])
def test_the_program_holds_one_loop_over_the_tokens_and_calls_no_host(toy, mixed_requests, sampled_shape, k):
    weights = toy.published("deep", "good" if k else None)
    options = {"shape": sampled_shape, "sampling": SAMPLING}
    if k:
        program = lambda *a: generate_speculative(toy.graphs, *a, draft_length=k, **options)  # noqa: E731
    else:
        program = lambda *a: generate_plain((toy.graphs[0], None), *a, **options)  # noqa: E731
    jaxpr = jax.make_jaxpr(program)(weights, mixed_requests)
    names = list(primitives(jaxpr.jaxpr))
    assert names.count("while") == 1
    assert not {"scan", "cond"} & set(names)
    assert "callback" not in str(jaxpr)


def test_a_publish_compiles_nothing(toy, mixed_requests, sampled_shape):
    engine = toy.engine(sampled_shape, SAMPLING)
    engine.generate(*toy.published("deep", "good"), mixed_requests, K)
    with jax.no_tracing():
        engine.generate(*toy.published("bigram", "random"), mixed_requests, K)


class Slices:
    """Every dynamic slice and slice update that a program makes: (place, size, room) of each dim."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        read, write = jax.lax.dynamic_slice, jax.lax.dynamic_update_slice

        def checked_read(operand, start_indices, slice_sizes, **options):
            self._record(start_indices, slice_sizes, operand.shape)
            return read(operand, start_indices, slice_sizes, **options)

        def checked_write(operand, update, start_indices, **options):
            self._record(start_indices, update.shape, operand.shape)
            return write(operand, update, start_indices, **options)

        monkeypatch.setattr(jax.lax, "dynamic_slice", checked_read)
        monkeypatch.setattr(jax.lax, "dynamic_update_slice", checked_write)

    def _record(self, start_indices, sizes, room) -> None:
        def note(start: np.ndarray) -> None:
            self.seen.append((np.asarray(start), np.array(sizes), np.array(room)))

        jax.debug.callback(note, jnp.stack([jnp.asarray(index, jnp.int32) for index in start_indices]))

    def outside(self) -> list[tuple]:
        return [each for each in self.seen if (each[0] < 0).any() or (each[0] + each[1] > each[2]).any()]


@pytest.mark.parametrize("k", [0, 4])
def test_bug_case_b54_no_slice_leaves_its_array(toy, mixed_requests, greedy_shape, monkeypatch, k):
    # Prompts fill their capacity, responses reach max_new_tokens, and finished rows wait for the others.
    slices = Slices(monkeypatch)
    engine = Engine(*toy.graphs, shape=greedy_shape, sampling=GREEDY)
    weights = toy.published("deep", "good" if k else None)
    rollouts = jax.tree.map(np.asarray, engine.generate(*weights, mixed_requests, k))
    jax.effects_barrier()
    assert slices.outside() == []
    assert len(slices.seen) > 100
    assert (rollouts.lengths == rollouts.tokens.shape[1]).any()
    if k:
        full = rollouts.lengths - rollouts.prompt_lengths == greedy_shape.max_new_tokens
        assert rollouts.rounds[full].min() + 2 < rollouts.rounds.max()
    expected = toy.generate("deep", "good", mixed_requests, k, greedy_shape, GREEDY)
    np.testing.assert_array_equal(rollouts.tokens, expected.tokens)


def test_every_id_of_a_rollout_is_in_the_vocabulary(toy, mixed_requests, sampled_shape):
    for k in (0, K):
        tokens = toy.generate("deep", "random", mixed_requests, k, sampled_shape, SAMPLING).tokens
        assert tokens.min() >= 0 and tokens.max() < toy.vocab


@pytest.mark.parametrize("name", ["prompt_capacity", "max_new_tokens"])
def test_capacities_that_hold_nothing_are_refused(name):
    sizes = {"prompt_capacity": 4, "max_new_tokens": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        EngineShape(**sizes, stop_ids=(1,), pad_id=0)
