"""Shapes of token trees, and what policies make of their nodes: the same as of each path by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.kv_cache import compacted
from draftco_jax.models.layer_runs import stack_layers
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.paged_cache import paged
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.token_tree import Tree, balanced, caterpillar

CLOSE = {"atol": 2e-5, "rtol": 0}  # float32, blocks over a cache against whole rows; states are of size 1


def test_shapes_by_widths_are_those_of_their_parents():
    assert balanced(2, 2, 1).parents == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert caterpillar(2, 2, 1).parents == (-1, 0, 0, 1, 1, 3)
    assert balanced(1, 1, 1) == caterpillar(1, 1, 1) == Tree((-1, 0, 1, 2))
    for make in (balanced, caterpillar):
        with pytest.raises(ValueError, match=r"widths=\(2, 0\) must be numbers of children >= 1"):
            make(2, 0)


def test_levels_say_parents_and_places_among_siblings():
    tree = Tree((-1, 0, 0, 0, 2, 2, 3, 5))
    assert tree.by_level and tree.drafted == 7 and tree.first_path == (1,)
    first, second, third = tree.levels
    assert first == ((1, 2, 3), (0, 0, 0), (0, 1, 2), (1, 2))
    assert second == ((4, 5, 6), (0, 0, 1), (0, 1, 0), (1,)) and second.growing_parents.tolist() == [0]
    assert third == ((7,), (0,), (0,), ())
    assert tree.inner == Tree((-1, 0, 0, 1)) and Tree((-1, 0, 0)).inner is None
    assert tree.cut(2) == Tree((-1, 0, 0, 0, 2, 2, 3)) and tree.cut(3) == tree
    assert caterpillar(2, 2, 1).first_path == (1, 3, 5)


def test_a_tree_that_goes_depth_first_has_no_levels():
    with pytest.raises(ValueError, match=r"parents=\(-1, 0, 1, 0\) must go level by level"):
        _ = Tree((-1, 0, 1, 0)).levels


TREE = Tree((-1, 0, 0, 0, 1, 2, 2, 6, 6))
STARTS, CAPACITY = np.array([5, 3], np.int32), 20
WINDOW = 2  # of three ancestors in the block one is in sight


@pytest.fixture(scope="module")
def policy():
    """Windows, sinks and scaled angles; layers in a loop, so that their caches are stacked."""
    cfg = replace(GptOssConfig.tiny(), vocab_size=16, sliding_window=WINDOW)
    _, params = initialise(cfg.build, jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim >= 2 else leaf, params)
    graph = graph_of(partial(cfg.build, compute=ComputeConfig(scan_layers=True)))
    return cfg, graph.merge(stack_layers(params, cfg.runs))


def whole_rows(policy, texts):
    """States and taps of texts [B, T] in one packed forward."""
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1], dtype=jnp.int32)[None], texts.shape)
    output = policy(texts, positions, jnp.ones_like(texts), tap_layers=(0, 2))
    return output.hidden, output.taps


@pytest.fixture(scope="module")
def read(policy):
    """What a tree step over random texts gives, and the steps after paths of it are kept."""
    rng = np.random.default_rng(0)
    prompts, nodes = (jnp.asarray(rng.integers(0, 16, (2, n)), jnp.int32) for n in (5, len(TREE.parents)))
    kept = np.array([[2, 6, 8], [1, 4, 4]])  # of the second request a path of two
    paths, counts = jnp.asarray(kept, jnp.int32), jnp.array([3, 2], jnp.int32)
    next_tokens = jnp.asarray(rng.integers(0, 16, (2, 3)), jnp.int32)

    @jax.jit
    def run(prompts, nodes, paths, next_tokens):
        model, start = policy[1], jnp.asarray(STARTS)
        cache = model.empty_cache(2, CAPACITY, len(TREE.parents) - 1)
        lengths = jnp.asarray(STARTS)
        cache = model.step(prompts, jnp.zeros(2, jnp.int32), cache, tap_layers=(), lengths=lengths).cache
        block = model.step(nodes, start, cache, tap_layers=(0, 2), tree=TREE)
        cache = compacted(block.cache, start, paths)
        after = model.step(next_tokens, start + counts + 1, cache, tap_layers=())
        return block.hidden, block.taps, after.hidden

    found = jax.tree.map(np.asarray, run(prompts, nodes, paths, next_tokens))
    return np.asarray(prompts), np.asarray(nodes), kept, np.asarray(counts), np.asarray(next_tokens), found


def text_of(prompt, start, nodes, path, more=()):
    text = [*prompt[:start], nodes[0], *(nodes[i] for i in path), *more]
    return np.array([*text, *[0] * (16 - len(text))], np.int32), len(text)


@pytest.fixture(scope="module")
def read_whole(policy):
    """States and taps of texts by one compiled packed forward, padded to one number of texts."""
    run, most = jax.jit(partial(whole_rows, policy[1])), 2 * len(TREE.parents)

    def read(texts):
        padded = np.pad(np.stack(texts), ((0, most - len(texts)), (0, 0)))
        return [np.asarray(x)[: len(texts)] for x in run(jnp.asarray(padded))]

    return read


def test_every_node_is_read_as_the_end_of_its_path_within_windows(read, read_whole):
    prompts, nodes, _, _, _, (hidden, taps, _) = read
    places = [(row, node) for row in range(2) for node in range(len(TREE.parents))]
    texts, lengths = zip(*(text_of(prompts[r], STARTS[r], nodes[r], TREE.paths[n]) for r, n in places), strict=True)
    wanted = read_whole(texts)
    for found, whole in zip((hidden, taps), wanted, strict=True):
        for i, (row, node) in enumerate(places):
            np.testing.assert_allclose(found[row, node], whole[i, lengths[i] - 1], **CLOSE)


def test_a_compacted_cache_goes_on_as_if_the_path_alone_had_been_read(read, read_whole):
    prompts, nodes, kept, counts, following, (_, _, after) = read
    texts, lengths = zip(
        *(text_of(prompts[r], STARTS[r], nodes[r], kept[r, : counts[r]], following[r]) for r in range(2)), strict=True
    )
    wanted, _ = read_whole(texts)
    for row in range(2):
        np.testing.assert_allclose(after[row], wanted[row, lengths[row] - 3 : lengths[row]], **CLOSE)


@pytest.mark.parametrize("cfg", [Qwen35MoeConfig.tiny(), NemotronHConfig.tiny()], ids=lambda cfg: type(cfg).__name__)
def test_recurrent_policies_are_refused(cfg):
    assert cfg.recurrent
    with pytest.raises(ValueError, match=f"policy={type(cfg).__name__} must not be recurrent with a token tree"):
        step_shapes(cfg, lambda cache: cache)


def test_caches_in_pages_are_refused(policy):
    table = jnp.ones((1, 2, 5), jnp.int32)
    with pytest.raises(ValueError, match="must be read into a cache of rows, and this one has pages"):
        step_shapes(policy[0], lambda cache: paged(cache, 30, 2, table))


def step_shapes(cfg, of_cache):
    """Trace a step over a tree."""

    def step(key):
        model = initialise(cfg.build, key)
        model = model[0].merge(model[1])
        cache = of_cache(model.empty_cache(1, CAPACITY, 3))
        return model.step(
            jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32), cache, tap_layers=(), tree=Tree((-1, 0, 0))
        )

    return jax.eval_shape(step, jax.random.key(0))
