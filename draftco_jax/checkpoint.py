"""Save and restore all that a run needs to continue bit for bit, with Orbax.

A checkpoint is written whole or not at all: Orbax renames the finished folder, and only renamed folders are candidates
for a resume. Contents: the train state (policy, draft, both optimizers, step), the root random key, the data position.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from draftco_jax.errors import UserError
from draftco_jax.training.update import TrainState

_STATE, _DATA = "state", "data"


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
        self._manager = ocp.CheckpointManager(self._folder, options=options, handler_registry=_handlers())

    @property
    def latest_step(self) -> int | None:
        """The newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, key: jax.Array, data: dict[str, Any]) -> None:
        """Write a checkpoint under the state's own step."""
        tree = {"train": state._asdict(), "key": jax.random.key_data(key)}
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(**{_STATE: ocp.args.StandardSave(tree), _DATA: ocp.args.JsonSave(data)}),
        )

    def restore(self, step: int, like: TrainState, key: jax.Array) -> Restored:
        """Read a checkpoint into the structure of `like`; shapes and dtypes must be those that were saved.

        Raises:
            UserError: the checkpoint is damaged, or belongs to another model or optimizer.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, {
            "train": like._asdict(),
            "key": jax.random.key_data(key),
        })  # fmt: skip
        source = f"checkpoint {self._folder / str(step)}"
        try:
            self._check_dtypes(step, abstract)
            items = {_STATE: ocp.args.StandardRestore(abstract), _DATA: ocp.args.JsonRestore()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except UserError:
            raise
        except Exception as error:  # Orbax and its storage raise many types; all mean that the files cannot be used
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"{source} cannot be restored ({reason[:200]}); it is damaged or of another model: "
                "delete that step's folder to resume from the one before it"
            ) from error
        tree = restored[_STATE]
        return Restored(TrainState(**tree["train"]), jax.random.wrap_key_data(tree["key"]), restored[_DATA])

    def _check_dtypes(self, step: int, abstract: Any) -> None:
        """Orbax converts dtypes silently on restore; a counter or a moment must not change its type."""
        saved = self._manager.item_metadata(step)[_STATE]
        saved = getattr(saved, "tree", saved)
        flat_saved = {_path_name(path): leaf for path, leaf in _leaves(saved)}
        for path, leaf in _leaves(abstract):
            name = _path_name(path)
            found = flat_saved.get(name)
            if found is None:
                raise UserError(f"checkpoint step {step} holds no array {name}; it belongs to another config")
            if tuple(found.shape) != tuple(leaf.shape) or found.dtype != leaf.dtype:
                raise UserError(
                    f"checkpoint step {step}: {name} is {found.dtype}{tuple(found.shape)}, this run needs "
                    f"{leaf.dtype}{tuple(leaf.shape)}; it belongs to another config"
                )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()


def _handlers() -> ocp.handlers.CheckpointHandlerRegistry:
    """Who reads and writes each item; without it a process that has not saved cannot read what is in a checkpoint."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays, json_object = ocp.StandardCheckpointHandler(), ocp.JsonCheckpointHandler()
    for arguments in (ocp.args.StandardSave, ocp.args.StandardRestore):
        registry.add(_STATE, arguments, arrays)
    for arguments in (ocp.args.JsonSave, ocp.args.JsonRestore):
        registry.add(_DATA, arguments, json_object)
    return registry


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "dtype"))[0]


def _path_name(path: tuple[Any, ...]) -> str:
    names = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
    return ".".join(str(name) for name in names)
