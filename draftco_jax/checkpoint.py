"""Save and restore all that a run needs to continue bit for bit, with Orbax.

A checkpoint is written whole or not at all: Orbax renames the finished folder, and only folders with its commit marker
are candidates for a resume. Contents: the train state (policy, draft, both optimizers, step), the root random key, the
data position, and the checksum of every file, since Orbax itself reads a flipped bit without a word.
"""

from __future__ import annotations

import json
import logging
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from draftco_jax.errors import UserError
from draftco_jax.metrics import write_text_whole
from draftco_jax.training.update import TrainState

_STATE, _RECORD = "state", "record"
_CHECKSUMS_FILE = "checksums.json"


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
        with _quiet_orbax():
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=(_STATE, _RECORD))

    @property
    def latest_step(self) -> int | None:
        """The newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, key: jax.Array, data: dict[str, Any]) -> None:
        """Write a checkpoint under the state's own step."""
        step, tree = int(state.step), _tree(state, key)
        folder = self._folder / str(step)
        record = {"data": data, "key_implementation": str(jax.random.key_impl(key)), "arrays": _describe(tree)}
        items = {_STATE: ocp.args.StandardSave(tree), _RECORD: ocp.args.JsonSave(record)}
        saved = self._manager.save(step, args=ocp.args.Composite(**items))
        assert saved, f"checkpoint step {step} was left out; the newest is {self.latest_step}"
        write_text_whole(folder / _CHECKSUMS_FILE, json.dumps(_checksums(folder), indent=1) + "\n")

    def restore(self, step: int, like: TrainState, key: jax.Array) -> Restored:
        """Read a checkpoint into the structure of `like`; names, shapes, dtypes and key type must be those saved.

        Leaves of `like` are arrays, or `jax.ShapeDtypeStruct` with a sharding, so that a state is there once.

        Raises:
            UserError: the checkpoint is damaged, or belongs to another model or optimizer.
        """
        self._check_files(step)
        wanted = _tree(like, key)
        record = self._restore_item(step, _RECORD, ocp.args.JsonRestore())
        saved_as, implementation = record["key_implementation"], str(jax.random.key_impl(key))
        if saved_as != implementation:
            raise UserError(
                f"checkpoint step {step} was made with {saved_as} random keys, this process makes {implementation}; "
                f"resume with jax_default_prng_impl={saved_as}"
            )
        _check_arrays(step, record["arrays"], _describe(wanted))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        tree = _placed_like(self._restore_item(step, _STATE, ocp.args.StandardRestore(abstract)), wanted)
        restored_key = jax.random.wrap_key_data(tree["key"], impl=implementation)
        return Restored(TrainState(**tree["train"]), restored_key, record["data"])

    def _check_files(self, step: int) -> None:
        """Every file is as it was written. Orbax is not asked: it reports damage from many threads, in many lines."""
        folder = self._folder / str(step)
        if not (folder / _CHECKSUMS_FILE).is_file():
            return  # the run was killed after the commit, before this file
        try:
            written = json.loads((folder / _CHECKSUMS_FILE).read_text())
        except ValueError as error:
            raise self._damaged(step, f"{_CHECKSUMS_FILE} is not JSON") from error
        found = _checksums(folder)
        for name in written:
            if name not in found:
                raise self._damaged(step, f"{name} is missing")
            if found[name] != written[name]:
                raise self._damaged(step, f"{name} is not as it was written")

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
            f"checkpoint {self._folder / str(step)} is damaged ({reason}) and cannot be restored; "
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
    number = zlib.crc32(json.dumps(_describe(tree), sort_keys=True).encode())
    for leaf in jax.tree.leaves(tree):
        # As bytes: bfloat16 is no type of Python's buffers.
        number = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, number)
    return number


def _placed_like(restored: Any, like: Any) -> Any:
    """Free of its device again if `like` is: jit compiles another program for arrays that are bound to theirs."""
    leaves, structure = jax.tree.flatten(restored)
    del restored  # one array at a time is there twice
    for place, wanted in enumerate(jax.tree.leaves(like)):
        if not _bound(wanted):
            leaves[place] = jnp.asarray(np.asarray(leaves[place]))
    return jax.tree.unflatten(structure, leaves)


def _bound(like: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether an array belongs to its devices; one that is on a mesh does."""
    return like.committed if isinstance(like, jax.Array) else not isinstance(like.sharding, SingleDeviceSharding)


def _tree(state: TrainState, key: jax.Array) -> dict[str, Any]:
    return {"train": state._asdict(), "key": jax.random.key_data(key)}


def _describe(tree: Any) -> dict[str, str]:
    """Type and shape of every array, by the dotted name of its place."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_arrays(step: int, saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Orbax converts types silently on restore; a counter or a moment must not change its type."""
    for name in [*wanted, *saved]:
        found, needed = saved.get(name, "absent"), wanted.get(name, "absent")
        if found != needed:
            raise UserError(
                f"checkpoint step {step}: {name} is {found}, this run needs it to be {needed}; it belongs to another "
                "config: resume with the one it was made with, or choose another run directory"
            )


def _path_name(path: tuple[Any, ...]) -> str:
    names = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
    return ".".join(str(name) for name in names)


def _checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of every file below a folder but the one that holds them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _CHECKSUMS_FILE)
    return {path.relative_to(folder).as_posix(): _checksum(path) for path in files}


def _checksum(path: Path) -> int:
    number = 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            number = zlib.crc32(chunk, number)
    return number


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps what Orbax logs about damaged metadata off the terminal: the refusal of the checkpoint says it."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
