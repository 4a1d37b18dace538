"""The choice of draft lengths over the steps of a run: costs measured once, what was learnt passed from step to step.

The cost table is a file of the run. A run that is resumed reads it and goes on from the state in its checkpoint, so it
makes the choices that the run would have made without a stop. A clock would not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key

from draftco_jax.decoding.control import Control, gain, start
from draftco_jax.decoding.cost_table import CostTable, Setting
from draftco_jax.decoding.serving import Served
from draftco_jax.decoding.speculation_control import Rule

COSTS_FILE = "cost_table.json"


class SpeculationControl:
    """A rule, its costs and what it knows."""

    def __init__(self, rule: Rule, key: Key[jax.Array, ""], costs: CostTable | None = None) -> None:
        """Before any round; `key` is that of choices by chance."""
        self.rule, self.costs = rule, costs
        self._key, self._known, self._rounds = key, rule.init(), jnp.int32(0)

    @property
    def control(self) -> Control:
        """What the next call starts from; the costs must be there."""
        assert self.costs is not None
        fresh = start(self.rule, self._key, jnp.asarray(self.costs.array()[0]))
        return fresh._replace(rule=self._known, rounds=self._rounds)

    def after(self, served: Served) -> dict[str, float]:
        """Keep what a call has taught; its rounds as metrics."""
        self._known, self._rounds, ledger = served.control.rule, served.control.rounds, served.ledger
        rounds, lengths = np.asarray(ledger.rounds, np.float64), np.asarray(self.rule.lengths, np.float64)
        total = max(rounds.sum(), 1.0)
        metrics = {"rollout/draft_length_mean": float(rounds @ lengths / total)}
        if 0 in self.rule.lengths:
            metrics["rollout/plain_rounds_fraction"] = float(rounds[self.rule.lengths.index(0)] / total)
        found = gain(self.rule, served.control, ledger)
        if found is not None:
            metrics["rollout/speculation_gain"] = float(found)
        return metrics

    def get_state(self) -> dict[str, Any]:
        """What is known, as plain numbers that are read back to the last bit."""
        leaves = [_plain(np.asarray(leaf)) for leaf in jax.tree.leaves(self._known)]
        return {"rule": leaves, "rounds": int(self._rounds)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what was known then."""
        leaves, tree = jax.tree.flatten(self._known)
        known = [jnp.asarray(np.asarray(value, x.dtype)) for x, value in zip(leaves, state["rule"], strict=True)]
        self._known, self._rounds = tree.unflatten(known), jnp.int32(state["rounds"])


def _plain(array: np.ndarray) -> Any:
    """Nested lists, None for NaN, which JSON does not have; `np.asarray` makes it NaN again."""
    filled = array.astype(object)
    filled[array != array] = None
    return filled.tolist()


def costs_of_run(run_dir: Path, setting: Setting, measure: Callable[[Setting], CostTable]) -> CostTable:
    """The table of the run directory, or one that is measured now and written there.

    Raises:
        UserError: the one that is there was measured for something else.
    """
    path = run_dir / COSTS_FILE
    if path.is_file():
        return CostTable.load(path, setting)
    table = measure(setting)
    table.save(path)
    return table
