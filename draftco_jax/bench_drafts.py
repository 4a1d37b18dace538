"""`draftco bench drafts`: every draft family on the same warm policy and the same held-out prompts.

Accepted length is that of one sample of each held-out prompt. Speed is measured at another batch size, in turns: plain
decoding, then each family, again and again, so that a drift of the machine's speed hits all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.config import resolve_checkpoint
from draftco_jax.decoding.engine import Engine, EngineShape, Request
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.drafts.base import Context, DraftConfig
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.evaluation import build_request
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.profiling import compare, median_ratio, summarise
from draftco_jax.rollout.history import NO_TOKEN, RolloutHistory
from draftco_jax.types import PolicyVersion, Prompt, Rollouts
from draftco_jax.weight_sync import Publisher

PLAIN = "plain"
_EVALUATION_PROMPTS = 256
_REMEMBERED_PROMPTS = 256
_HISTORY_TOKENS = 4096
_CALLS_PER_TURN = 8  # one call takes a few milliseconds, less than a clock and a cold cache would disturb
_OLD_POLICY_NOISE = 0.02
"""The "previous" draft needs an older policy: the warm one with normal noise of this relative size on each weight."""


@dataclass(frozen=True, kw_only=True)
class BenchDraftsConfig:
    """What is compared."""

    digits: int = 3
    """Which shipped policy: 2 or 3 digits."""
    draft_length: int = 4
    """k, for all families; a block draft that has fewer slots proposes those."""
    batch: int = 1
    """Requests of a timed call."""
    repetitions: int = 15
    """Timed turns; medians are quoted."""
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that measure nothing."""
        for name in ("draft_length", "batch", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; use 4, 1 and 15")


@dataclass(frozen=True)
class _Contestant:
    """A family's draft, ready to generate."""

    engine: Engine
    policy: Params
    draft: Params
    draft_length: int
    context: Callable[[tuple[Prompt, ...], Request], Context | None]


def bench_drafts(cfg: BenchDraftsConfig, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Accepted length and speed of every family; a dict of plain values."""
    folder = resolve_checkpoint(f"shipped:arithmetic{cfg.digits}")
    task = ArithmeticTask(ArithmeticConfig(digits=cfg.digits), cfg.seed, "held_out")
    prompts = tuple(task.problem(i) for i in range(_EVALUATION_PROMPTS))
    stage("loading")
    contestants = _contestants(cfg, folder, task)
    families: dict[str, dict[str, Any]] = {}
    for name, contestant in contestants.items():
        stage(f"accepted length of {name}")
        stats = speculation_stats(_generate(contestant, prompts, jax.random.key(cfg.seed + 1), contestant.draft_length))
        families[name] = {
            "accepted_length": stats.accepted_length,
            "acceptance_rate": stats.acceptance_rate,
            "draft_length": contestant.draft_length,
        }
    stage("timing all families in turn")
    plain, rows = _speeds(cfg, contestants, prompts)
    for name, row in rows.items():
        families[name] |= row
    settings = {"digits": cfg.digits, "batch": cfg.batch, "held_out_prompts": len(prompts), "turns": cfg.repetitions}
    # A family whose draft nobody has trained for this policy yet is named and not measured.
    return settings | {"plain": plain, "families": families, "not_shipped": sorted(FAMILIES.keys() - families.keys())}


def _contestants(cfg: BenchDraftsConfig, folder: Path, task: ArithmeticTask) -> dict[str, _Contestant]:
    policy_cfg, policy = load_policy(folder / "policy")
    policy_graph = graph_of(policy_cfg.build)
    shape = EngineShape(
        prompt_capacity=task.max_prompt_tokens,
        max_new_tokens=task.max_response_tokens,
        stop_ids=task.stop_ids,
        pad_id=task.tokenizer.pad_id,
    )

    def contestant(draft_cfg: DraftConfig, graph: ModelGraph, draft: Params, context: Any) -> _Contestant:
        publisher = Publisher(policy_graph, graph)
        graphs = publisher.rollout_graphs(policy, draft)
        engine = Engine(*graphs, shape=shape, sampling=cfg.sampling)
        weights = publisher.publish(policy, draft, PolicyVersion(0))
        length = min(cfg.draft_length, draft_cfg.max_draft_length or cfg.draft_length)
        return _Contestant(engine, weights.policy, weights.draft or {}, length, context)

    found: dict[str, _Contestant] = {}
    for name, family in FAMILIES.items():
        if family.load is not None and _shipped_draft(folder, name).is_dir():
            draft_cfg, graph, draft = family.load(_shipped_draft(folder, name), None)
            found[name] = contestant(draft_cfg, graph, draft, lambda prompts, request: None)
    for name, draft_cfg in _drafts_without_files(policy_cfg, shape).items():
        context = _context_of(draft_cfg, cfg, found, task, policy_cfg, policy, shape)
        draft = {"policy": _older(policy, cfg.seed)} if isinstance(draft_cfg, PreviousConfig) else {}
        found[name] = contestant(draft_cfg, graph_of(draft_cfg.build), draft, context)
    return found


def _shipped_draft(folder: Path, name: str) -> Path:
    return folder / ("draft" if name == "eagle3" else name)


def _drafts_without_files(policy_cfg: Any, shape: EngineShape) -> dict[str, DraftConfig]:
    """One of each family without weights of its own."""
    return {
        "ngram": NGramConfig(min_match=1),
        "suffix": SuffixConfig(history_tokens=_HISTORY_TOKENS, max_match=8),
        "previous": PreviousConfig(policy=policy_cfg, history_tokens=shape.prompt_capacity + shape.max_new_tokens),
        "self_int8": SelfInt8Config(),
    }


def _older(policy: Params, seed: int) -> Params:
    """A policy near this one."""
    leaves, tree = jax.tree.flatten(policy)
    keys = jax.random.split(jax.random.key(seed + 2), len(leaves))
    noisy = [
        leaf * (1 + _OLD_POLICY_NOISE * jax.random.normal(k, leaf.shape)) for leaf, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def _context_of(
    draft_cfg: DraftConfig,
    cfg: BenchDraftsConfig,
    found: dict[str, _Contestant],
    task: ArithmeticTask,
    policy_cfg: Any,
    policy: Params,
    shape: EngineShape,
) -> Callable[[tuple[Prompt, ...], Request], Context | None]:
    """What a copying draft looks at: the policy's answers to training prompts, or an older policy's to these."""
    if isinstance(draft_cfg, NGramConfig | SelfInt8Config):
        return lambda prompts, request: None
    graph = graph_of(policy_cfg.build)
    publisher = Publisher(graph, None)
    if isinstance(draft_cfg, SuffixConfig):
        train = ArithmeticTask(task.config, cfg.seed, "train")
        prompts = tuple(train.problem(i) for i in range(_REMEMBERED_PROMPTS))
        history = RolloutHistory(*draft_cfg.memory)
        request = build_request(prompts, 1, shape, jax.random.key(cfg.seed + 3))
        writer = next(iter(found.values()))
        history.add(prompts, jax.device_get(writer.engine.generate(writer.policy, None, request)))
        return lambda prompts, request: build_request(prompts, 1, shape, request.keys[0], history).context

    older = publisher.publish(_older(policy, cfg.seed), None, PolicyVersion(0)).policy
    engine = Engine(*publisher.rollout_graphs(policy, None), shape=shape, sampling=cfg.sampling)

    def earlier_texts(prompts: tuple[Prompt, ...], request: Request) -> Context:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(request.keys)
        rollouts = engine.generate(older, None, request._replace(keys=keys))
        written = jnp.arange(rollouts.tokens.shape[1])[None, :] < rollouts.lengths[:, None]
        return Context(jnp.where(written, rollouts.tokens, NO_TOKEN), request.context.siblings)

    return earlier_texts


def _request(contestant: _Contestant, prompts: tuple[Prompt, ...], key: jax.Array) -> Request:
    request = build_request(prompts, 1, contestant.engine.shape, key)
    context = contestant.context(prompts, request)
    return request if context is None else request._replace(context=context)


def _generate(contestant: _Contestant, prompts: tuple[Prompt, ...], key: jax.Array, length: int) -> Rollouts:
    request = _request(contestant, prompts, key)
    return jax.device_get(contestant.engine.generate(contestant.policy, contestant.draft, request, length))


def _speeds(
    cfg: BenchDraftsConfig, contestants: dict[str, _Contestant], prompts: tuple[Prompt, ...]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Tokens a second of plain decoding; rounds and tokens a second of each family, and how it stands to plain.

    A turn is _CALLS_PER_TURN whole generate calls, prefill included. Each turn has its own prompts and keys, the same
    for all. A round of a call is counted once for all its requests, as long as the longest one needs it.
    """
    key = jax.random.key(cfg.seed + 4)

    def requests(contestant: _Contestant, turn: int) -> list[Request]:
        calls = range(turn * _CALLS_PER_TURN, (turn + 1) * _CALLS_PER_TURN)
        chosen = [tuple(prompts[(c * cfg.batch + i) % len(prompts)] for i in range(cfg.batch)) for c in calls]
        return [_request(contestant, p, jax.random.fold_in(key, c)) for p, c in zip(chosen, calls, strict=True)]

    first = next(iter(contestants.values()))
    players = {PLAIN: (first, 0)} | {name: (one, one.draft_length) for name, one in contestants.items()}
    turns = {name: [requests(one, turn) for turn in range(cfg.repetitions + 1)] for name, (one, _) in players.items()}
    results: dict[str, list[list[Rollouts]]] = {name: [] for name in players}

    def call(name: str) -> Callable[[], list[Rollouts]]:
        one, length = players[name]

        def turn() -> list[Rollouts]:
            todo = turns[name][len(results[name])]
            results[name].append([one.engine.generate(one.policy, one.draft, request, length) for request in todo])
            return results[name][-1]

        return turn

    seconds = compare({name: call(name) for name in players}, cfg.repetitions)
    timed = {name: jax.device_get(results[name][1:]) for name in players}  # the first turn compiled
    count = lambda turn, value: float(sum(value(rollouts) for rollouts in turn))  # noqa: E731
    tokens = {
        name: [
            count(turn, lambda r: np.sum(r.lengths - r.prompt_lengths)) / s
            for turn, s in zip(timed[name], seconds[name], strict=True)
        ]
        for name in players
    }
    rows = {}
    for name in contestants:
        rounds = [
            count(turn, lambda r: np.max(r.rounds)) / s for turn, s in zip(timed[name], seconds[name], strict=True)
        ]
        rows[name] = {
            "rounds_per_second": summarise(rounds).median,
            "tokens_per_second": summarise(tokens[name]).median,
            "speedup": median_ratio(tokens[name], tokens[PLAIN]),
        }
    return {"tokens_per_second": summarise(tokens[PLAIN]).median}, rows
