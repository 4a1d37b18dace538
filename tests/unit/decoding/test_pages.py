"""Owners of pages, held to plain sets of rows over thousands of random operations."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.pages import free_pages, give_back, pages_of, share, take, unowned

PAGES, ROWS, WIDTH = 17, 8, 6
TAKE, SHARE, GIVE = jax.jit(take), jax.jit(share), jax.jit(give_back)


class Oracle:
    """Rows as lists of pages, of which each is new or shared with another row's beginning."""

    def __init__(self, give=GIVE) -> None:
        self.owners, self.rows, self.give = unowned(PAGES), {}, give

    def places(self, pages) -> jax.Array:
        return jnp.asarray(list(pages) + [0] * (WIDTH - len(pages)), jnp.int32)

    def start(self, row: int, shared: list[int], new: int) -> None:
        wanted = np.arange(WIDTH) < new
        self.owners = SHARE(self.owners, self.places(shared))
        taken, self.owners = TAKE(self.owners, jnp.asarray(wanted))
        taken = np.asarray(taken)
        assert (taken[~wanted] == 0).all() and (taken[wanted] > 0).all()
        used = {page for pages in self.rows.values() for page in pages}
        assert not used & set(taken[wanted].tolist()), "a page in use was taken"
        assert len(set(taken[wanted].tolist())) == new, "a page was taken twice"
        self.rows[row] = [*shared, *taken[wanted].tolist()]

    def end(self, row: int) -> None:
        self.owners = self.give(self.owners, self.places(self.rows.pop(row)))

    def check(self) -> None:
        counted = Counter(page for pages in self.rows.values() for page in pages)
        wanted = np.array([1, *(counted[page] for page in range(1, PAGES))])
        np.testing.assert_array_equal(self.owners, wanted)
        assert int(free_pages(self.owners)) == (wanted == 0).sum()


def walk(oracle: Oracle, operations: int, seed: int) -> Counter:
    rng, seen = np.random.default_rng(seed), Counter()
    for _ in range(operations):
        row = int(rng.integers(ROWS))
        if row in oracle.rows:
            oracle.end(row)
            seen["ended"] += 1
        else:
            beginnings = [pages for pages in oracle.rows.values() if pages]
            shared = []
            if beginnings and rng.random() < 0.6:
                other = beginnings[rng.integers(len(beginnings))]
                shared = other[: rng.integers(len(other)) + 1]
            new = int(rng.integers(WIDTH - len(shared) + 1))
            if new > int(free_pages(oracle.owners)):
                seen["too few"] += 1
                continue
            oracle.start(row, shared, new)
            seen["shared" if shared else "alone"] += 1
        oracle.check()
    return seen


def test_no_page_is_lost_or_used_twice_in_random_operations():
    oracle = Oracle()
    seen = walk(oracle, 3000, seed=0)
    assert min(seen[name] for name in ("ended", "too few", "shared", "alone")) > 30, seen
    for row in list(oracle.rows):
        oracle.end(row)
    np.testing.assert_array_equal(oracle.owners, unowned(PAGES))


def test_an_owner_that_gives_back_only_once_what_it_owns_twice_is_found():
    once = jax.jit(lambda owners, pages: owners.at[pages].min(jnp.where(pages > 0, 0, 1)))  # forgets other owners
    with pytest.raises(AssertionError):
        walk(Oracle(once), 3000, seed=0)


def test_too_few_pages_give_no_page_twice():
    owners = unowned(4)
    taken, owners = take(owners, jnp.ones(6, bool))
    assert sorted(np.asarray(taken).tolist()) == [0, 0, 0, 1, 2, 3]
    assert int(free_pages(owners)) == 0


def test_places_of_a_table_are_served_in_order_and_page_0_is_passed_over():
    wanted = jnp.asarray([[True, False], [False, True]])
    taken, owners = take(unowned(5), wanted)
    assert taken.tolist() == [[1, 0], [0, 2]]
    assert give_back(owners, taken).tolist() == unowned(5).tolist()
    assert share(unowned(5), jnp.zeros(3, jnp.int32)).tolist() == unowned(5).tolist()


def test_slots_are_rounded_up_to_pages():
    assert pages_of(jnp.arange(8), 3).tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
