"""Token trees: exact in fractions for every shape and way of drawing; the library's walk follows the rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding import candidates as library
from draftco_jax.decoding import rejection, trees
from draftco_jax.decoding.candidates import Candidates
from draftco_jax.decoding.trees import Tree

SHAPES = {
    "chain": (-1, 0, 1, 2),
    "star": (-1, 0, 0, 0),
    "binary": (-1, 0, 0, 1, 1, 2),
    "depth first": (-1, 0, 1, 1, 0, 4),  # the root's second child comes after the first one's children
    "interleaved": (-1, 0, 0, 2, 0, 2),
}
WAYS = ["independent", "distinct", "likeliest"]
FAULTS = ["children in the other order", "children judged by q", "residual of a node goes on to its child", "r stays p"]
DRAW = {
    "independent": library.independent,
    "distinct": library.distinct,
    "likeliest": lambda q, uniforms: library.likeliest(q, uniforms.shape[-1]),
}
VERIFY = jax.jit(trees.verify, static_argnums=0)
CASES = [(shape, way) for shape in SHAPES for way in WAYS]
VOCAB = 3


class Filled(NamedTuple):
    """A tree with tokens; entry i of node i, the root's of no meaning."""

    weight: Fraction
    tokens: tuple[int, ...]
    laws: tuple  # that each node's token was drawn from
    paths: tuple  # tokens from the root to each node


def fillings(rational, tree, way, draft) -> Iterator[Filled]:
    """All ways to fill the nodes; where nothing is left to draw token 0 stands with a law of zeros."""
    start = Filled(Fraction(1), (0,), ((Fraction(0),) * VOCAB,), ((),))
    yield from _fill_from(rational, tree, way, draft, start)


def _fill_from(rational, tree, way, draft, filled) -> Iterator[Filled]:
    node = len(filled.tokens)
    if node == len(tree.parents):
        yield filled
        return
    parent = tree.parents[node]
    before = [filled.tokens[i] for i in tree.children(parent) if i < node]
    law = rational.next_candidate(way, draft(filled.paths[parent]), before)
    for token in range(VOCAB):
        if weight := law[token] if any(law) else Fraction(token == 0):
            path = (*filled.paths[parent], token)
            yield from _fill_from(
                rational, tree, way, draft,
                Filled(filled.weight * weight, (*filled.tokens, token), (*filled.laws, law), (*filled.paths, path)),
            )  # fmt: skip


class Outcome(NamedTuple):
    weight: Fraction
    filled: Filled
    path: tuple[int, ...]  # accepted nodes
    final: int
    judging: dict  # of the tried nodes
    emitting: tuple[float, float]

    @property
    def text(self):
        return (*(self.filled.tokens[i] for i in self.path), self.final)


class Rule:
    """All walks through filled trees; `fault` puts one thing wrong."""

    def __init__(self, rational, tree, target, draft, fault=None):
        self.rational, self.tree, self.target, self.draft, self.fault = rational, tree, target, draft, fault

    def walks(self, filled, node=0, path=(), law=None) -> Iterator[Outcome]:
        rational, reached, judging = self.rational, Fraction(1), {}
        law = law or self.target(filled.paths[node])
        children = self.tree.children(node)
        for child in children[::-1] if self.fault == "children in the other order" else children:
            q = self.draft(filled.paths[node]) if self.fault == "children judged by q" else filled.laws[child]
            accept = rational.acceptance(law, q, filled.tokens[child])
            if accept:
                kept = law if self.fault == "residual of a node goes on to its child" and child != children[0] else None
                for end in self.walks(filled, child, (*path, child), kept):
                    uniforms = {**judging, child: rational.passing(accept), **end.judging}
                    yield end._replace(weight=reached * accept * end.weight, judging=uniforms)
            reached, judging = reached * (1 - accept), {**judging, child: rational.failing(accept)}
            if not reached:
                return
            if self.fault != "r stays p":
                law = rational.residual(law, q)
        for x, value in enumerate(law):
            if value:
                yield Outcome(reached * value, filled, path, x, judging, rational.drawing(law, x))


def outcomes(rational, tree, way, target, draft, fault=None) -> list[Outcome]:
    rule = Rule(rational, tree, target, draft, fault)
    return [
        walk._replace(weight=filled.weight * walk.weight)
        for filled in fillings(rational, tree, way, draft)
        for walk in rule.walks(filled)
    ]


def tables(rational, tree, seed=0, kind="random"):
    rng = np.random.default_rng([*tree.depths, seed])
    make = rational.one_hot_table if kind == "greedy" else rational.random_table
    return make(rng, VOCAB, tree.depth), rational.random_table(rng, VOCAB, tree.depth)


def text_law(rational, tree, found, target):
    emissions = ((o.weight, o.text) for o in found)
    return rational.completed_law(emissions, target, VOCAB, tree.depth + 1)


@pytest.mark.parametrize("kind", ["random", "greedy"])
@pytest.mark.parametrize("shape, way", CASES)
def test_emitted_text_follows_the_target_law_exactly(rational, shape, way, kind):
    tree = Tree(SHAPES[shape])
    target, draft = tables(rational, tree, kind=kind)
    found = outcomes(rational, tree, way, target, draft)
    assert text_law(rational, tree, found, target) == rational.target_law(target, VOCAB, tree.depth + 1)


def eighths(rational):
    """Laws under which two tokens of three are left after a refusal, so that the order and the laws matter."""
    target, draft = ((Fraction(a, 8), Fraction(b, 8), Fraction(c, 8)) for a, b, c in ((1, 4, 3), (6, 1, 1)))
    return rational.constant(target), rational.constant(draft)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_has_another_law(rational, fault):
    tree = Tree(SHAPES["binary"])
    target, draft = eighths(rational)
    right = rational.target_law(target, VOCAB, 3)
    assert text_law(rational, tree, outcomes(rational, tree, "distinct", target, draft), target) == right
    assert text_law(rational, tree, outcomes(rational, tree, "distinct", target, draft, fault), target) != right


@pytest.mark.parametrize("shape, way", CASES)
def test_the_library_comes_to_each_outcome_on_its_side_of_every_threshold(rational, shape, way):
    tree = Tree(SHAPES[shape])
    nodes = len(tree.parents)
    target, draft = tables(rational, tree)
    found = outcomes(rational, tree, way, target, draft)
    p = jnp.asarray(rational.floats([[target(path) for path in o.filled.paths] for o in found]))
    filled = Candidates(
        jnp.asarray([o.filled.tokens[1:] for o in found], jnp.int32),
        jnp.asarray(rational.floats([o.filled.laws[1:] for o in found])),
    )
    accepted = np.array([len(o.path) for o in found])
    for side, end in itertools.product(range(2), range(2)):
        idle = (0.0, rational.BELOW_ONE)  # of nodes that the walk does not come to
        judging = [[o.judging.get(i, idle)[side] for i in range(1, nodes)] for o in found]
        emitting = np.array([o.emitting[end] for o in found], np.float32)[:, None]
        commit = np.where(np.arange(tree.depth + 1)[None, :] == accepted[:, None], emitting, 1 - emitting)
        walk = VERIFY(tree, p, filled, jnp.asarray(judging, jnp.float32), jnp.asarray(commit))
        np.testing.assert_array_equal(walk.accepted, accepted)
        np.testing.assert_array_equal(walk.final, [o.final for o in found])
        tokens = np.asarray(trees.committed(filled.tokens, walk))
        for outcome, path, row in zip(found, np.asarray(walk.path), tokens, strict=True):
            assert tuple(path[: len(outcome.path)]) == outcome.path
            assert tuple(row[: len(outcome.path) + 1]) == outcome.text


@pytest.mark.parametrize("shape, way", CASES)
def test_a_tree_is_filled_from_the_laws_it_is_said_to_be_filled_from(rational, shape, way):
    tree = Tree(SHAPES[shape])
    _, draft = tables(rational, tree)
    found = list(fillings(rational, tree, way, draft))
    by_prefix = jnp.asarray(  # by the number that the tokens of a path are
        [[rational.floats(draft(prefix)) for prefix in itertools.product(range(VOCAB), repeat=n)]
         + [[0.0] * VOCAB] * (VOCAB**tree.depth - VOCAB**n) for n in range(tree.depth)],
        jnp.float32,
    )  # fmt: skip

    def law_after(node, prefix):
        assert prefix.shape[1] == tree.depths[node]
        number = jnp.zeros(len(found), jnp.int32)
        for i in range(prefix.shape[1]):
            number = VOCAB * number + prefix[:, i]
        return by_prefix[prefix.shape[1]][number]

    for end in range(2):
        uniforms = [
            [
                rational.drawing(law, x)[end] if any(law) else 0.5
                for x, law in zip(f.tokens[1:], f.laws[1:], strict=True)
            ]
            for f in found
        ]
        drawn = trees.grow(tree, law_after, DRAW[way], jnp.asarray(uniforms, jnp.float32))
        np.testing.assert_array_equal(drawn.tokens, [f.tokens[1:] for f in found])
        wanted = rational.floats([f.laws[1:] for f in found])
        np.testing.assert_allclose(drawn.laws, wanted, atol=rational.MARGIN, rtol=0)


def random_round(rng, batch, nodes, drafted, depth):
    p, laws = (rng.dirichlet(np.ones(7) / 2, (batch, n)).astype(np.float32) for n in (nodes, drafted))
    tokens = rng.integers(0, 7, (batch, drafted), np.int32)
    uniforms = (rng.random((batch, n)).astype(np.float32) for n in (drafted, depth + 1))
    return tuple(map(jnp.asarray, (p, laws, tokens, *uniforms)))


def test_a_chain_is_the_token_rule_to_the_bit():
    p, laws, tokens, judging, commit = random_round(np.random.default_rng(0), 500, 5, 4, 4)
    walk = VERIFY(Tree((-1, 0, 1, 2, 3)), p, Candidates(tokens, laws), judging, commit)
    accepted, final = jax.jit(rejection.verify)(p, laws, tokens, judging, commit)
    assert set(np.asarray(accepted)) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(walk.accepted, accepted)
    np.testing.assert_array_equal(walk.final, final)


def test_a_star_is_the_rule_of_several_candidates():
    p, laws, tokens, judging, commit = random_round(np.random.default_rng(1), 500, 4, 3, 1)
    walk = VERIFY(Tree((-1, 0, 0, 0)), p, Candidates(tokens, laws), judging, commit)
    index, emitted = jax.jit(library.verify)(p[:, 0], Candidates(tokens, laws), judging, commit[:, 0])
    np.testing.assert_array_equal(walk.accepted, (index < 3).astype(int))
    found = np.asarray(trees.committed(tokens, walk))[:, 0]
    np.testing.assert_array_equal(found, emitted)
    np.testing.assert_array_equal(np.where(walk.accepted == 1, walk.path[:, 0] - 1, 3), index)


def test_at_temperature_zero_the_longest_path_of_argmax_tokens_is_kept():
    tree = Tree(SHAPES["binary"])
    rng = np.random.default_rng(2)
    best = rng.integers(0, 3, (300, 6))
    p = jnp.asarray(np.eye(3, dtype=np.float32)[best])
    law = jnp.asarray(rng.random((300, 3)), jnp.float32)
    judging, commit = (jnp.asarray(rng.random((300, n)), jnp.float32) for n in (5, 3))
    filled = trees.grow(tree, lambda node, prefix: law, DRAW["likeliest"], judging)
    walk = VERIFY(tree, p, filled, judging, commit)
    tokens = np.concatenate([np.zeros((300, 1), int), np.asarray(filled.tokens)], axis=1)
    for row in range(300):
        kept = [path for path in tree.paths if all(tokens[row, i] == best[row, tree.parents[i]] for i in path)]
        longest = max(kept, key=len)
        assert tuple(np.asarray(walk.path)[row, : len(longest)]) == longest and walk.accepted[row] == len(longest)
        assert walk.final[row] == best[row, longest[-1] if longest else 0]
    assert set(np.asarray(walk.accepted)) == {0, 1, 2}


def test_a_node_reads_its_ancestors_and_itself():
    tree = Tree(SHAPES["depth first"])
    assert tree.paths == ((), (1,), (1, 2), (1, 3), (4,), (4, 5))
    assert tree.depths == (0, 1, 2, 2, 1, 2) and tree.depth == 2
    assert tree.children(0) == (1, 4) and tree.children(5) == ()
    wanted = ["100000", "110000", "111000", "110100", "100010", "100011"]
    np.testing.assert_array_equal(tree.mask(), [[c == "1" for c in row] for row in wanted])
    np.testing.assert_array_equal(Tree((-1, 0, 1, 2)).mask(), np.tri(4, dtype=bool))


@pytest.mark.parametrize(
    "parents, says",
    [
        ((0, 0), "must be -1, the root, then"),
        ((), "must be -1, the root, then"),
        ((-1,), "at least one"),
        ((-1, 0, 2), r"parents\[2\]=2 must be in 0..1"),
        ((-1, -1), r"parents\[1\]=-1 must be in 0..0"),
    ],
)
def test_what_is_no_tree_is_refused(parents, says):
    with pytest.raises(ValueError, match=says):
        Tree(parents)


def test_arrays_of_another_tree_are_refused():
    p, laws, tokens, judging, commit = random_round(np.random.default_rng(0), 2, 4, 3, 3)
    verify = partial(trees.verify, Tree((-1, 0, 1)), p, Candidates(tokens, laws))
    with pytest.raises(ValueError, match="laws of 4 nodes and 3 drafted tokens do not fit a tree of 3 nodes"):
        verify(judging, commit)
