"""Shape of a token tree: which drafted token follows which, fixed before any of them is drawn.

Node 0 is the newest committed token. The children of a node are candidates for the token after it, in the order of
their numbers. A policy reads all nodes in one forward, node i at the position of the root plus its depth, where it sees
all that is before the block, its ancestors and itself.

    (-1, 0, 1, 2)          a line of three
    (-1, 0, 0, 1, 1, 2)    two first tokens, two after the first of them, one after the second

Letters: N nodes, D depth of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np


class Level(NamedTuple):
    """The nodes of one depth, of a tree that is numbered level by level."""

    nodes: tuple[int, ...]  # their numbers, one after the other
    parents: tuple[int, ...]  # of each, the place of its parent among those of the depth before that have children
    ranks: tuple[int, ...]  # of each, how many children its parent has before it
    growing: tuple[int, ...]  # places among `nodes` of those that have children

    @property
    def growing_parents(self) -> np.ndarray:
        """The `parents` of those that have children."""
        return np.array(self.parents)[list(self.growing)]


@dataclass(frozen=True)
class Tree:
    """`parents[i] < i` is the node before node i; node 0, the root, has -1."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what is no tree in this order."""
        if self.parents[:1] != (-1,) or len(self.parents) < 2:
            raise ValueError(
                f"parents={self.parents} must be -1, the root, then one number per drafted node, at least one"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents[{node}]={parent} must be in 0..{node - 1}; number each node after the one it follows"
                )

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, the drafted nodes from the root to it, itself included; none for the root."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many drafted tokens a path holds; a node's position is that of the root plus this."""
        return tuple(map(len, self.paths))

    @property
    def depth(self) -> int:
        """Of the longest path, D."""
        return max(self.depths)

    @property
    def drafted(self) -> int:
        """Nodes but the root, N - 1."""
        return len(self.parents) - 1

    def children(self, node: int) -> tuple[int, ...]:
        """In the order in which they are judged."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    def mask(self) -> np.ndarray:
        """bool[N, N], entry [i, j]: node i reads node j of the block, which is an ancestor of i or i itself."""
        reads = np.zeros((len(self.parents),) * 2, bool)
        reads[:, 0] = True
        for node, path in enumerate(self.paths):
            reads[node, list(path)] = True
        return reads

    @property
    def by_level(self) -> bool:
        """Whether no node comes before one that is nearer to the root."""
        return list(self.depths) == sorted(self.depths)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Depths 1 .. D.

        Raises:
            ValueError: nodes are not numbered level by level.
        """
        if not self.by_level:
            raise ValueError(
                f"parents={self.parents} must go level by level; give all nodes of a depth before deeper ones"
            )
        found, before = [], (0,)
        for depth in range(1, self.depth + 1):
            nodes = tuple(node for node, its in enumerate(self.depths) if its == depth)
            parents = tuple(before.index(self.parents[node]) for node in nodes)
            ranks = tuple(self.children(self.parents[node]).index(node) for node in nodes)
            growing = tuple(place for place, node in enumerate(nodes) if self.children(node))
            found.append(Level(nodes, parents, ranks, growing))
            before = tuple(nodes[place] for place in growing)
        return tuple(found)

    @cached_property
    def inner(self) -> Tree | None:
        """The root and the nodes that have children, numbered anew: what a draft reads. None where that is the root."""
        kept = [node for node in range(len(self.parents)) if node == 0 or self.children(node)]
        if len(kept) == 1:
            return None
        return Tree((-1, *(kept.index(self.parents[node]) for node in kept[1:])))

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """The root's first child, the first child of that, and so on."""
        path, children = [], self.children(0)
        while children:
            path.append(children[0])
            children = self.children(children[0])
        return tuple(path)

    def cut(self, depth: int) -> Tree:
        """Without the nodes below a depth, 1 <= depth <= D."""
        kept = [node for node, its in enumerate(self.depths) if its <= depth]
        return Tree((-1, *(kept.index(self.parents[node]) for node in kept[1:])))


def balanced(*widths: int) -> Tree:
    """`widths[d]` children after every node of depth d: (3, 2) is 3 first tokens with 2 after each, 9 drafted nodes."""
    _check_widths(widths)
    parents, level = [-1], [0]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return Tree(tuple(parents))


def caterpillar(*widths: int) -> Tree:
    """`widths[d]` candidates at depth d + 1, of which only the first goes on: a line with alternatives beside it."""
    _check_widths(widths)
    parents, first = [-1], 0
    for width in widths:
        start = len(parents)
        parents += [first] * width
        first = start
    return Tree(tuple(parents))


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """A shape by name, as configs hold it."""

    widths: tuple[int, ...]
    """Candidates at each depth: after every node before (balanced), or after the first node before (caterpillar)."""
    shape: Literal["balanced", "caterpillar"] = "balanced"

    def __post_init__(self) -> None:
        """Refuse widths of no tree."""
        _check_widths(self.widths)

    def build(self) -> Tree:
        """The tree."""
        return {"balanced": balanced, "caterpillar": caterpillar}[self.shape](*self.widths)


def _check_widths(widths: tuple[int, ...]) -> None:
    if not widths or min(widths) < 1:
        raise ValueError(f"widths={widths} must be numbers of children >= 1, at least one; (2, 2, 1) is a small tree")
