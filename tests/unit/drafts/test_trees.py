"""Drafts that grow token trees: the law after a node is that of a line through it, drawn by `propose`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, GrowsTrees, Shared, TreeCall
from draftco_jax.drafts.catalog import FAMILIES
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.token_tree import Tree
from draftco_jax.numerics.sampling import SamplingConfig

POLICY = Qwen3Config.tiny(vocab_size=8, hidden_size=16, intermediate_size=32)
BLOCK = {"mask_token_id": 0, "num_hidden_layers": 1, "tap_layers": (0,), "block_size": 4}
SPARK = BLOCK | {"markov_rank": 4, "loss_decay_gamma": 4.0}
DRAFTS = {
    "eagle3": Eagle3Config.for_target(POLICY),
    "mtp": MtpConfig.for_target(POLICY),
    "dflash": DFlashConfig.for_target(POLICY, **BLOCK, proposals="sample"),
    "dspark": DSparkConfig.for_target(POLICY, **SPARK),
    "dspark rnn": DSparkConfig.for_target(POLICY, **SPARK, markov_head_type="rnn"),
}
TREE = Tree((-1, 0, 0, 0, 1, 1, 3, 5, 6))
PATHS = [path for node, path in enumerate(TREE.paths) if not TREE.children(node)]
SAMPLING = SamplingConfig(temperature=0.8, top_k=6)
ANCHORS = np.array([5, 3], np.int32)


class Grown(NamedTuple):
    tokens: np.ndarray  # [B, N] of each node, the root's of no meaning
    laws: dict[int, np.ndarray]  # node -> [B, V] of the token after it
    lines: list  # of each path: tokens and laws of a line through it


FAST = ("eagle3", "mtp")


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTS]
)
def grown(request) -> Grown:
    """A random tree grown after features of two requests, and lines drawn along each of its paths."""
    graph, params = initialise(DRAFTS[request.param].build, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim >= 2 else leaf, params)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 8, (2, len(TREE.parents))), jnp.int32)
    given = jnp.asarray(rng.integers(0, 8, (2, 7)), jnp.int32)
    taps = rng.normal(size=(2, 6, 16 * max(1, len(DRAFTS[request.param].tap_layers))))
    hidden, table, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 6, 16), (8, 16), (16, 8)))
    anchor, shared = jnp.asarray(ANCHORS), Shared(table, head)
    features = Features(
        given[:, :6], given[:, 1:], jnp.asarray(taps, jnp.float32), hidden, jnp.zeros(2, jnp.int32), anchor - 1
    )
    newest = jnp.take_along_axis(given, anchor[:, None], axis=1)[:, 0]

    @jax.jit
    def run(params, tokens):
        draft = graph.merge(params)
        state = draft.empty_state(2, 20, Context(jnp.zeros((2, 0), jnp.int32), jnp.zeros((2, 0), jnp.int32)))
        state = draft.absorb(state, features, shared)
        call = TreeCall(TREE, newest, anchor, SAMPLING, shared)
        growth, laws, nodes = draft.begin_tree(state, call), {}, [0]
        for depth, level in enumerate(TREE.levels, start=1):
            laws |= {node: growth.laws[:, place] for place, node in enumerate(nodes)}
            nodes = [level.nodes[place] for place in level.growing]
            if nodes:
                growth = draft.extend_tree(growth, depth, tokens[:, np.array(nodes)], call)
        lines = []
        for path in PATHS:
            along = jnp.stack([laws[node] for node in (0, *path[:-1])], axis=1)
            wanted = tokens[:, np.array(path)]
            sums = jnp.cumsum(along, axis=-1)
            at = lambda x, i=wanted[..., None]: jnp.take_along_axis(x, i, axis=-1)[..., 0]  # noqa: E731
            proposal, _ = draft.propose(state, newest, anchor, at(sums) - at(along) / 2, SAMPLING, shared)
            lines.append((proposal.tokens, proposal.laws))
        return laws, lines

    laws, lines = jax.tree.map(np.asarray, run(params, tokens))
    return Grown(np.asarray(tokens), laws, lines)


def test_laws_after_the_nodes_of_a_tree_are_those_of_lines_through_them(grown):
    compared = 0
    for path, (tokens, laws) in zip(PATHS, grown.lines, strict=True):
        before = (0, *path[:-1])
        for row in range(2):
            for place, (parent, node) in enumerate(zip(before, path, strict=True)):
                np.testing.assert_allclose(laws[row, place], grown.laws[parent][row], atol=2e-6, rtol=0)
                compared += 1
                if grown.laws[parent][row, grown.tokens[row, node]] == 0:
                    break  # the filter rules it out: no line can be drawn through it
                assert tokens[row, place] == grown.tokens[row, node]
    assert compared > 12


def test_siblings_of_other_tokens_have_other_laws_but_in_a_block_of_marginals(grown, request):
    same = np.abs(grown.laws[1] - grown.laws[3]).max(axis=1)
    if "dflash" in request.node.callspec.params["grown"]:
        assert (same == 0).all()
    else:
        assert same.max() > 1e-3


def test_every_family_with_weights_of_its_own_grows_trees():
    grows = {name for name, family in FAMILIES.items() if family.trained}
    assert grows == {name.split()[0] for name in DRAFTS}
    graph, params = initialise(NGramConfig().build, jax.random.key(0))
    assert not isinstance(graph.merge(params), GrowsTrees)
