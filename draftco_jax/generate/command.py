"""Reads prompts, writes a line for each response as soon as it and those before it are there, and says how it went."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from draftco_jax.config import SHIPPED, resolve_checkpoint
from draftco_jax.decoding.stats import SpeculationStats
from draftco_jax.errors import UserError
from draftco_jax.generate import GenerateConfig, Generator, load_model
from draftco_jax.generate.prompts import Format, PromptLine, read_prompts
from draftco_jax.generate.responses import Response
from draftco_jax.metrics.progress import Progress
from draftco_jax.models.compute import FloatName

STANDARD = "-"


def generate_file(
    cfg: GenerateConfig,
    model: str,
    draft: str | None,
    *,
    prompts: str,
    form: Format | None = None,
    out: str = STANDARD,
    dtype: FloatName = "float32",
) -> str:
    """Responses to all prompts of a file; the closing line.

    Args:
        cfg: how responses are made.
        model: folder of the policy, or `shipped:NAME`.
        draft: folder of a draft, `shipped:NAME`, "ngram" or "self_int8"; None: plain decoding.
        prompts: file of prompts (`generate.prompts`); "-" is standard input.
        form: of that file; None: jsonl where its name ends so, else text.
        out: file of responses, written anew; "-" is standard output.
        dtype: of weights, activations and caches.
    """
    if out != STANDARD and not Path(out).parent.is_dir():
        raise UserError(f"--out {out} cannot be written: there is no folder {Path(out).parent}; make it first")
    folder = resolve_checkpoint(model)
    if draft is not None and draft.startswith(SHIPPED):
        draft = str(resolve_checkpoint(draft))
    loaded = load_model(folder, draft, dtype)
    lines = read_prompts(*_lines(prompts, form), folder, loaded.tokenizer)
    generator = Generator(loaded, cfg, lines)
    console = Console(stderr=True)
    tokens, started = 0, time.perf_counter()
    with _opened(out) as file, Progress(len(lines) * cfg.samples, title="generate", console=console) as progress:
        if generator.shortened:
            progress.note(
                f"{generator.shortened} prompts leave the policy's context no room for as many tokens as asked"
            )
        for response in generator.run(lambda done: progress.update(done, {})):
            tokens += len(response.tokens)
            file.write(_record(lines[response.index], response))
            file.flush()
    return _closing_line(len(lines), cfg.samples, tokens, time.perf_counter() - started, generator.stats, out)


def _record(line: PromptLine, response: Response) -> bytes:
    record: dict[str, Any] = {"given": line.given, "prompt_tokens": len(line.ids)} | response._asdict()
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError as error:  # what the line holds has been read with this in mind
        raise UserError(
            f"{line.place}: log-probs of its response must be finite, but some are not; look at the policy's weights"
        ) from error


def _lines(prompts: str, form: Format | None) -> tuple[list[str], str, Format]:
    """Lines end at line feeds alone: a text may hold the other characters at which Python would part it."""
    try:
        read = sys.stdin.buffer.read() if prompts == STANDARD else Path(prompts).read_bytes()
        lines = read.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {prompts} cannot be read ({error}); give a text file in UTF-8, or - for input"
        ) from error
    name = "standard input" if prompts == STANDARD else prompts
    return lines, name, form or ("jsonl" if prompts.endswith(".jsonl") else "text")


@contextmanager
def _opened(out: str) -> Iterator[BinaryIO]:
    """For bytes, so that what is written is UTF-8 wherever it goes."""
    try:
        opened = nullcontext(sys.stdout.buffer) if out == STANDARD else open(out, "wb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from error
    with opened as file:
        yield file


def _closing_line(
    prompts: int, samples: int, tokens: int, seconds: float, stats: list[SpeculationStats], out: str
) -> str:
    rounds, committed = sum(s.rounds for s in stats), sum(s.committed for s in stats)
    drafted = f", accepted length {committed / rounds:.2f}" if rounds else ""
    where = "" if out == STANDARD else f" are in {out}"
    return (
        f"{prompts * samples} responses to {prompts} prompts{where}: {tokens} tokens in {seconds:.1f} s, compilation "
        f"included{drafted}"
    )
