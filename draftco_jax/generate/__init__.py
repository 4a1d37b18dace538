"""`draftco generate`: responses of a policy to the prompts of a file, plainly or with a draft. The law is the policy's.

    policy (and draft) folder -> rollout layout -> engine -> responses cut at stop strings -> one JSON object each

All calls are of one shape, so there is one compilation. The key of a response is made of the seed, the number of its
prompt and its own: neither the batch nor what else is in the file has a say in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context
from draftco_jax.decoding.stats import SpeculationStats, speculation_stats
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.errors import UserError
from draftco_jax.generate.prompts import PromptLine
from draftco_jax.models.compute import ComputeConfig, FloatName
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.stop_tokens import find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Published, Publisher

NGRAM = "ngram"
_USUAL_DRAFT_LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How responses are made."""

    sampling: SamplingConfig = SamplingConfig()
    max_new_tokens: int = 256
    samples: int = 1
    """Responses to each prompt."""
    batch: int = 8
    """Responses that are made at a time."""
    draft_length: int | None = None
    """k, tokens proposed in a round; None: 4, or as many as the draft can. Not read without a draft."""
    verification: Literal["token", "block"] = "token"
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse counts that make nothing."""
        for name in ("max_new_tokens", "samples", "batch", "draft_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be >= 1; leave it out for the default")
        if any(not string for string in self.stop_strings):
            raise ValueError(f"stop_strings={list(self.stop_strings)!r} must not be empty texts; leave them out")


class Response(NamedTuple):
    """One response, and which it is."""

    index: int
    """Number of the prompt in the file, from 0."""
    sample: int
    tokens: list[int]
    """What the policy wrote, its stop token and the tokens of a stop string included."""
    logprobs: list[float]
    """Of each token, by the law it was drawn from, in nats."""
    text: str
    """Without what ended it."""
    stop_reason: Literal["stop_token", "stop_string", "length"]
    stop: int | str | None
    """The id or the string."""


@dataclass(frozen=True)
class Model:
    """A policy ready to generate, and its draft."""

    cfg: DecoderConfig
    graphs: tuple[ModelGraph, ModelGraph | None]
    weights: Published
    draft_cfg: DraftConfig | None
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    dtype: FloatName


def load_model(folder: Path, draft: str | None, dtype: FloatName = "float32") -> Model:
    """Read a policy with its tokenizer and stop tokens, and a draft: a folder, or "ngram" for prompt lookup.

    Raises:
        UserError: a folder does not hold what it should, or the draft is not for this policy.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with config.json, safetensors weights and a tokenizer")
    tokenizer = Tokenizer.load(folder)
    compute = ComputeConfig(dtype=dtype, parameter_dtype=dtype)
    cfg, policy = load_policy(folder, compute=compute)
    tokenizer.require_fits(cfg.vocab_size)
    draft_cfg, draft_graph, draft_weights = _load_draft(draft)
    if draft_cfg is not None:
        try:
            draft_cfg.check_target(cfg)
        except ValueError as error:
            raise UserError(f"draft {draft} is not for {folder}: {error}") from error
    publisher = Publisher(graph_of(lambda rngs: cfg.build(rngs, compute=compute)), draft_graph, dtype)
    graphs = publisher.rollout_graphs(policy, draft_weights)
    weights = publisher.publish(policy, draft_weights, PolicyVersion(0))
    return Model(cfg, graphs, weights, draft_cfg, tokenizer, find_stop_tokens(folder, tokenizer).ids, dtype)


def _load_draft(draft: str | None) -> tuple[DraftConfig | None, ModelGraph | None, Params | None]:
    if draft is None:
        return None, None, None
    if draft == NGRAM:
        cfg = NGramConfig()
        return cfg, graph_of(cfg.build), {}
    folder = Path(draft)
    if not folder.is_dir():
        raise UserError(f"draft {draft} is neither a folder nor {NGRAM!r}; give one of them")
    family = draft_family_in(folder)
    if family is None or family.load is None:
        having = ", ".join(other.name for other in FAMILIES.values() if other.load is not None)
        raise UserError(f"draft {draft} holds no draft that is known here; known: {having}")
    return family.load(folder, None)


class Generator:
    """The engine for the prompts of one file."""

    def __init__(self, model: Model, cfg: GenerateConfig, prompts: Sequence[PromptLine]) -> None:
        self.model, self.cfg, self.prompts = model, cfg, prompts
        self.draft_length: int = 0 if model.draft_cfg is None else _draft_length(model.draft_cfg, cfg.draft_length)
        longest = max(prompts, key=lambda prompt: len(prompt.ids))
        room = model.cfg.max_position_embeddings - self.draft_length - len(longest.ids)
        if room < 1:
            raise UserError(
                f"{longest.place} has {len(longest.ids)} tokens, which must be <= "
                f"{model.cfg.max_position_embeddings - self.draft_length - 1} to leave room for a response; shorten it"
            )
        self.max_new_tokens = min(cfg.max_new_tokens, room)
        """As asked for, or what the context has room for behind the longest prompt."""
        self.stats: list[SpeculationStats] = []
        shape = EngineShape(
            prompt_capacity=len(longest.ids),
            max_new_tokens=self.max_new_tokens,
            stop_ids=model.stop_ids,
            pad_id=model.tokenizer.pad_id,
            verification=cfg.verification,
        )
        self.engine = Engine(*model.graphs, shape=shape, sampling=cfg.sampling, draft_dtype=model.dtype)

    def run(self, done: Callable[[int], None] = lambda count: None) -> Iterator[Response]:
        """Responses in the order of the prompts; `done` is told after each call how many are finished."""
        wanted = [(p, s) for p in range(len(self.prompts)) for s in range(self.cfg.samples)]
        for start in range(0, len(wanted), self.cfg.batch):
            rows = wanted[start : start + self.cfg.batch]
            padded = rows + rows[-1:] * (self.cfg.batch - len(rows))
            weights = self.model.weights
            rollouts = self.engine.generate(weights.policy, weights.draft, self._request(padded), self.draft_length)
            rollouts = _first(jax.device_get(rollouts), len(rows))
            self.stats.append(speculation_stats(rollouts))
            for row, (prompt, sample) in enumerate(rows):
                yield self._response(rollouts, row, prompt, sample)
            done(start + len(rows))

    def _request(self, rows: Sequence[tuple[int, int]]) -> Request:
        capacity = self.engine.shape.prompt_capacity
        tokens = np.full((len(rows), capacity), self.model.tokenizer.pad_id, np.int32)
        lengths = np.zeros(len(rows), np.int32)
        for row, (prompt, _) in enumerate(rows):
            ids = self.prompts[prompt].ids
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        return Request(jnp.asarray(tokens), jnp.asarray(lengths), self._keys(rows), no_context(len(rows)))

    def _keys(self, rows: Sequence[tuple[int, int]]) -> jax.Array:
        one = lambda pair: jax.random.fold_in(jax.random.fold_in(key, pair[0]), pair[1])  # noqa: E731
        key = jax.random.key(self.cfg.seed)
        return jax.vmap(one)(jnp.asarray(rows, jnp.int32))

    def _response(self, rollouts: Rollouts, row: int, prompt: int, sample: int) -> Response:
        written = slice(int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row]))
        ids = [int(token) for token in rollouts.tokens[row, written]]
        end = find_response_end(self.model.tokenizer, ids, self.model.stop_ids, self.cfg.stop_strings)
        reason = "length"
        if end.finished:
            reason = "stop_token" if end.stop_string is None else "stop_string"
        return Response(
            index=prompt,
            sample=sample,
            tokens=ids[: end.length],
            logprobs=[float(value) for value in rollouts.logprobs[row, written][: end.length]],
            text=end.text,
            stop_reason=reason,
            stop=end.stop_id if end.stop_string is None else end.stop_string,
        )


def _first(rollouts: Rollouts, count: int) -> Rollouts:
    return jax.tree.map(lambda leaf: leaf[:count], rollouts)


def _draft_length(cfg: DraftConfig, wanted: int | None) -> int:
    most = cfg.max_draft_length
    if wanted is None:
        return _USUAL_DRAFT_LENGTH if most is None else min(_USUAL_DRAFT_LENGTH, most)
    if most is not None and wanted > most:
        raise UserError(f"draft_length={wanted} must be <= {most}, the most this draft can propose; lower it")
    return wanted
