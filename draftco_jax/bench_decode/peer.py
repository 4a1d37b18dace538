"""The peer: transformers' `generate` with the same weights, at its defaults, on the same prompts, greedy.

Assisted generation takes the shipped policy as assistant, which writes what a grown one writes; where the shipped
policy itself is measured, prompt lookup.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("torch", "transformers")
_LOOKUP_TOKENS = 7


class Texts(NamedTuple):
    """What one call wrote."""

    responses: list[list[int]]  # token ids, the stop token included, without padding


def missing() -> str | None:
    """Why there is no peer; None where there is one."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install 'draftco[interop]'" if absent else None


class Peer:
    """A policy in transformers.

    Args:
        folder: in Hugging Face layout.
        assistant: the peer whose model assists; None: prompt lookup.
    """

    def __init__(self, folder: Path, assistant: Peer | None = None) -> None:
        self._torch: Any = importlib.import_module("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optional kernels it does not find
            transformers: Any = importlib.import_module("transformers")
            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32)
        self.model: Any = loaded.eval()
        self._help: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        if assistant is not None:
            self._help = {"assistant_model": assistant.model}

    def generate(
        self, prompts: list[list[int]], *, new_tokens: int, stops: Sequence[int], pad: int, assisted: bool = False
    ) -> Texts:
        """Greedy responses that end with the first of `stops`; prompts of several lengths are padded on the left."""
        torch, width = self._torch, max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=list(stops) or [-1],  # none: not those of the folder either
                pad_token_id=pad,
                **(self._help if assisted else {}),
            )
        return Texts([_until(row[width:].tolist(), stops) for row in rows])


def _until(row: list[int], stops: Sequence[int]) -> list[int]:
    ends = [place + 1 for place, token in enumerate(row) if token in stops]
    return row[: ends[0]] if ends else row
