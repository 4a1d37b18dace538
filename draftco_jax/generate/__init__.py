"""`draftco generate`: responses of a policy to the prompts of a file, plainly or with a draft. The law is the policy's.

    policy (and draft) folder -> rollout layout -> engine, through slots -> responses -> one JSON object each

A response that ends gives its slot to the next, and each has the settings of its own line (`generate.line_options`).
All calls are of one shape, so there is one compilation. The key of a response is made of the seed, the number of its
prompt and its own: neither the slots nor what else is in the file has a say in it. Files of many responses go through
the program in several calls (`generate.calls`).
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
from draftco_jax.decoding.options import Prepared, RequestOptions, prepare_options
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.stats import SpeculationStats, speculation_stats
from draftco_jax.decoding.stopping import allowed_tokens, require_room, stop_id_rows
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.recognise import draft_family_in
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.errors import UserError
from draftco_jax.generate.calls import ROWS_OF_A_CALL, parted, sizes_of
from draftco_jax.generate.line_options import LineOptions, require_seed
from draftco_jax.generate.prompts import PromptLine
from draftco_jax.generate.responses import Response, read_response
from draftco_jax.models.compute import ComputeConfig, FloatName
from draftco_jax.models.functional import ModelGraph, Params, graph_of
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.text.detokenizer import Detokenizer
from draftco_jax.text.stop_automaton import require_stop_strings
from draftco_jax.text.stop_tokens import find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

WITHOUT_FILES: dict[str, type[DraftConfig]] = {"ngram": NGramConfig, "self_int8": SelfInt8Config}
"""Drafts that are named instead of read from a folder."""
_USUAL_DRAFT_LENGTH = 4
_TURNS_OF_A_STEP = 32
_LINE_SEEDS = 2**32 - 1
"""In the place of a prompt's number, where a line has a seed of its own: no prompt has this number, so a line's seed
that is the file's too gives keys that are nobody else's."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How responses are made."""

    sampling: SamplingConfig = SamplingConfig()
    max_new_tokens: int = 256
    samples: int = 1
    """Responses to each prompt."""
    slots: int = 8
    """Responses that are made at a time, or all where there are fewer; the next begins where one ends."""
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
        require_stop_strings(self.stop_strings)
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must be >= 0; leave it out for the default")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be <= max_new_tokens={self.max_new_tokens}; lower it or raise "
                "the other"
            )
        require_seed(self.seed)


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


def load_model(
    folder: Path,
    draft: str | None,
    dtype: FloatName = "float32",
    step_matmul: Literal["xla", "skinny"] = "xla",
) -> Model:
    """Read a policy with its tokenizer and stop tokens, and a draft: a folder, or a name of `WITHOUT_FILES`.

    `step_matmul` is that of the policy (`ComputeConfig`).

    Raises:
        UserError: a folder does not hold what it should, the text of its tokenizer's ids cannot be read token by token,
            or the draft is not for this policy.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with config.json, safetensors weights and a tokenizer")
    tokenizer = Tokenizer.load(folder)
    try:
        Detokenizer(tokenizer)  # refuses what responses could not be read by
    except UserError as error:
        raise UserError(f"tokenizer of {folder}: {error}") from error
    compute = ComputeConfig(dtype=dtype, parameter_dtype=dtype, step_matmul=step_matmul)
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
    if draft in WITHOUT_FILES:
        cfg = WITHOUT_FILES[draft]()
        return cfg, graph_of(cfg.build), {}
    folder = Path(draft)
    if not folder.is_dir():
        names = " nor ".join(repr(name) for name in WITHOUT_FILES)
        raise UserError(f"draft {draft} is neither a folder nor {names}; give one of them")
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
        self._calls = parted(len(prompts), cfg.samples, ROWS_OF_A_CALL)
        places = [prompt.place for prompt in prompts]
        self._sizes = sizes_of(self._calls, self.options, places, model.tokenizer, model.cfg.vocab_size)
        shape = EngineShape(
            prompt_capacity=max(len(prompt.ids) for prompt in prompts),
            max_new_tokens=max(most),
            stop_ids=model.stop_ids,
            pad_id=model.tokenizer.pad_id,
            verification=cfg.verification,
        )
        self._slots = SlotShape(
            slots=min(cfg.slots, len(self._calls[0])), draft_lengths=(self.draft_length,), filters=self._sizes.filters
        )
        self.engine = Engine(*model.graphs, shape=shape, sampling=cfg.sampling, draft_dtype=model.dtype)

    def run(self, done: Callable[[int], None] = lambda count: None) -> Iterator[Response]:
        """Responses in the order of the prompts, each when those before it are there; `done` is told how many ended."""
        start = 0
        for call in self._calls:
            yield from self._serve(call, lambda ended, start=start: done(start + ended))
            start += len(call)

    def _serve(self, which: Sequence[tuple[int, int]], done: Callable[[int], None]) -> Iterator[Response]:
        """The responses of one call, whose table has as many rows as that of the first."""
        weights, known = self.model.weights, len(which)
        rows = [*which, *[which[-1]] * (len(self._calls[0]) - known)]
        ready = self._prepared(rows)
        steps = self.engine.stream(
            weights.policy, weights.draft, self._request(rows, ready), self._slots, known=known,
            turns=_TURNS_OF_A_STEP, stop_table=ready.stop_table,
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
        capped = [max(0, min(count, positions)) for count in wanted]
        lengths, asked = (np.asarray(counts, np.int32) for counts in ([len(p.ids) for p in self.prompts], capped))
        room = np.asarray(allowed_tokens(jnp.asarray(lengths), jnp.asarray(asked), positions, self.draft_length))
        return [int(most) for most in room]

    def _options_of(self, prompt: PromptLine, max_tokens: int) -> RequestOptions:
        """What the line asks for, or else the file's settings."""
        line, cfg = prompt.options, self.cfg
        try:
            options = RequestOptions(
                sampling=replace(cfg.sampling, **line.sampling),
                stop_ids=self.model.stop_ids + prompt.turn_ends + (line.stop_token_ids or ()),
                stop_strings=cfg.stop_strings if line.stop is None else line.stop,
                min_tokens=_min_tokens(line, cfg, max_tokens),
                max_tokens=max_tokens,
            )
            if line.stop_token_ids:
                stop_id_rows([options.stop_ids], self.model.cfg.vocab_size)
        except ValueError as error:
            raise UserError(f"{prompt.place}: {error}") from error
        return options

    def _prepared(self, rows: Sequence[tuple[int, int]]) -> Prepared:
        sizes, model = self._sizes, self.model
        return prepare_options(
            [self.options[prompt] for prompt, _ in rows], model.cfg.vocab_size, model.tokenizer,
            stop_ids=sizes.stop_ids, stop_states=sizes.stop_states,
        )  # fmt: skip

    def _request(self, rows: Sequence[tuple[int, int]], ready: Prepared) -> Request:
        capacity = self.engine.shape.prompt_capacity
        tokens = np.full((len(rows), capacity), self.model.tokenizer.pad_id, np.int32)
        lengths = np.zeros(len(rows), np.int32)
        for row, (prompt, _) in enumerate(rows):
            ids = self.prompts[prompt].ids
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        return Request(
            prompts=jnp.asarray(tokens),
            prompt_lengths=jnp.asarray(lengths),
            keys=self._keys(rows),
            context=no_context(len(rows)),
            max_tokens=ready.max_tokens,
            options=ready.rows,
        )

    def _keys(self, rows: Sequence[tuple[int, int]]) -> jax.Array:
        """By seed of the file, number of the prompt and number of the sample; by seed of the line and the latter.

        fold_in(fold_in(key(seed of the file), prompt), sample)
        fold_in(fold_in(key(seed of the line), 2^32 - 1), sample)
        """
        of_file, seeds = jax.random.key(self.cfg.seed), {p: self.prompts[p].options.seed for p, _ in rows}
        roots = {
            p: jax.random.fold_in(of_file, p) if seed is None else jax.random.fold_in(jax.random.key(seed), _LINE_SEEDS)
            for p, seed in seeds.items()
        }
        samples = jnp.asarray([sample for _, sample in rows], jnp.int32)
        return jax.vmap(jax.random.fold_in)(jnp.stack([roots[p] for p, _ in rows]), samples)


def _min_tokens(line: LineOptions, cfg: GenerateConfig, most: int) -> int:
    """As the line or else the file asks, and `most` where that is less: a full response is over whatever is asked."""
    if line.min_tokens is None:
        return min(cfg.min_tokens, most)
    name, longest = "max_tokens", line.max_tokens
    if longest is None:
        name, longest = "max_new_tokens", cfg.max_new_tokens
    if line.min_tokens > longest:
        raise UserError(f"min_tokens={line.min_tokens} must be <= {name}={longest}; lower it or raise the other")
    return min(line.min_tokens, most)


def _draft_length(cfg: DraftConfig, wanted: int | None) -> int:
    most = cfg.max_draft_length
    if wanted is None:
        return _USUAL_DRAFT_LENGTH if most is None else min(_USUAL_DRAFT_LENGTH, most)
    if most is not None and wanted > most:
        raise UserError(f"draft_length={wanted} must be <= {most}, the most this draft can propose; lower it")
    return wanted
