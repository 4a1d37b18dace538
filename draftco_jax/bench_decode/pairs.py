"""The policies that are measured, each with its draft: the shipped pair and what it grows to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from draftco_jax.config import resolve_checkpoint
from draftco_jax.decoding.engine import Engine, EngineShape, Request
from draftco_jax.drafts.eagle3.checkpoint import load_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.growth import grow_draft
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.evaluation import build_request
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.growth import grow
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import count_parameters
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

DIGITS = 3
_PROMPTS = 256
_SHIPPED = "0.4M"


def _sizes(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": hidden,
    }


LADDER: dict[str, dict[str, int]] = {
    "tiny": _sizes(3, 192, 6, 2, 384),  # for --fast
    _SHIPPED: {},
    "10M": _sizes(6, 384, 12, 4, 1152),
    "50M": _sizes(8, 768, 24, 8, 2048),
}
"""Sizes by rung; head width, vocabulary and constants are the shipped policy's."""
CALLS = {"tiny": 1, _SHIPPED: 16, "10M": 8, "50M": 4}
"""Calls of a turn at batch 1: a call of a small policy takes milliseconds, and texts differ in length."""


def task_of() -> ArithmeticTask:
    """Held-out additions."""
    return ArithmeticTask(ArithmeticConfig(digits=DIGITS), 0, "held_out")


@dataclass(frozen=True)
class Pair:
    """A policy and its draft in the train layout, and published."""

    name: str
    policy_cfg: Qwen3Config
    policy: Params
    draft_cfg: Eagle3Config
    draft: Params
    step_matmul: Literal["xla", "skinny"] = "xla"
    """What multiplies the policy's steps (`ComputeConfig`)."""
    _engines: dict[tuple[SamplingConfig, int], Engine] = field(default_factory=dict, repr=False)

    @cached_property
    def _publisher(self) -> Publisher:
        policy = graph_of(partial(self.policy_cfg.build, compute=ComputeConfig(step_matmul=self.step_matmul)))
        return Publisher(policy, graph_of(self.draft_cfg.build))

    @cached_property
    def graphs(self) -> tuple[ModelGraph, ModelGraph]:
        """In the rollout layout."""
        policy, draft = self._publisher.rollout_graphs(self.policy, self.draft)
        assert draft is not None
        return policy, draft

    @cached_property
    def published(self) -> Published:
        """Weights that engines take."""
        return self._publisher.publish(self.policy, self.draft, PolicyVersion(0))

    @property
    def shape(self) -> EngineShape:
        """Of whole responses."""
        task = task_of()
        return EngineShape(
            prompt_capacity=task.max_prompt_tokens,
            max_new_tokens=task.max_response_tokens,
            stop_ids=(task.tokenizer.eos_id,),
            pad_id=task.tokenizer.pad_id,
        )

    def engine(self, sampling: SamplingConfig, max_new_tokens: int | None = None) -> Engine:
        """A whole response, or `max_new_tokens` of it; the same one each time, since compiling takes longest."""
        shape = self.shape if max_new_tokens is None else replace(self.shape, max_new_tokens=max_new_tokens)
        asked = sampling, shape.max_new_tokens
        if asked not in self._engines:
            self._engines[asked] = Engine(*self.graphs, shape=shape, sampling=sampling)
        return self._engines[asked]

    def calls(self, batch: int) -> int:
        """Calls of a turn."""
        return max(1, CALLS[self.name] // batch)

    def turns(self, batch: int, first: int, count: int, key: jax.Array) -> list[list[Request]]:
        """Requests of each call of `count` turns from turn `first` on; every call has prompts and keys of its own."""
        prompts, calls = [task_of().problem(i) for i in range(_PROMPTS)], self.calls(batch)

        def request(number: int) -> Request:
            chosen = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
            return build_request(chosen, 1, self.shape, jax.random.fold_in(key, number))

        return [[request(turn * calls + c) for c in range(calls)] for turn in range(first, first + count)]

    def grown(self, name: str) -> Pair:
        """This pair in the body of a rung of the ladder."""
        if not LADDER[name]:
            return self
        larger = replace(self.policy_cfg, **LADDER[name])
        cfg, policy = grow((self.policy_cfg, self.policy), larger, jax.random.key(1))
        draft_cfg, draft = grow_draft((self.draft_cfg, self.draft), self.policy_cfg, larger, jax.random.key(2))
        return Pair(name, cfg, policy, draft_cfg, draft, self.step_matmul)

    def save(self, folder: Path) -> Path:
        """Write the policy where transformers can read it."""
        save_policy(folder, self.policy_cfg, self.policy)
        return folder

    def describe(self) -> dict[str, Any]:
        """Sizes; a draft pass reads all of the draft but its fusion of taps."""
        shape = LADDER[self.name] or {name: getattr(self.policy_cfg, name) for name in LADDER["tiny"]}
        draft = count_parameters(self.draft)
        return dict(shape) | {
            "parameters": count_parameters(self.policy),
            "draft_parameters": draft,
            "draft_parameters_of_a_pass": draft - count_parameters(self.draft["fc"]),
            "calls_of_a_turn_at_batch_1": CALLS[self.name],
        }


def shipped_pair(step_matmul: Literal["xla", "skinny"] = "xla") -> Pair:
    """The policy and the EAGLE-3 draft that come with the package."""
    folder = resolve_checkpoint(f"shipped:arithmetic{DIGITS}")
    policy_cfg, policy = load_policy(folder / "policy")
    draft_cfg, _, draft = load_draft(folder / "draft")
    assert isinstance(policy_cfg, Qwen3Config)
    return Pair(_SHIPPED, policy_cfg, policy, draft_cfg, draft, step_matmul)


def response_tokens(rows: ArrayLike, prompt_lengths: ArrayLike, lengths: ArrayLike) -> list[list[int]]:
    """What was written, i32[B, S] without prompt and padding."""
    bounds = zip(np.asarray(rows), np.asarray(prompt_lengths), np.asarray(lengths), strict=True)
    return [row[start:end].tolist() for row, start, end in bounds]
