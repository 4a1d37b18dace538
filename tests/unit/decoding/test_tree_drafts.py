"""Trees filled by drafts: every node has the law that its token was drawn from, and a random number of its own."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.tree_drafts import draft_tree
from draftco_jax.drafts.base import GrowsTrees, Growth, Proposal, TreeCall
from draftco_jax.models.token_tree import Tree, caterpillar
from draftco_jax.numerics.sampling import SamplingConfig, draw

VOCAB, ROWS = 4, 200
TREE = Tree((-1, 0, 0, 1, 1, 1, 2, 3, 5, 5))
GREEDY, UNTOUCHED = SamplingConfig(temperature=0.0), SamplingConfig()


class Tables:
    """A draft whose law after each path is written down; it reads nothing."""

    cfg = SimpleNamespace(tap_layers=())

    def __init__(self, rational, depth):
        self.table = rational.random_table(np.random.default_rng(3), VOCAB, depth)
        prefixes = [self._rows(rational, n) for n in range(depth + 1)]
        self.laws = [jnp.asarray(rows) for rows in prefixes]

    def _rows(self, rational, n):
        return rational.floats([self.table(prefix) for prefix in np.ndindex(*(VOCAB,) * n)])

    def empty_state(self, batch, capacity, context): ...

    def absorb(self, state, features, shared): ...


class Line(Tables):
    def propose(self, state, newest, anchor, uniforms, sampling, shared):
        number, tokens, laws = jnp.zeros_like(newest), [], []
        for i in range(uniforms.shape[1]):
            laws.append(self.laws[i][number])
            tokens.append(draw(laws[-1], uniforms[:, i]))
            number = VOCAB * number + tokens[-1]
        return Proposal(jnp.stack(tokens, 1), jnp.stack(laws, 1), jnp.full_like(newest, len(tokens))), state


class Branching(Tables):
    draws_tokens = True

    def begin_tree(self, state, call):
        number = jnp.zeros((call.newest.shape[0], 1), jnp.int32)
        return Growth(self.laws[0][number], state, number)

    def extend_tree(self, growth, depth, tokens, call):
        number = VOCAB * growth.branches[:, call.tree.levels[depth - 1].growing_parents] + tokens
        return Growth(self.laws[depth][number], growth.state, number)

    def propose(self, *unused):
        raise AssertionError("it says the law after any node")


def filled(draft, tree, sampling, uniforms):
    """Tokens with the root's place, laws, and what is proposed."""

    @jax.jit
    def fill(uniforms):
        zeros = jnp.zeros((uniforms.shape[0],), jnp.int32)
        return draft_tree(draft, None, TreeCall(tree, zeros, zeros, sampling, None), uniforms)[0]

    drafted = fill(jnp.asarray(uniforms))
    tokens, laws = map(np.asarray, drafted.candidates)
    return np.pad(tokens, ((0, 0), (1, 0))), laws, np.asarray(drafted.proposed)


@pytest.fixture(scope="module")
def uniforms():
    return np.random.default_rng(4).random((ROWS, TREE.drafted)).astype(np.float32)


def wanted_laws(rational, way, draft, tree, tokens):
    """Of each drafted node given the tokens of its path and its siblings before it."""
    laws = []
    for node in range(1, len(tree.parents)):
        parent = tree.parents[node]
        prefix = tuple(int(tokens[i]) for i in tree.paths[parent])
        before = [int(tokens[i]) for i in tree.children(parent) if i < node]
        laws.append(rational.next_candidate(way, draft.table(prefix), before))
    return laws


@pytest.mark.parametrize("sampling, way", [(UNTOUCHED, "distinct"), (GREEDY, "likeliest")], ids=["drawn", "greedy"])
def test_grown_nodes_have_the_laws_they_were_drawn_from(rational, uniforms, sampling, way):
    draft = Branching(rational, TREE.depth)
    assert isinstance(draft, GrowsTrees)
    tokens, laws, proposed = filled(draft, TREE, sampling, uniforms)
    for row in range(ROWS):
        wanted = wanted_laws(rational, way, draft, TREE, tokens[row])
        for node, law in enumerate(wanted):
            if not proposed[row, node]:
                continue
            np.testing.assert_allclose(laws[row, node], rational.floats(law), atol=1e-6, rtol=0)
            assert laws[row, node, tokens[row, node + 1]] > 0
        empty = [not any(law) for law in wanted]
        for node in range(1, len(TREE.parents)):
            assert proposed[row, node - 1] == (not any(empty[i - 1] for i in TREE.paths[node]))


def test_beside_a_line_stand_draws_without_replacement_and_nothing_after_them(rational, uniforms):
    draft = Line(rational, TREE.depth)
    assert not isinstance(draft, GrowsTrees)
    tokens, laws, proposed = filled(draft, TREE, UNTOUCHED, uniforms)
    on_path = TREE.first_path
    assert on_path == (1, 3, 7)
    beside = {child for node in on_path for child in TREE.children(TREE.parents[node])}
    assert beside == {1, 2, 3, 4, 5, 7}
    for row in range(ROWS):
        wanted = wanted_laws(rational, "distinct", draft, TREE, tokens[row])
        for node in range(1, len(TREE.parents)):
            law = wanted[node - 1] if node in beside else (Fraction(0),) * VOCAB
            np.testing.assert_allclose(laws[row, node - 1], rational.floats(law), atol=1e-6, rtol=0)
            assert proposed[row, node - 1] == any(law)


def test_a_law_without_doubt_leaves_nothing_beside_the_line(rational, uniforms):
    draft = Line(rational, 3)
    draft.laws = [jax.nn.one_hot(jnp.argmax(rows, -1), VOCAB) for rows in draft.laws]
    tree = caterpillar(2, 2, 2)
    tokens, laws, proposed = filled(draft, tree, GREEDY, uniforms[:, : tree.drafted])
    np.testing.assert_array_equal(proposed, np.tile([True, False], (ROWS, 3)))
    assert (laws[:, 1::2] == 0).all() and (laws[:, ::2].sum(-1) == 1).all()


@pytest.mark.parametrize("kind", [Branching, Line])
def test_a_number_decides_its_own_node_and_what_hangs_on_it(rational, uniforms, kind):
    draft = kind(rational, TREE.depth)
    given = np.tile(uniforms, (len(TREE.parents), 1, 1))
    for node in range(1, len(TREE.parents)):
        given[node, :, node - 1] = 1 - given[node, :, node - 1]
    found, _, _ = filled(draft, TREE, UNTOUCHED, given.reshape(-1, TREE.drafted))
    tokens, *changed = found.reshape(len(TREE.parents), ROWS, -1)
    for node, others in enumerate(changed, start=1):
        later = {i for i in TREE.children(TREE.parents[node]) if i >= node}
        reach = [i for i, path in enumerate(TREE.paths) if later & set(path)]
        differs = np.flatnonzero((tokens != others).any(axis=0))
        assert set(differs) <= set(reach)
        assert node in differs or (kind is Line and node in (6, 8, 9))
