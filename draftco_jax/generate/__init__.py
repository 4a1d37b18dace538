"""`draftco generate`: responses of a policy to the prompts of a file, plainly or with a draft. The law is the policy's.

    policy (and draft) folder -> rollout layout -> engine, through slots -> responses -> one JSON object each

A response that ends gives its slot to the next, and each has the settings of its own line (`generate.line_options`).
All calls are of one shape, so there is one compilation. The key of a response is made of the seed, the number of its
prompt and its own: neither the slots nor what else is in the file has a say in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context
from draftco_jax.decoding.options import RequestOptions, prepare_options
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.stats import SpeculationStats, speculation_stats
from draftco_jax.decoding.stopping import allowed_tokens, require_room, stop_id_rows
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.errors import UserError
from draftco_jax.generate.prompts import PromptLine
from draftco_jax.generate.responses import Response, read_response
from draftco_jax.models.compute import ComputeConfig, FloatName
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.text.stop_tokens import find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

NGRAM = "ngram"
_USUAL_DRAFT_LENGTH = 4
_ROWS_OF_A_CALL = 1024
_TURNS_OF_A_STEP = 32


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How responses are made."""

    sampling: SamplingConfig = SamplingConfig()
    max_new_tokens: int = 256
    samples: int = 1
    """Responses to each prompt."""
    slots: int = 8
    """Responses that are made at a time; the next begins where one ends."""
    draft_length: int | None = None
    """k, tokens proposed in a round; None: 4, or as many as the draft can. Not read without a draft."""
    verification: Literal["token", "block"] = "token"
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop token comes before so many tokens, and a stop string begins behind them."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse counts that make nothing."""
        for name in ("max_new_tokens", "samples", "slots", "draft_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be >= 1; leave it out for the default")
        if any(not string for string in self.stop_strings):
            raise ValueError(f"stop_strings={list(self.stop_strings)!r} must not be empty texts; leave them out")


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
        wanted = [cfg.max_new_tokens if p.options.max_tokens is None else p.options.max_tokens for p in prompts]
        most = self._rooms(wanted)
        self.options = [self._options_of(prompt, count) for prompt, count in zip(prompts, most, strict=True)]
        """Of each prompt, with `max_tokens` as asked for or as the context has room for."""
        self.shortened: int = sum(count < asked for count, asked in zip(most, wanted, strict=True))
        """Prompts whose context has no room for what was asked."""
        self.stats: list[SpeculationStats] = []
        self._ready = prepare_options(self.options, model.cfg.vocab_size, model.tokenizer)
        shape = EngineShape(
            prompt_capacity=max(len(prompt.ids) for prompt in prompts),
            max_new_tokens=max(most),
            stop_ids=model.stop_ids,
            pad_id=model.tokenizer.pad_id,
            verification=cfg.verification,
        )
        self._slots = SlotShape(slots=cfg.slots, draft_lengths=(self.draft_length,), filters=self._ready.filters)
        self.engine = Engine(*model.graphs, shape=shape, sampling=cfg.sampling, draft_dtype=model.dtype)

    def run(self, done: Callable[[int], None] = lambda count: None) -> Iterator[Response]:
        """Responses in the order of the prompts, each when those before it are there; `done` is told how many ended."""
        wanted = [(p, s) for p in range(len(self.prompts)) for s in range(self.cfg.samples)]
        rows = min(len(wanted), _ROWS_OF_A_CALL)
        for start in range(0, len(wanted), rows):
            yield from self._serve(wanted[start : start + rows], rows, lambda ended, start=start: done(start + ended))

    def _serve(self, which: Sequence[tuple[int, int]], rows: int, done: Callable[[int], None]) -> Iterator[Response]:
        """The responses of one call, whose table has so many rows."""
        weights, known = self.model.weights, len(which)
        request = self._request([*which, *[which[-1]] * (rows - known)])
        steps = self.engine.stream(
            weights.policy, weights.draft, request, self._slots, known=known,
            turns=_TURNS_OF_A_STEP, stop_table=self._ready.stop_table,
        )  # fmt: skip
        written, found = 0, None
        for found in steps:
            done(int(found.over[:known].sum()))
            while written < known and found.over[written]:
                prompt = which[written][0]
                options, tokenizer = self.options[prompt], self.model.tokenizer
                yield read_response(found.rollouts, written, which[written], options, tokenizer)
                written += 1
        assert found is not None
        self.stats.append(speculation_stats(found.rollouts))

    def _rooms(self, wanted: Sequence[int]) -> list[int]:
        """Tokens that each response may hold: as asked for, or what the context has room for behind its prompt."""
        positions = self.model.cfg.max_position_embeddings
        for prompt in self.prompts:
            try:
                require_room([len(prompt.ids)], positions, self.draft_length)
            except UserError as error:
                raise UserError(f"{prompt.place}: {error}") from error
        capped = [min(count, positions) for count in wanted]
        lengths, asked = (np.asarray(counts, np.int32) for counts in ([len(p.ids) for p in self.prompts], capped))
        room = np.asarray(allowed_tokens(jnp.asarray(lengths), jnp.asarray(asked), positions, self.draft_length))
        # Less than one token is left as it is, to be refused as it was given.
        return [int(count) if count < 1 else int(most) for count, most in zip(wanted, room, strict=True)]

    def _options_of(self, prompt: PromptLine, max_tokens: int) -> RequestOptions:
        """What the line asks for, or else the file's settings."""
        line, cfg = prompt.options, self.cfg
        try:
            options = RequestOptions(
                sampling=replace(cfg.sampling, **line.sampling),
                stop_ids=self.model.stop_ids + (line.stop_token_ids or ()),
                stop_strings=cfg.stop_strings if line.stop is None else line.stop,
                min_tokens=cfg.min_tokens if line.min_tokens is None else line.min_tokens,
                max_tokens=max_tokens,
            )
            if line.stop_token_ids:
                stop_id_rows([options.stop_ids], self.model.cfg.vocab_size)
        except ValueError as error:
            raise UserError(f"{prompt.place}: {error}") from error
        return options

    def _request(self, rows: Sequence[tuple[int, int]]) -> Request:
        capacity = self.engine.shape.prompt_capacity
        tokens = np.full((len(rows), capacity), self.model.tokenizer.pad_id, np.int32)
        lengths = np.zeros(len(rows), np.int32)
        for row, (prompt, _) in enumerate(rows):
            ids = self.prompts[prompt].ids
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        prompts = jnp.asarray([prompt for prompt, _ in rows], jnp.int32)
        return Request(
            prompts=jnp.asarray(tokens),
            prompt_lengths=jnp.asarray(lengths),
            keys=self._keys(rows),
            context=no_context(len(rows)),
            max_tokens=self._ready.max_tokens[prompts],
            options=self._ready.rows.rows(prompts),
        )

    def _keys(self, rows: Sequence[tuple[int, int]]) -> jax.Array:
        """By seed of the file, number of the prompt and number of the sample; by seed of the line and the latter."""
        of_file, seeds = jax.random.key(self.cfg.seed), [prompt.options.seed for prompt in self.prompts]
        root = lambda p: jax.random.fold_in(of_file, p) if seeds[p] is None else jax.random.key(seeds[p])  # noqa: E731
        roots = {p: root(p) for p, _ in rows}
        samples = jnp.asarray([sample for _, sample in rows], jnp.int32)
        return jax.vmap(jax.random.fold_in)(jnp.stack([roots[p] for p, _ in rows]), samples)


def _draft_length(cfg: DraftConfig, wanted: int | None) -> int:
    most = cfg.max_draft_length
    if wanted is None:
        return _USUAL_DRAFT_LENGTH if most is None else min(_USUAL_DRAFT_LENGTH, most)
    if most is not None and wanted > most:
        raise UserError(f"draft_length={wanted} must be <= {most}, the most this draft can propose; lower it")
    return wanted
