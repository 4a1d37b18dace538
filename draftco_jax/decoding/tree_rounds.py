r"""One round of the static engine with a token tree: draft the nodes, verify them in one forward, keep a path.

    draft      tokens and laws of n nodes (`tree_drafts`)
    verify     one forward of the policy over the N nodes, each of which sees what is before the block, its ancestors
               and itself; the walk of `trees` says the accepted path and the token after it
    compact    keys and values of the path are moved to the slots of their positions; those of other nodes lie after
               them, and are overwritten before they are seen
    features   the policy's features along the path are what the draft absorbs, as those of a line

Random numbers belong to nodes, of which a position has several: rounds have numbers of their own, so that what is
drafted again meets none that has decided anything (`budget.round_uniforms`).

Letters: B requests, N nodes, n = N - 1 of them drafted, D depth of the tree, e = D + 1 tokens that a round may commit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from draftco_jax.decoding.budget import round_uniforms
from draftco_jax.decoding.experts import ExpertLog, log_step
from draftco_jax.decoding.records import Verified
from draftco_jax.decoding.tree_drafts import draft_tree
from draftco_jax.decoding.trees import committed, verify
from draftco_jax.drafts.base import Draft, TreeCall, borrowed, given_back
from draftco_jax.models.kv_cache import Cache, compacted
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import ACCEPT, COMMIT, PROPOSE, log_law


def play_tree(
    models: tuple[Decoder, Draft],
    call: TreeCall,
    live: Bool[Array, " B"],
    caches: tuple[Any, Cache, ExpertLog | None],
    keys: tuple[Key[Array, " B"], Int[Array, " B"]],
) -> tuple[Verified, tuple[Any, Cache, ExpertLog | None]]:
    """What the round gives, and the draft's state, the cache and the log after it.

    Args:
        models: policy and draft.
        call: the tree, the newest tokens and where they stand, the policy's sampling.
        live: requests that still decode.
        caches: the draft's state, the policy's cache, the log of experts.
        keys: of the requests, and how many rounds each has had.
    """
    (policy, draft), (state, cache, log), tree = models, caches, call.tree
    n, e = tree.drafted, tree.depth + 1
    numbers = round_uniforms(*keys, n + 1)
    state = borrowed(draft, state, cache, live)
    (candidates, proposed), state = draft_tree(draft, state, call, numbers[:, :n, PROPOSE])
    state, cache = given_back(draft, state, cache)
    block = jnp.concatenate([call.newest[:, None], candidates.tokens], axis=1)
    active = live[:, None] & jnp.pad(proposed, ((0, 0), (1, 0)), constant_values=True)
    hidden, taps, cache, ids = policy.step(
        block, call.anchor, cache, tap_layers=draft.cfg.tap_layers, active=active, tree=tree
    )
    laws = log_law(policy.logits(hidden), call.sampling)
    walk = verify(tree, jnp.exp(laws), candidates, numbers[:, :n, ACCEPT], numbers[:, :e, COMMIT])
    rows = jnp.pad(walk.path, ((0, 0), (1, 0)))  # nodes whose laws the committed tokens come from, the root first
    along = lambda values: jnp.take_along_axis(values, rows[:, :, None], axis=1)  # noqa: E731
    log = log_step(log, ids, call.anchor, active, policy.cfg.mixture, rows)
    tokens = committed(candidates.tokens, walk)
    verified = Verified(
        tokens=tokens,
        logprobs=pick(along(laws), tokens),
        accepted=walk.accepted,
        proposed=jnp.sum(proposed, axis=1, dtype=jnp.int32),
        block=jnp.take_along_axis(block, rows, axis=1),
        taps=along(taps),
        hidden=along(hidden),
    )
    return verified, (state, compacted(cache, call.anchor, walk.path), log)
