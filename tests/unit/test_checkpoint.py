"""Checks checkpoints on a toy state: bit for bit back, never converted, mixed up, half-written or silently damaged."""

from __future__ import annotations

import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from draftco_jax.checkpoint import Checkpointer, fingerprint
from draftco_jax.errors import UserError
from draftco_jax.training.update import TrainState

KEY = jax.random.key(7)
POSITION = {"prompts": {"next_index": 12}, "names": ["a", "b"]}
OPTIMIZER = optax.adamw(1e-3)


def make_state(step: int = 3, *, draft: bool = True) -> TrainState:
    """Policy and draft have one shape, and so have their moments: only their names tell them apart."""
    values = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    policy, drafted = {"layers": {0: {"kernel": values + 0.1}}}, {"layers": {0: {"kernel": values - 0.1}}}
    return TrainState(
        step=jnp.int32(step),
        policy=policy,
        draft=drafted if draft else None,
        policy_optimizer=moments(policy, 1.0),
        draft_optimizer=moments(drafted, 2.0) if draft else None,
    )


def moments(params, value: float):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), OPTIMIZER.init(params))


def save(folder: Path, *states: TrainState, keep: int = 5, key=KEY) -> None:
    with Checkpointer(folder, keep) as checkpoints:
        for state in states:
            checkpoints.save(state, key, POSITION)


def restore(folder: Path, like: TrainState | None = None, key=KEY):
    with Checkpointer(folder, 5) as checkpoints:
        assert checkpoints.latest_step is not None
        return checkpoints.restore(checkpoints.latest_step, like or make_state(), key)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def same(a, b) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@contextmanager
def files_of_at_most(size: int):
    """Longer ones fail to be written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_everything_comes_back_bit_for_bit(tmp_path):
    odd = jnp.array([[0.0, -0.0, jnp.inf], [jnp.nan, 1e-40, 1 / 3]], jnp.float32)
    state = make_state()._replace(policy={"layers": {0: {"kernel": odd}}})
    save(tmp_path, state)
    restored = restore(tmp_path)
    assert same(restored.state, state) and restored.data == POSITION
    assert same(jax.random.key_data(restored.key), jax.random.key_data(KEY))


def test_a_restored_array_is_bound_to_its_device_only_if_the_template_is(tmp_path):
    # Otherwise a resumed run would be computed by another program than the run that was not stopped.
    save(tmp_path, make_state())
    template = make_state()
    bound = template._replace(policy=jax.device_put(template.policy, jax.devices()[0]))
    restored = restore(tmp_path, bound).state
    assert all(leaf.committed for leaf in jax.tree.leaves(restored.policy))
    assert not any(leaf.committed for leaf in jax.tree.leaves(restored._replace(policy=None)))


def test_an_arm_without_a_draft_comes_back_without_one(tmp_path):
    save(tmp_path, make_state(draft=False))
    restored = restore(tmp_path, make_state(0, draft=False)).state
    assert same(restored, make_state(draft=False)) and restored.draft is None


def test_optimizer_groups_are_not_mixed_up(tmp_path):
    save(tmp_path, make_state())
    restored = restore(tmp_path).state
    assert {float(leaf.max()) for leaf in jax.tree.leaves(restored.policy_optimizer)} == {1.0}
    assert {float(leaf.max()) for leaf in jax.tree.leaves(restored.draft_optimizer)} == {2.0}
    assert not same(restored.policy, restored.draft)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_bug_case_b66_a_random_key_comes_back_with_its_implementation(implementation, tmp_path):
    key = jax.random.key(3, impl=implementation)
    save(tmp_path, make_state(), key=key)
    restored = restore(tmp_path, key=jax.random.key(0, impl=implementation)).key
    assert restored.dtype == key.dtype
    assert np.array_equal(jax.random.normal(restored, (4,)), jax.random.normal(key, (4,)))


def test_bug_case_b66_a_key_of_another_implementation_is_refused(tmp_path):
    # Both hold four numbers, so that their shapes do not tell them apart.
    save(tmp_path, make_state(), key=jax.random.key(3, impl="rbg"))
    with pytest.raises(UserError, match="step 3 was made with rbg random keys, this process makes unsafe_rbg; resume"):
        restore(tmp_path, key=jax.random.key(3, impl="unsafe_rbg"))


def test_bug_case_b65_a_template_of_another_type_is_refused(tmp_path):
    state = make_state()._replace(draft_optimizer={"count": jnp.int32(2**24 + 1)})
    save(tmp_path, state)
    as_float = state._replace(draft_optimizer={"count": jnp.float32(0)})
    with pytest.raises(UserError, match=r"train.draft_optimizer.count is int32\[\], this run needs it to be float32"):
        restore(tmp_path, as_float)
    assert int(restore(tmp_path, state).state.draft_optimizer["count"]) == 2**24 + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: state._replace(draft=None, draft_optimizer=None),
            r"train.draft.* this run needs it to be absent",
        ),
        (lambda state: state._replace(policy={}), r"train.policy.layers.0.kernel is float32\[2, 3\], .* to be absent"),
        (
            lambda state: state._replace(policy=state.policy | {"bias": jnp.zeros(3)}),
            r"train.policy.bias is absent, this run needs it to be float32\[3\]",
        ),
        (
            lambda state: state._replace(policy={"layers": {0: {"kernel": jnp.zeros((3, 2))}}}),
            r"is float32\[2, 3\], this run needs it to be float32\[3, 2\]",
        ),
    ],
)
def test_a_checkpoint_of_another_config_is_refused(change, said, tmp_path):
    save(tmp_path, make_state())
    with pytest.raises(UserError, match=f"{said}.*it belongs to another config: resume with the one it was made with"):
        restore(tmp_path, change(make_state()))


def test_old_steps_are_deleted_after_the_new_one(tmp_path):
    save(tmp_path, make_state(1), make_state(2), make_state(3), keep=2)
    assert steps(tmp_path) == ["2", "3"]


def test_bug_case_b67_a_failed_save_surfaces_at_once_and_the_last_good_step_stays(tmp_path):
    save(tmp_path, make_state(1))
    with Checkpointer(tmp_path, 1) as checkpoints:
        with files_of_at_most(64), pytest.raises(Exception, match="(?i)file too large"):
            checkpoints.save(make_state(2), KEY, POSITION)
        assert checkpoints.latest_step == 1
    assert same(restore(tmp_path).state, make_state(1))
    save(tmp_path, make_state(2))
    assert same(restore(tmp_path).state, make_state(2))


@pytest.mark.parametrize("left", ["an empty folder", "no marker", "a temporary folder"])
def test_bug_case_b68_a_half_written_step_is_not_a_candidate(left, tmp_path):
    save(tmp_path, make_state(20))
    folder = tmp_path / "checkpoints"
    if left == "an empty folder":
        (folder / "30").mkdir()
    elif left == "no marker":
        shutil.copytree(folder / "20", folder / "30")
        (folder / "30" / "commit_success.txt").unlink()
    else:
        shutil.copytree(folder / "20", folder / "30.orbax-checkpoint-tmp-1")
    assert same(restore(tmp_path).state, make_state(20))
    # The run comes to step 30 again, and what is left of the old one is not in its way.
    save(tmp_path, make_state(30))
    assert same(restore(tmp_path).state, make_state(30))


def test_a_kill_between_the_commit_and_the_checksums_leaves_a_good_step(tmp_path):
    save(tmp_path, make_state())
    (tmp_path / "checkpoints" / "3" / "checksums.json").unlink()
    assert same(restore(tmp_path).state, make_state())


def test_every_damaged_file_is_named_and_the_step_before_it_offered(tmp_path):
    save(tmp_path, make_state(2), make_state(3))
    step = tmp_path / "checkpoints" / "3"
    for path in [path for path in step.rglob("*") if path.is_file() and path.name != "commit_success.txt"]:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=f"{step} is damaged .*; delete that folder to resume from step 2") as error:
            restore(tmp_path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(content)
    assert same(restore(tmp_path).state, make_state(3))
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    largest(step).unlink()
    with pytest.raises(UserError, match=r"is missing\) and cannot be restored; delete that folder to start over"):
        restore(tmp_path)


def test_a_run_without_checkpoints_has_no_latest_step(tmp_path):
    with Checkpointer(tmp_path, 2) as checkpoints:
        assert checkpoints.latest_step is None


def test_a_fingerprint_changes_with_any_bit_and_any_name():
    params = {"a": jnp.zeros((2, 3)), "b": jnp.ones(2)}
    numbers = [
        fingerprint(params),
        fingerprint(params | {"a": jnp.zeros((2, 3)).at[1, 2].set(-0.0)}),
        fingerprint({"a": params["a"], "c": params["b"]}),
        fingerprint(params | {"a": jnp.zeros((3, 2))}),
        fingerprint(None),
    ]
    assert len(set(numbers)) == len(numbers)
    assert fingerprint(jax.tree.map(jnp.copy, params)) == numbers[0]
