r"""Token trees (SpecInfer, arXiv 2305.09781; EAGLE-2, arXiv 2406.16858): candidates with candidates after them.

Node 0 is the newest committed token. The children of a node are candidates for the token after it, in the order of
their numbers. The target reads all nodes in one forward, each node what is before the block, its ancestors and itself
(`Tree.mask`), and says a law p at each, of the token after the path to that node. The walk starts at node 0, r = p_0;

    at node v try its children one after another by the rule of `decoding.candidates`, from r = p_v
    a child c is accepted: go on at c, r = p_c
    all are refused, or there are none: emit one token from what is left of r

and the tokens of the path with the emitted one follow p exactly. A chain is the token rule, a star the rule of several
candidates. With one-hot laws (temperature 0) the walk keeps the longest path of argmax tokens.

The shape is fixed before a token is drawn: a shape that looked at the drawn tokens would make other laws of them than
those recorded. Laws of `likeliest` children are one-hot, nothing is drawn, and for them that is no bar.

Letters: B requests, N nodes, n = N - 1 of them drafted, D depth of the tree, e = D + 1 tokens that a walk may emit,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from draftco_jax.decoding.candidates import Candidates, judge
from draftco_jax.models.token_tree import Tree
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import draw


class Walk(NamedTuple):
    """What a verified tree commits: the first `accepted` tokens of its path, then `final`."""

    accepted: Int[Array, " B"]  # 0..D
    path: Int[Array, "B D"]  # nodes in order; entries from `accepted` on repeat the last node
    final: Int[Array, " B"]


def grow(
    tree: Tree,
    law_after: Callable[[int, Int[Array, "B d"]], Float[Array, "B V"]],
    candidates: Callable[[Float[Array, "B V"], Float[Array, "B c"]], Candidates],
    uniforms: Float[Array, "B n"],
) -> Candidates:
    """Fill the drafted nodes; tokens i32[B, n] and laws [B, n, V], entry i of node i + 1.

    Args:
        tree: the shape.
        law_after: the draft's law of the token after a node, given the node and the drafted tokens of its path.
        candidates: how a node's children are drawn: `independent`, `distinct`, or `likeliest` without the uniforms.
        uniforms: one per drafted node, independent of those that judge.
    """
    tokens: dict[int, Array] = {}
    laws: dict[int, Array] = {}
    for node, path in enumerate(tree.paths):
        if not (children := tree.children(node)):
            continue
        before = [tokens[i] for i in path]
        prefix = jnp.stack(before, axis=1) if before else jnp.zeros((uniforms.shape[0], 0), jnp.int32)
        drawn = candidates(law_after(node, prefix), uniforms[:, np.array(children) - 1])
        for place, child in enumerate(children):
            tokens[child], laws[child] = drawn.tokens[:, place], drawn.laws[:, place]
    nodes = range(1, len(tree.parents))
    return Candidates(jnp.stack([tokens[i] for i in nodes], axis=1), jnp.stack([laws[i] for i in nodes], axis=1))


def verify(
    tree: Tree,
    p: Float[Array, "B N V"],
    candidates: Candidates,
    accept_uniforms: Float[Array, "B n"],
    commit_uniforms: Float[Array, "B e"],
) -> Walk:
    """Walk the tree: one step per drafted node, in the order of their numbers, whatever is accepted.

    A parent comes before its children, so that when their turn comes it is known whether the walk stands there.

    Args:
        tree: the shape.
        p: the target's laws at the nodes, float32.
        candidates: of the drafted nodes, each with the law it was drawn from given its parent's children before it.
        accept_uniforms: one per drafted node, in [0, 1).
        commit_uniforms: entry `accepted` draws the final token, as in `rejection.verify`.

    Raises:
        ValueError: the arrays have another number of nodes than the tree.
    """
    nodes = len(tree.parents)
    if p.shape[1] != nodes or candidates.tokens.shape[1] != nodes - 1:
        raise ValueError(
            f"laws of {p.shape[1]} nodes and {candidates.tokens.shape[1]} drafted tokens do not fit a tree of {nodes} "
            "nodes; give a law for each and a token for each but the root"
        )
    parents = jnp.asarray(tree.parents, jnp.int32)

    def step(state: tuple[Array, Array], node: Array) -> tuple[tuple[Array, Array], None]:
        current, law = state
        tried = current == parents[node]
        at = partial(jax.lax.dynamic_index_in_dim, axis=1, keepdims=False)
        tokens, laws, uniforms = (at(x, node - 1) for x in (*candidates, accept_uniforms))
        passed, left = judge(law, laws, tokens, uniforms)
        law = jnp.where(tried[:, None], jnp.where(passed[:, None], at(p, node), left), law)
        return (jnp.where(tried & passed, node, current), law), None

    start = jnp.zeros((p.shape[0],), jnp.int32), p[:, 0]
    (last, law), _ = jax.lax.scan(step, start, jnp.arange(1, nodes, dtype=jnp.int32))
    accepted = jnp.asarray(tree.depths, jnp.int32)[last]
    padded = np.array([(*path, *[node] * (tree.depth - len(path))) for node, path in enumerate(tree.paths)], np.int32)
    return Walk(accepted, jnp.asarray(padded)[last], draw(law, pick(commit_uniforms, accepted)))


def committed(tokens: Int[Array, "B n"], walk: Walk) -> Int[Array, "B e"]:
    """The tokens of the path and the final one; entries after it are not read."""
    # Entries that repeat the root hold no drafted token; they lie at or after the final one.
    along = jnp.take_along_axis(tokens, jnp.maximum(walk.path - 1, 0), axis=1)
    along = jnp.pad(along, ((0, 0), (0, 1)))
    slots = jnp.arange(along.shape[1])[None, :]
    return jnp.where(slots == walk.accepted[:, None], walk.final[:, None], along)
