"""Steps over a paged cache, held to the same steps over the dense one, whose pages are permuted, shared or poisoned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.attention import attend
from draftco_jax.models.calls import CachedCall
from draftco_jax.models.functional import initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.kv_cache import visible_slots
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.paged_cache import PagedCache, PagedLayer, Pages, is_paged, paged, walk
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig

POLICIES = {
    "qwen3": Qwen3Config.tiny(hidden_size=16, intermediate_size=32),
    "gpt_oss": replace(GptOssConfig.tiny(), num_hidden_layers=2, layer_types=("sliding_attention", "full_attention")),
    "qwen3_5_moe": replace(
        Qwen35MoeConfig.tiny(), num_hidden_layers=2, layer_types=("linear_attention", "full_attention")
    ),
    "nemotron_h": replace(NemotronHConfig.tiny(), num_hidden_layers=3, block_types=("mamba", "attention", "moe")),
}
ROWS, PAGE, STEPS, COLUMNS = 4, 3, 3, 2
CAPACITY = STEPS * COLUMNS * PAGE
PROMPTS = np.array([5, 1, 8, 3], np.int32)
KEPT = np.array([[2, 3, 1, 0], [3, 1, 0, 2], [1, 1, 1, 1]], np.int32)  # tokens of each call that are read on from
T = 3
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def table_of(order: np.ndarray) -> jax.Array:
    """Every row has a page of its own in each column; `order` says which."""
    return jnp.asarray(1 + order.reshape(ROWS, STEPS, COLUMNS), jnp.int32)


def poisoned(cache: PagedCache) -> PagedCache:
    """The empty cache with NaN in every page."""
    spoil = lambda node: jax.tree.map(lambda x: x * jnp.nan, node) if is_paged(node) else node  # noqa: E731
    return cache._replace(layers=jax.tree.map(spoil, cache.layers, is_leaf=is_paged))


class Steps:
    """A policy's prompt in two pieces and three calls, on either cache."""

    def __init__(self, family: str) -> None:
        self.cfg = POLICIES[family]
        graph, params = initialise(self.cfg.build, jax.random.key(1))
        params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
        self.model = graph.merge(params)
        rng = np.random.default_rng(2)
        self.prompts = jnp.asarray(rng.integers(2, 32, (ROWS, PROMPTS.max())), jnp.int32)
        self.calls = jnp.asarray(rng.integers(2, 32, (len(KEPT), ROWS, T)), jnp.int32)
        step = partial(self.model.step, tap_layers=())
        self._piece = jax.jit(lambda *args: step(*args[:3], lengths=args[3], active=args[4])[::2])
        self._call = jax.jit(lambda *args: step(*args, active=jnp.ones((ROWS, T), bool))[::2])

    def dense(self) -> list[np.ndarray]:
        return self._outputs(lambda: self.model.empty_cache(ROWS, CAPACITY, T - 1))

    def paged(self, table: jax.Array, poison: bool = False) -> list[np.ndarray]:
        def make():
            cache = paged(self.model.empty_cache(ROWS, CAPACITY, T - 1), ROWS * STEPS * COLUMNS + 1, PAGE, table)
            return poisoned(cache) if poison else cache

        return self._outputs(make)

    def _outputs(self, make) -> list[np.ndarray]:
        cache, outputs, half = jax.jit(make)(), [], PROMPTS.max() // 2
        for start, piece in ((0, self.prompts[:, :half]), (half, self.prompts[:, half:])):
            real = np.clip(PROMPTS - start, 0, half)
            active = np.arange(half)[None] < real[:, None]
            hidden, cache = self._piece(piece, np.minimum(start, PROMPTS), cache, real, active)
            outputs.append(np.where(active[:, :, None], hidden, 0.0))
        place = PROMPTS
        for tokens, kept in zip(self.calls, KEPT, strict=True):
            hidden, cache = self._call(tokens, place, cache)
            outputs.append(np.asarray(hidden))
            place = place + kept
        return outputs


SLOW = ("qwen3", "qwen3_5_moe")  # to compile; the others have what these have but for the delta rule


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in POLICIES]
)
def steps(request) -> Steps:
    return Steps(request.param)


def test_bug_case_b54_ragged_rows_in_permuted_pages_read_what_the_dense_cache_reads(steps):
    rng = np.random.default_rng(0)
    dense = steps.dense()
    for order in (np.arange(ROWS * STEPS * COLUMNS), rng.permutation(ROWS * STEPS * COLUMNS)):
        for one, other in zip(steps.paged(table_of(order), poison=True), dense, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)
    assert max(np.abs(x).max() for x in dense) > 0.5


def test_a_table_that_names_a_page_of_another_row_is_seen(steps):
    wrong = table_of(np.arange(ROWS * STEPS * COLUMNS)).at[2, 0, 0].set(1)
    off = [np.abs(one - other).max() for one, other in zip(steps.paged(wrong), steps.dense(), strict=True)]
    assert max(off) > 1e-2


# ---- the walk by itself ----

HEADS, KV, WIDTH = 4, 2, 8


class Scene:
    """Random pools and queries; rows 0 and 1 share their first two pages."""

    def __init__(self, start=(9, 7, 0, 14)) -> None:
        rng = np.random.default_rng(4)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
        self.start = jnp.asarray(start, jnp.int32)
        self.layer = PagedLayer(*(draw(KV, 25, PAGE, WIDTH) for _ in range(2)))
        self.queries, self.sinks = draw(ROWS, T, HEADS, WIDTH), draw(HEADS)
        table = 1 + rng.permutation(24).reshape(ROWS, -1)
        table[1, :2] = table[0, :2]
        self.table = table

    def pages(self, table=None) -> Pages:
        table = self.table if table is None else table
        return Pages(jnp.asarray(table.reshape(ROWS, STEPS, COLUMNS), jnp.int32), self.start + T)

    def walked(self, window, sinks, pages=None) -> np.ndarray:
        sinks = self.sinks if sinks else None
        return np.asarray(WALK(self.queries, self.layer, pages or self.pages(), self.start, window, sinks))

    def dense(self, window, sinks) -> np.ndarray:
        laid = [jnp.swapaxes(pool[:, self.table], 0, 1).reshape(ROWS, KV, -1, WIDTH) for pool in self.layer]
        mask = visible_slots(CAPACITY, self.start, T)
        if window is not None:
            places = self.start[:, None] + jnp.arange(T)[None]
            mask &= jnp.arange(CAPACITY)[None, None] > (places - window)[:, :, None]
        return np.asarray(attend(self.queries, *laid, mask, self.sinks if sinks else None))


WALK = jax.jit(walk, static_argnums=(4,))


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_walk_is_attention_over_the_pages_in_the_order_of_the_table(window, sinks):
    scene = Scene()
    np.testing.assert_allclose(scene.walked(window, sinks), scene.dense(window, sinks), atol=2e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_bug_case_b27_a_longer_neighbour_changes_no_bit_of_a_row(window):
    short, long = Scene((2, 3, 0, 1)), Scene((2, 3, 0, 14))
    np.testing.assert_array_equal(short.walked(window, True)[:3], long.walked(window, True)[:3])
    np.testing.assert_array_equal(short.walked(window, False)[:3], long.walked(window, False)[:3])
    late, early = Scene((9, 12, 14, 14)), Scene((9, 12, 14, 0))  # with a window, steps before all of its own
    np.testing.assert_array_equal(late.walked(window, False)[:3], early.walked(window, False)[:3])


def test_cost_grows_with_the_text_and_not_with_the_capacity():
    """Columns past the longest text are not looked at: their pages may be anything."""
    scene = Scene((2, 3, 0, 1))
    scene.table[:, 2:] = 0
    wild = scene.table.copy()
    wild[:, COLUMNS:] = 10**6  # XLA clamps it to the last page, whose NaN would be seen if its column were walked
    scene.layer = PagedLayer(*(pool.at[:, -1].set(jnp.nan) for pool in scene.layer))
    np.testing.assert_array_equal(scene.walked(None, False, scene.pages(wild)), scene.walked(None, False))


def test_tokens_that_are_not_real_are_written_to_page_0_alone():
    scene = Scene((4, 0, 17, 2))
    rows = jnp.ones((ROWS, T, KV, WIDTH))
    active = jnp.asarray([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    cache = PagedCache((), jnp.zeros((CAPACITY, 0)), jnp.zeros((CAPACITY, 0)), scene.pages().table)
    call = CachedCall(scene.start, None, cache.seen(scene.start, T, active), None, active)
    after = np.asarray(scene.layer.put(rows, rows, call).keys)
    changed = {
        (int(page), int(slot)) for page, slot in np.argwhere((after != np.asarray(scene.layer.keys)).any((0, 3)))
    }
    wanted = {(0, 4), (0, 5), (2, 17), (3, 2), (3, 3), (3, 4)}  # row 2 ends at the last slot there is
    assert {place for place in changed if place[0]} == {
        (int(scene.table[row, slot // PAGE]), slot % PAGE) for row, slot in wanted
    }


def test_rows_that_see_nothing_get_zeros_and_no_nan():
    scene = Scene((0, 0, 0, 0))
    scene.layer = PagedLayer(*(pool * jnp.nan for pool in scene.layer))
    pages = Pages(scene.pages().table, jnp.zeros(ROWS, jnp.int32))
    assert (scene.walked(None, False, pages) == 0).all() and (scene.walked(3, True, pages) == 0).all()


def test_a_table_too_short_for_the_capacity_is_refused():
    model = initialise(POLICIES["qwen3"].build, jax.random.key(1))
    cache = model[0].merge(model[1]).empty_cache(1, 7)
    with pytest.raises(ValueError, match="capacity=7"):
        paged(cache, 5, 3, jnp.zeros((1, 2, 1), jnp.int32))
