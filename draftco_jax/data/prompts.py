"""Batches of prompts in an order that a resume continues.

The pipeline is a chain of index maps (grain ``MapDataset``): step n holds the same prompts however often the run was
stopped before it, and the whole position is one number.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import grain

from draftco_jax.errors import UserError
from draftco_jax.types import Prompt

# Further than any run goes, yet small enough for grain to multiply.
_ENDLESS = 2**62


@runtime_checkable
class ProblemSource(Protocol):
    """The part of a task that the pipeline needs."""

    @property
    def num_problems(self) -> int | None:
        """Length of a finite source; None for an endless one."""
        ...

    def problem(self, index: int) -> Prompt:
        """The problem at an index."""
        ...


@runtime_checkable
class FixedSource(Protocol):
    """A source that can tell whether its problems are still those of an earlier run."""

    @property
    def problems_digest(self) -> str:
        """`digest_of` the questions and answers of all problems, in order."""
        ...


def digest_of(problems: Iterable[tuple[str, str]]) -> str:
    """128-bit digest of questions and answers, in hexadecimal; differs where any text or the order does."""
    digest = hashlib.blake2b(digest_size=16)
    for text in itertools.chain.from_iterable(problems):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class PromptBatches(Iterator[tuple[Prompt, ...]]):
    """Endless batches of P prompts, or one process's share of them.

    An endless source is walked in the order of its indices. A finite one is shuffled anew in each epoch; a batch may
    span two epochs, so that the remainder of an epoch is neither dropped nor padded.

    Of `shards` processes number `shard` gets rows ``shard * P / shards`` on of every batch. All of them together walk
    the order of one process, and a position saved by any is a position of all, of other numbers of processes too.
    """

    def __init__(self, source: ProblemSource, batch_size: int, seed: int, *, shard: int = 0, shards: int = 1) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size} must be 1 or more; set the number of prompts per step")
        if not 0 <= shard < shards or batch_size % shards:
            raise UserError(
                f"batch_size={batch_size} must be a multiple of shards={shards}, and shard={shard} be in "
                f"0..{shards - 1}; choose another batch size or number of processes"
            )
        self._identity: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "num_problems": source.num_problems,
        }
        if isinstance(source, FixedSource):
            self._identity["problems_digest"] = source.problems_digest
        order = _index_order(source.num_problems, seed)
        share = slice(shard * batch_size // shards, (shard + 1) * batch_size // shards)
        batches = order.batch(batch_size, batch_fn=tuple).map(
            lambda indices: tuple(source.problem(index) for index in indices[share])
        )
        # Read in the calling thread, with no worker process: a problem takes 0.1 ms to make, there is no disk to wait
        # for, and the state is always that of the last batch handed out.
        dataset = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        self._iterator: grain.DatasetIterator[Any] = iter(dataset)

    def __next__(self) -> tuple[Prompt, ...]:
        """The next batch."""
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as a plain JSON object."""
        return {**self._identity, "iterator": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batch that followed when the state was taken.

        A state without a digest of the problems, as earlier versions saved it, is believed as it is.
        """
        for name, value in self._identity.items():
            if name == "problems_digest" and name not in state:
                continue
            if state[name] != value:
                raise UserError(
                    f"{name}={value} must be {state[name]} as in the saved run, "
                    "or the prompts would not continue where they stopped; start a new run directory"
                )
        self._iterator.set_state(state["iterator"])


def _index_order(num_problems: int | None, seed: int) -> grain.MapDataset[int]:
    if num_problems is None:
        return grain.MapDataset.range(_ENDLESS)
    # grain shuffles epoch e with its seed + e; hashing keeps run seeds 0 and 1 from being one epoch apart.
    digest = hashlib.blake2b(f"prompt order {seed}".encode(), digest_size=4).digest()
    return grain.MapDataset.range(num_problems).shuffle(seed=int.from_bytes(digest, "little")).repeat()
