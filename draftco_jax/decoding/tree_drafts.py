r"""The nodes of a token tree filled by a draft of any family, each with the law that it was drawn from.

    drafts that say the law after any node (`drafts.base.GrowsTrees`)   all nodes, level by level
    other drafts                                                        the first path and the candidates beside it

The children of a node are drawn from its law q without replacement (`candidates.distinct`). Where nothing is drawn, at
temperature 0 or because the draft names tokens without doubt, they are the likeliest of the law at temperature 1
(`candidates.likeliest`). Both are exact (`decoding.trees`), since the shape is fixed beforehand.

A draft of the second kind proposes a line d_1, d_2, ... with laws q_1, q_2, ..., which is the first path of the tree:
the first child of a node is judged first, so q_i is the law of d_i as in a line. The other children of that node are
drawn from q_i without d_i, renormalised, which is the law of a draw without replacement after d_i. A law that holds d_i
alone, as that of copied text does and any does at temperature 0, leaves nothing beside it. Whatever follows a node that
is not on the first path is not proposed.

Nodes that are not proposed have laws of zeros, which verification refuses.

Letters: B requests, N nodes, n = N - 1 of them drafted, m nodes of a level that have children, c most children of one,
V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from draftco_jax.decoding.candidates import Candidates, distinct, likeliest, without
from draftco_jax.drafts.base import Draft, GrowsTrees, Proposal, TreeCall
from draftco_jax.models.token_tree import Level, Tree
from draftco_jax.numerics.sampling import SamplingConfig


class DraftedTree(NamedTuple):
    """What is verified."""

    candidates: Candidates  # tokens i32[B, n], laws f32[B, n, V]
    proposed: jax.Array  # bool[B, n] nodes that may be accepted


def draft_tree(draft: Draft, state: Any, call: TreeCall, uniforms: Float[Array, "B n"]) -> tuple[DraftedTree, Any]:
    """The tree after the newest tokens, and the draft's state.

    Args:
        draft: of any family.
        state: its state, before the anchor.
        call: the tree, the newest tokens and where they stand, the policy's sampling.
        uniforms: one per drafted node.
    """
    if isinstance(draft, GrowsTrees):
        candidates, state = _grown(draft, state, call, uniforms)
    else:
        path = np.array(call.tree.first_path) - 1
        proposal, state = draft.propose(state, call.newest, call.anchor, uniforms[:, path], call.sampling, call.shared)
        candidates = beside_a_line(call.tree, proposal, uniforms)
    return DraftedTree(candidates, _proposed(call.tree, candidates.laws)), state


def _grown(
    draft: Draft | GrowsTrees, state: Any, call: TreeCall, uniforms: Float[Array, "B n"]
) -> tuple[Candidates, Any]:
    """Level by level: laws, children of every node, and the laws after those that have children themselves."""
    assert isinstance(draft, GrowsTrees)
    drawn = draft.draws_tokens and not call.sampling.greedy
    if not drawn:
        call = call._replace(sampling=SamplingConfig())  # a law of temperature 0 ranks nothing but the first token
    growth = draft.begin_tree(state, call)
    levels: list[Candidates] = []
    for depth, level in enumerate(call.tree.levels, start=1):
        levels.append(_children(level, growth.laws, uniforms if drawn else None))
        if level.growing:
            growth = draft.extend_tree(growth, depth, levels[-1].tokens[:, np.array(level.growing)], call)
    tokens, laws = (jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
    return Candidates(tokens, laws), growth.state


def _children(level: Level, laws: Float[Array, "B m V"], uniforms: Float[Array, "B n"] | None) -> Candidates:
    """Of all parents as many as one of them has at most, of which each takes its first ones; no uniforms: likeliest."""
    places = np.array(level.parents), np.array(level.ranks)
    count = int(places[1].max()) + 1
    if uniforms is None:
        found = likeliest(laws, count)
    else:
        node = np.ones((laws.shape[1], count), np.int32)  # where there is no child nothing is taken
        node[places] = level.nodes
        found = distinct(laws, uniforms[:, node - 1])
    return Candidates(found.tokens[:, *places], found.laws[:, *places])


def beside_a_line(tree: Tree, proposal: Proposal, uniforms: Float[Array, "B n"]) -> Candidates:
    """A proposal on the first path of a tree, and what comes without replacement after each of its tokens."""
    batch, _, vocab = proposal.laws.shape
    tokens = [jnp.zeros((batch,), jnp.int32)] * tree.drafted
    laws = [jnp.zeros((batch, vocab), proposal.laws.dtype)] * tree.drafted
    for i, node in enumerate(tree.first_path):
        q, token = proposal.laws[:, i], proposal.tokens[:, i]
        tokens[node - 1], laws[node - 1] = token, q
        others = [child - 1 for child in tree.children(tree.parents[node])[1:]]
        if not others:
            continue
        beside = distinct(without(q, token), uniforms[:, np.array(others)])
        for place, child in enumerate(others):
            tokens[child], laws[child] = beside.tokens[:, place], beside.laws[:, place]
    return Candidates(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1))


def _proposed(tree: Tree, laws: Float[Array, "B n V"]) -> Bool[Array, "B n"]:
    """Nodes all of whose path, themselves included, has a law."""
    missing = ~(jnp.sum(laws, axis=-1) > 0)  # NaN is no law
    path = jnp.asarray(tree.mask()[1:, 1:])
    return ~jnp.any(path[None] & missing[:, None, :], axis=2)
