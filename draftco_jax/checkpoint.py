"""Save and restore all that a run needs to continue bit for bit, with Orbax.

A checkpoint is written whole or not at all: Orbax renames the finished folder, and only folders with its commit marker
are candidates for a resume. Contents: the train state (policy, draft, both optimizers, step), the root random key, the
data position, and a record of every array's type, shape and checksum, which Orbax does not verify by itself.
"""

from __future__ import annotations

import json
import shutil
import textwrap
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from draftco_jax.errors import UserError
from draftco_jax.training.update import TrainState

_STATE, _RECORD = "state", "record"


class Restored(NamedTuple):
    """What a checkpoint held."""

    state: TrainState
    key: jax.Array
    data: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run directory; a context manager."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = (run_dir / "checkpoints").resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            # Saved in the calling thread: a save that fails stops the run at the step that made it.
            enable_async_checkpointing=False,
            # A numbered folder without the commit marker, such as a copy that was cut short, is not a candidate.
            step_name_format=ocp.path.step.standard_name_format(
                temporary_path_cls=ocp.path.atomicity.CommitFileTemporaryPath
            ),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=(_STATE, _RECORD))

    @property
    def latest_step(self) -> int | None:
        """The newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, key: jax.Array, data: dict[str, Any]) -> None:
        """Write a checkpoint under the state's own step."""
        step, tree = int(state.step), _tree(state, key)
        unfinished = self._folder / str(step)
        if unfinished.is_dir() and step not in self._manager.all_steps():
            shutil.rmtree(unfinished)  # it would be in the way of the rename
        record = {"data": data, "key_implementation": str(jax.random.key_impl(key)), "arrays": _describe(tree)}
        items = {_STATE: ocp.args.StandardSave(tree), _RECORD: ocp.args.JsonSave(record)}
        saved = self._manager.save(step, args=ocp.args.Composite(**items))
        assert saved, f"checkpoint step {step} was left out; the newest is {self.latest_step}"

    def restore(self, step: int, like: TrainState, key: jax.Array) -> Restored:
        """Read a checkpoint into the structure of `like`; names, shapes, dtypes and key type must be those saved.

        Raises:
            UserError: the checkpoint is damaged, or belongs to another model or optimizer.
        """
        wanted = _tree(like, key)
        record = self._restore_item(step, _RECORD, ocp.args.JsonRestore())
        if not isinstance(record, dict) or not {"data", "key_implementation", "arrays"} <= record.keys():
            raise self._damaged(step, "its record is incomplete")
        saved_as, implementation = record["key_implementation"], str(jax.random.key_impl(key))
        if saved_as != implementation:
            raise UserError(
                f"checkpoint step {step} was made with {saved_as} random keys, this process makes {implementation}; "
                "resume with the jax_default_prng_impl it was made with"
            )
        _check_arrays(step, record["arrays"], _describe(wanted))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        tree = self._restore_item(step, _STATE, ocp.args.StandardRestore(abstract))
        for name, found in _describe(tree).items():
            if found != record["arrays"][name]:
                raise self._damaged(step, f"the checksum of {name} is not the one it was saved with")
        return Restored(
            TrainState(**tree["train"]), jax.random.wrap_key_data(tree["key"], impl=implementation), record["data"]
        )

    def _restore_item(self, step: int, name: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{name: args}))[name]
        except Exception as error:  # Orbax and its storage raise many types; all mean that the files cannot be used
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._damaged(step, textwrap.shorten(reason, 120)) from error

    def _damaged(self, step: int, reason: str) -> UserError:
        before = [other for other in self._manager.all_steps() if other < step]
        way_out = f"resume from step {max(before)}" if before else "start over"
        return UserError(
            f"checkpoint {self._folder / str(step)} cannot be restored ({reason}): it is damaged; "
            f"delete that folder to {way_out}"
        )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()


def fingerprint(tree: Any) -> int:
    """One number that changes with any bit of any array of a tree."""
    return zlib.crc32(json.dumps(_describe(tree), sort_keys=True).encode())


def _tree(state: TrainState, key: jax.Array) -> dict[str, Any]:
    return {"train": state._asdict(), "key": jax.random.key_data(key)}


def _describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Type, shape and checksum of every array, by the dotted name of its place."""
    described = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        described[_path_name(path)] = {
            "dtype": str(array.dtype),
            "shape": list(np.shape(leaf)),
            "crc32": zlib.crc32(array.data),
        }
    return described


def _check_arrays(step: int, saved: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    """Orbax converts types silently on restore; a counter or a moment must not change its type."""
    way_out = "it belongs to another config: resume with the one it was made with, or choose another run directory"
    for name in [*wanted, *saved]:
        if name not in saved or name not in wanted:
            holds, needs = ("holds", "not needed") if name in saved else ("does not hold", "needed")
            raise UserError(f"checkpoint step {step} {holds} the array {name}, which is {needs} here; {way_out}")
        found, needed = (f"{a[name]['dtype']}{a[name]['shape']}" for a in (saved, wanted))
        if found != needed:
            raise UserError(f"checkpoint step {step}: {name} is {found}, this run needs {needed}; {way_out}")


def _path_name(path: tuple[Any, ...]) -> str:
    names = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
    return ".".join(str(name) for name in names)
