"""Who owns the pages of a pool: a count of owners for each page, and nothing else.

A page without owners is free. There is no list of free pages that could say anything else: it is made from the counts
whenever pages are taken, which costs one pass over the pool and happens when a request starts. Rows with the same
beginning own its pages together; a page is free again when the last of them gives it back.

Page 0 (`models.paged_cache.NOBODY`) is never free and never owned: it stands where a row has no page, and all functions
here pass over it.

Letters: Q pages in the pool, *b any places of tables.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from draftco_jax.models.paged_cache import NOBODY


def unowned(pages: int) -> Int32[Array, " Q"]:
    """Counts of a pool of which all pages but page 0 are free."""
    return jnp.zeros((pages,), jnp.int32).at[NOBODY].set(1)


def free_pages(owners: Int32[Array, " Q"]) -> Int32[Array, ""]:
    """How many pages are free."""
    return jnp.sum(owners == 0, dtype=jnp.int32)


def take(owners: Int32[Array, " Q"], wanted: Bool[Array, "*b"]) -> tuple[Int32[Array, "*b"], Int32[Array, " Q"]]:
    """A free page for each place where one is wanted, those with small numbers first, and 0 elsewhere.

    The caller sees to it that there are enough (`free_pages`); were there too few, the last places would get 0.
    """
    names = jnp.nonzero(owners == 0, size=owners.shape[0], fill_value=NOBODY)[0].astype(jnp.int32)
    place = jnp.cumsum(wanted.reshape(-1).astype(jnp.int32)).reshape(wanted.shape) - 1
    taken = jnp.where(wanted & (place < owners.shape[0]), names[jnp.minimum(place, owners.shape[0] - 1)], NOBODY)
    return taken, share(owners, taken)


def share(owners: Int32[Array, " Q"], pages: Int32[Array, "*b"]) -> Int32[Array, " Q"]:
    """One owner more for each page as often as it is named."""
    return owners.at[pages].add((pages != NOBODY).astype(jnp.int32))


def give_back(owners: Int32[Array, " Q"], pages: Int32[Array, "*b"]) -> Int32[Array, " Q"]:
    """One owner fewer for each page as often as it is named; the caller owns what it gives back."""
    return owners.at[pages].add(-(pages != NOBODY).astype(jnp.int32))


def pages_of(slots: Int[Array, "*b"], page: int) -> Int[Array, "*b"]:
    """How many pages hold so many slots."""
    return (slots + page - 1) // page
