"""Laws with a setting per row, bit for bit those of a program made for that setting."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.numerics.request_sampling import (
    ALL_FILTERS,
    NO_FILTERS,
    FiltersInUse,
    filters_in_use,
    law_each,
    log_law_each,
    of,
)
from draftco_jax.numerics.sampling import SamplingConfig, law, log_law

MIXED = [
    SamplingConfig(),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.7),
    SamplingConfig(top_k=3),
    SamplingConfig(temperature=0.3, top_p=0.8),
    SamplingConfig(temperature=1.7, min_p=0.1),
    SamplingConfig(temperature=1.3, top_k=7, top_p=0.6, min_p=0.05),
    SamplingConfig(temperature=0.0, top_k=2),
    SamplingConfig(top_k=10**12, top_p=1e-6),
]
EACH = {"log_law": (log_law_each, log_law), "law": (law_each, law)}
V = 37


@pytest.fixture(scope="module")
def programs():
    return {
        name: (jax.jit(each, static_argnums=2), jax.jit(alone, static_argnums=1))
        for name, (each, alone) in EACH.items()
    }


def logits(rows: int, *inner: int) -> jax.Array:
    """Some rows with many ties, some with tails that a sum to 1 in float32 does not reach."""
    rng = np.random.default_rng(rows)
    values = rng.normal(0, 4, (rows, *inner, V))
    values[::2] = np.round(values[::2] / 4) * np.log(2.0)
    values[1::3, ..., 5:] -= 60.0
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("config", MIXED, ids=range(len(MIXED)))
def test_equal_requests_have_the_law_of_one_setting(programs, name, config):
    each, alone = programs[name]
    x = logits(4, 2)
    found = np.asarray(each(x, of([config] * 4), filters_in_use([config])))
    np.testing.assert_array_equal(found, alone(x, config))
    assert found.dtype == np.float32


@pytest.mark.parametrize("name", EACH)
def test_a_row_knows_nothing_of_its_company_or_its_place(programs, name):
    each, _ = programs[name]
    x = logits(len(MIXED), 3)
    found = np.asarray(each(x, of(MIXED), ALL_FILTERS))
    for row, config in enumerate(MIXED):
        np.testing.assert_array_equal(found[row], each(x, of([config] * len(MIXED)), ALL_FILTERS)[row])
    order = np.random.default_rng(0).permutation(len(MIXED))
    np.testing.assert_array_equal(each(x[order], of([MIXED[i] for i in order]), ALL_FILTERS), found[order])


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("inner", [(), (3,)], ids=["one row each", "a verify block each"])
def test_a_program_for_all_settings_gives_the_laws_of_programs_for_one(programs, name, inner):
    each, alone = programs[name]
    x = logits(len(MIXED), *inner)
    found, outside = np.asarray(each(x, of(MIXED), filters_in_use(MIXED))), {"law": 0.0, "log_law": -np.inf}[name]
    for row, config in enumerate(MIXED):
        one = np.asarray(alone(x, config))[row]
        np.testing.assert_array_equal(found[row] > outside, one > outside, err_msg=str(config))
        np.testing.assert_allclose(found[row], one, rtol=1e-6, atol=1e-7, err_msg=str(config))


def test_rows_that_ask_for_everything_lose_no_token_to_the_filters_of_others(programs):
    # In float32 the first tokens of these rows already sum to 1: a nucleus of mass 1 compared with the sum would end.
    each, _ = programs["law"]
    x = jnp.broadcast_to(jnp.asarray([30.0, 29.0] + [0.0] * (V - 2), jnp.float32), (2, V))
    found = np.asarray(each(x, of([SamplingConfig(), SamplingConfig(top_p=0.9)]), ALL_FILTERS))
    assert (found[0] > 0).all() and (found[1] > 0).sum() == 2


def test_nothing_is_sorted_where_nobody_ranks_tokens():
    def sorts(configs) -> int:
        program = partial(log_law_each, filters=filters_in_use(configs))
        return str(jax.make_jaxpr(program)(logits(len(configs)), of(configs))).count(" sort[")

    assert sorts(MIXED) == 1
    assert sorts([SamplingConfig(), SamplingConfig(temperature=0.0, top_k=3), SamplingConfig(min_p=0.3)]) == 0
    assert filters_in_use([SamplingConfig(temperature=0.0, top_p=0.5)]) == NO_FILTERS
    assert filters_in_use([SamplingConfig(), SamplingConfig(top_p=0.5)]) == FiltersInUse(False, True, False)


def test_bug_case_b24_laws_are_float32_whatever_comes_in(programs):
    x = jnp.asarray([[2.0, 1.5, 1.0, 0.5]] * 2, jnp.bfloat16)
    for name, (each, alone) in programs.items():
        found = each(x, of([SamplingConfig()] * 2), NO_FILTERS)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, alone(x, SamplingConfig()), err_msg=name)


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match=r"configs=\[\] must name the sampling of at least one request"):
        of([])
