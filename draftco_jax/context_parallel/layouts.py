"""How the tokens of a sequence are spread over the ranks of the context axis.

Zigzag: the sequence is cut into `periods` stretches of 2 C equal chunks; rank r holds chunks r and 2C-1-r of each, in
increasing order. With one period every rank has the same number of causal query-key pairs of one long document. With
more periods the same holds for documents as short as a period, at the price of smaller chunks. Documents may start and
end anywhere: only the length of the whole row is padded, once, to a multiple of 2 C periods.

Contiguous: rank r holds one stretch. The last rank then has 2 - 1/C times the mean work. For comparison only.

Letters: C ranks, N tokens of a row, L = N / C tokens of a rank, w tokens of a chunk, m periods, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped


@dataclass(frozen=True, kw_only=True)
class Zigzag:
    """The layout that is trained with."""

    ranks: int
    tokens: int
    """Of a row, all ranks together."""
    periods: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.periods < 1:
            raise ValueError(f"ranks={self.ranks}, periods={self.periods} must be >= 1; use 1 for no split")
        parts = 2 * self.ranks * self.periods
        if self.tokens < parts or self.tokens % parts:
            raise ValueError(
                f"tokens={self.tokens} must be a positive multiple of {parts} (2 * ranks={self.ranks} * periods="
                f"{self.periods}); pad rows to {padded_tokens(self.tokens, self.ranks, self.periods)}"
            )

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, w."""
        return self.tokens // (2 * self.ranks * self.periods)

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank, L."""
        return self.tokens // self.ranks

    def index(self, rank: Array | int) -> Int32[Array, " L"]:
        """Place in the whole sequence of each token of a rank, increasing. `rank` may be traced."""
        rank = jnp.asarray(rank, jnp.int32)
        slots = jnp.stack([rank, 2 * self.ranks - 1 - rank])
        chunks = 2 * self.ranks * jnp.arange(self.periods, dtype=jnp.int32)[:, None] + slots[None, :]
        inside = jnp.arange(self.chunk, dtype=jnp.int32)
        return (self.chunk * chunks[:, :, None] + inside[None, None, :]).reshape(-1)

    def owner(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Rank that holds each place of the sequence."""
        slot = index // self.chunk % (2 * self.ranks)
        return jnp.where(slot < self.ranks, slot, 2 * self.ranks - 1 - slot)

    def local(self, index: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Where among its rank's tokens each place of the sequence is."""
        chunk = index // self.chunk
        period, slot = chunk // (2 * self.ranks), chunk % (2 * self.ranks)
        late = (slot >= self.ranks).astype(index.dtype)
        return (2 * period + late) * self.chunk + index % self.chunk

    def order(self) -> Int32[np.ndarray, " N"]:
        """x[order] is what the ranks hold, one after the other."""
        c = self.ranks
        natural = np.arange(self.tokens, dtype=np.int32).reshape(self.periods, 2 * c, self.chunk)
        return np.concatenate([natural[:, [r, 2 * c - 1 - r]].reshape(-1) for r in range(c)])

    def inverse(self) -> Int32[np.ndarray, " N"]:
        """y[inverse] is the sequence again."""
        return np.argsort(self.order()).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Contiguous:
    """One stretch a rank: what a sequential ring uses."""

    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.tokens < self.ranks or self.tokens % self.ranks:
            raise ValueError(
                f"tokens={self.tokens} must be a positive multiple of ranks={self.ranks}; "
                f"pad rows to {-(-self.tokens // max(self.ranks, 1)) * max(self.ranks, 1)}"
            )

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank, L."""
        return self.tokens // self.ranks

    def index(self, rank: Array | int) -> Int32[Array, " L"]:
        """Place in the whole sequence of each token of a rank, increasing. `rank` may be traced."""
        start = jnp.asarray(rank, jnp.int32) * self.local_tokens
        return start + jnp.arange(self.local_tokens, dtype=jnp.int32)

    def order(self) -> Int32[np.ndarray, " N"]:
        """x[order] is what the ranks hold, one after the other."""
        return np.arange(self.tokens, dtype=np.int32)


Layout = Zigzag | Contiguous


def padded_tokens(tokens: int, ranks: int, periods: int = 1) -> int:
    """Smallest row length >= tokens that a zigzag can split."""
    parts = 2 * ranks * periods
    return max(-(-tokens // parts), 1) * parts


def pad_row(x: Shaped[Array, "R T *rest"], tokens: int, fill: float | int | bool = 0) -> Shaped[Array, "R N *rest"]:
    """Rows of `tokens` tokens; what is added at the end holds `fill` (segment id 0: padding)."""
    if x.shape[1] > tokens:
        raise ValueError(f"tokens={tokens} must be >= {x.shape[1]}, the length of the rows; raise it")
    widths = [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)


def to_zigzag(x: Shaped[Array, "R N *rest"], layout: Zigzag) -> Shaped[Array, "R N *rest"]:
    """Whole rows in the order of the ranks: to be sharded over the context axis along axis 1."""
    return _reorder(x, layout, layout.order())


def from_zigzag(x: Shaped[Array, "R N *rest"], layout: Zigzag) -> Shaped[Array, "R N *rest"]:
    """The inverse of `to_zigzag`, exactly."""
    return _reorder(x, layout, layout.inverse())


def _reorder(x: Array, layout: Zigzag, order: Int32[np.ndarray, " N"]) -> Array:
    if x.shape[1] != layout.tokens:
        raise ValueError(f"x={x.shape} must have {layout.tokens} tokens along axis 1; pad it with pad_row")
    return jnp.take(x, order, axis=1, unique_indices=True, mode="clip")
