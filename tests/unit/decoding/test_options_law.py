"""The law of texts under options of each request, by thousands of requests against the masked law of every text."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.stats import chisquare

from draftco_jax.decoding.options import RequestOptions, prepare_options
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.numerics.sampling import SamplingConfig

pytestmark = pytest.mark.slow
STOP, MOST, K = 3, 4, 3
# Requests take turns: by prompt, and with it by what they ask.
ASKED = (
    RequestOptions(sampling=SamplingConfig(), stop_ids=(STOP,), min_tokens=2, max_tokens=MOST),
    RequestOptions(sampling=SamplingConfig(temperature=0.7, top_k=3), stop_ids=(STOP, 0), min_tokens=1, max_tokens=3),
)
PROMPTS = ((1,), (2, 1, 0))


def law_of_texts(toy, prompt: tuple[int, ...], asked: RequestOptions) -> dict[tuple[int, ...], float]:
    """Probability of every text, token by token: early stop ids taken out, then temperature, then top-k."""
    law: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(toy.vocab), repeat=asked.max_tokens):
        padded = np.zeros((1, 3 + MOST), np.int32)
        padded[0, : len(prompt) + len(text)] = prompt + text
        logits = toy.logits("deep", padded)[0].astype(np.float64)
        chance, written = 1.0, 0
        for token in text:
            row = logits[len(prompt) + written - 1] / asked.sampling.temperature
            if written < asked.min_tokens:
                row[list(asked.stop_ids)] = -np.inf
            if asked.sampling.top_k:
                row[np.argsort(-row, kind="stable")[asked.sampling.top_k :]] = -np.inf
            weights = np.exp(row - row.max())
            chance, written = chance * weights[token] / weights.sum(), written + 1
            if token in asked.stop_ids:
                break
        law[text[:written]] = chance
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


@pytest.mark.parametrize("draft, verification", [("good", "token"), ("wrong", "token"), ("good", "block")])
def test_texts_follow_the_law_of_their_own_settings_with_early_stops_taken_out(
    small_toy, law_shape, law_batch, responses, draft, verification
):
    """At 1e-3; a stop id allowed a token too early, or a neighbour's settings, are off by far more."""
    count = law_batch.prompts.shape[0]
    ready = prepare_options(ASKED * (count // 2), small_toy.vocab)
    request = law_batch._replace(options=ready.rows, max_tokens=ready.max_tokens)
    engine = small_toy.engine(replace(law_shape, verification=verification), SamplingConfig())
    slots = SlotShape(slots=512, draft_lengths=(K,), page=4, chunk=4, walk=8, staging_rows=16, filters=ready.filters)
    found = jax.tree.map(np.asarray, engine.generate(*small_toy.published("deep", draft), request, K, slots))
    texts = [tuple(text) for text in responses(found)]
    for start, (prompt, asked) in enumerate(zip(PROMPTS, ASKED, strict=True)):
        law, seen = law_of_texts(small_toy, prompt, asked), Counter(texts[start::2])
        assert all(law.get(text, 0.0) > 0 for text in seen), "a text of probability 0 was emitted"
        often = [text for text, p in law.items() if p * count / 2 >= 5]
        rest = 1 - sum(law[text] for text in often)
        observed = [seen[text] for text in often] + [count // 2 - sum(seen[text] for text in often)]
        expected = [law[text] * count / 2 for text in often] + [rest * count / 2]
        kept = slice(None) if expected[-1] > 1 else slice(-1)
        observed, expected = np.asarray(observed[kept], float), np.asarray(expected[kept])
        assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3
    assert np.all(found.accepted.sum(axis=0) > 0), (
        "drafts of some place are never accepted, so nothing is shown of them"
    )
