"""Holds Qwen3.5-MoE's own prediction head, read out of a policy's folder, to transformers' `MtpModel`."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.mtp.checkpoint import load_mtp
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.functional import Params, graph_of
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.numerics.sampling import SamplingConfig

# float32 sums in another order, for logits up to 5.4: measured 5e-6 on one kind of CPU and 1.3e-5 on another.
ATOL = 2e-5
STEPS = 3


class Recorded(NamedTuple):
    """A policy, its head, and what transformers made of them."""

    cfg: MtpConfig
    head: Params
    policy: Any  # module
    values: dict[str, np.ndarray]
    compiler_options: dict[str, Any]


@pytest.fixture(scope="module")
def recorded(golden, as_users_compile) -> Recorded:
    folder = golden / "qwen3_5_moe_mtp"
    policy_cfg, policy = load_policy(folder)
    cfg, _, head = load_mtp(folder)
    with np.load(folder / "golden.npz") as values:
        return Recorded(cfg, head, graph_of(policy_cfg.build).merge(policy), dict(values), as_users_compile)


def unrolled(recorded: Recorded, cfg: MtpConfig, *, before_norm: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Outputs after the last norm and logits [rows, steps, tokens, ...], from our own policy's states."""
    graph, policy = graph_of(cfg.build), recorded.policy
    last = policy.cfg.num_hidden_layers - 1

    @partial(jax.jit, compiler_options=recorded.compiler_options)
    def run(head, ids):
        positions, ones = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape), jnp.ones_like(ids)
        module, read = graph.merge(head), policy(ids, positions, ones, tap_layers=(last,))
        hidden = read.taps if before_norm else read.hidden
        embeds = [policy.embed(jnp.roll(ids, -1 - k, axis=1)) for k in range(STEPS)]
        outputs = module.norm(jnp.stack(module.unroll(embeds, hidden, positions, ones), axis=1))
        return outputs, policy.logits(outputs)

    outputs, logits = run(recorded.head, jnp.asarray(recorded.values["ids"], jnp.int32))
    return np.asarray(outputs), np.asarray(logits)


def test_every_step_from_every_index_equals_transformers(recorded):
    for found, name in zip(unrolled(recorded, recorded.cfg), ("outputs", "logits"), strict=True):
        known = recorded.values[name]
        exist = np.isfinite(known)  # a step whose input token the text does not have was not recorded
        assert exist.any(axis=-1).sum(axis=-1).tolist() == [[11, 10, 9]] * 2
        np.testing.assert_allclose(found[exist], known[exist], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        pytest.param({"hidden_first": True}, 0, marks=pytest.mark.slow),
        ({"feeds_back_normed": False}, 1),
        pytest.param({"zeroes_first_embedding": True}, 0, marks=pytest.mark.slow),
        pytest.param({}, 0, marks=pytest.mark.slow),
    ],
)
def test_every_other_convention_is_seen(recorded, wrong, first):
    """The order of the fused pair, what is fed back (from the second step on), the first embedding; last, a hidden
    state from before the policy's final norm."""
    changed = {name: property(lambda self, value=value: value) for name, value in wrong.items()}
    other = type("Other", (MtpConfig,), changed)
    cfg = other(**{field.name: getattr(recorded.cfg, field.name) for field in fields(recorded.cfg)})
    known = recorded.values["logits"]
    away = np.nanmax(np.abs(unrolled(recorded, cfg, before_norm=not wrong)[1] - known), axis=(0, 2, 3))
    assert (away[:first] < ATOL).all() and (away[first:] > 0.05).all()


def test_greedy_drafts_from_the_end_of_a_text_equal_transformers(recorded):
    cfg, values = recorded.cfg, recorded.values
    ids, hidden = jnp.asarray(values["ids"], jnp.int32), jnp.asarray(values["hidden"])
    rows, count = ids.shape
    shared, none = (
        Shared(recorded.policy.embed_tokens[...], recorded.policy.head_kernel()),
        jnp.zeros((rows, 0), jnp.int32),
    )

    @jax.jit
    def propose(head):
        module, at = graph_of(cfg.build).merge(head), jnp.zeros(rows, jnp.int32)
        state = module.empty_state(rows, count + STEPS, Context(none, none))
        read = Features(ids[:, :-1], ids[:, 1:], hidden[:, :-1, :0], hidden[:, :-1], at, at + count - 2)
        state = module.absorb(state, read, shared)
        greedy = SamplingConfig(temperature=0.0)
        return module.propose(state, ids[:, -1], at + count - 1, jnp.zeros((rows, STEPS)), greedy, shared)[0]

    np.testing.assert_array_equal(propose(recorded.head).tokens, values["drafts"])


def test_experts_in_one_tensor_are_read_as_experts_one_by_one(recorded, golden, tmp_path):
    folder = golden / "qwen3_5_moe_mtp"
    tensors = load_file(folder / "model.safetensors")
    alone = {n: t for n, t in tensors.items() if not n.startswith("mtp.layers.0.mlp.experts.")}
    fused = load_file(folder / "fused_experts.safetensors")
    assert len(fused) == 2 and len(alone) == len(tensors) - 12
    save_file(alone | fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    cfg, _, head = load_mtp(tmp_path)
    assert cfg == recorded.cfg
    jax.tree.map(np.testing.assert_array_equal, head, recorded.head)
