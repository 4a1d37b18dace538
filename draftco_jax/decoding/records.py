"""What a generate call is given and what it collects, whichever way its requests go through the program.

Letters: B requests, L prompt capacity, M new-token capacity, k drafts, r = k + 1 rows of a verify block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from draftco_jax.decoding import block_verification, rejection
from draftco_jax.decoding.experts import ExpertLog, recorded, touched_per_forward
from draftco_jax.decoding.options import OptionRows
from draftco_jax.drafts.base import Context
from draftco_jax.models.token_tree import Tree
from draftco_jax.types import Rollouts

RULES = {"token": rejection.verify, "block": block_verification.verify}


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Static sizes and ids of a generate program; a change of any of them compiles anew."""

    prompt_capacity: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    record_experts: bool = False
    """Keep the experts that each token was read with."""
    verify_budget: int | None = None
    """Drafts verified in one round over the whole batch (`decoding.budget`); None: all."""
    verification: Literal["token", "block", "tree"] = "token"
    """How drafts are judged: one after another (`decoding.rejection`), or a round's together, which accepts no fewer in
    expectation (`decoding.block_verification`), or as candidates of a tree (`decoding.trees`). The output law is the
    same."""
    tree: Tree | None = None
    """The shape of a round's candidates with verification "tree", down to the draft length; None otherwise."""

    def __post_init__(self) -> None:
        """Refuse capacities that hold nothing."""
        for name in ("prompt_capacity", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; give the longest length to be served")
        if self.verify_budget is not None and self.verify_budget < 1:
            raise ValueError(f"verify_budget={self.verify_budget} must be >= 1; use None to verify all drafts")
        if (self.verification == "tree") != (self.tree is not None):
            raise ValueError(
                f"tree={self.tree} must be given with verification=tree and with no other, here {self.verification}; "
                "change one of them"
            )
        if self.tree is not None and not self.tree.by_level:
            raise ValueError(f"{self.tree} must go level by level; give all nodes of a depth before deeper ones")
        if self.tree is not None and self.verify_budget is not None:
            raise ValueError(
                f"verify_budget={self.verify_budget} must be None with verification=tree, whose shape says what is "
                "verified; give a smaller tree"
            )

    @property
    def fresh_rounds(self) -> bool:
        """Whether a round needs random numbers of its own: later positions had a say in how earlier rounds ended."""
        return self.verify_budget is not None or self.verification != "token"

    def tree_of(self, draft_length: int) -> Tree | None:
        """The tree of rounds with this draft length."""
        if self.tree is None:
            return None
        if draft_length > self.tree.depth:
            raise ValueError(
                f"draft_length={draft_length} must be <= {self.tree.depth}, the depth of {self.tree}; lower it or give "
                "a deeper tree"
            )
        return self.tree.cut(draft_length)


class Request(NamedTuple):
    """What a generate call is given."""

    prompts: jax.Array  # i32[B, L] right-padded
    prompt_lengths: jax.Array  # i32[B], 1..L
    keys: jax.Array  # key[B], one per request
    context: Context  # what a draft that matches texts reads beside the prompt; empty for others
    max_tokens: jax.Array | None = None  # i32[B] new tokens at most, 1..max_new_tokens; None: max_new_tokens for all.
    # Read where requests go through slots (`decoding.serving`)
    options: OptionRows | None = None  # sampling, stop ids, shortest lengths and stop strings of each request, in the
    # place of the engine's SamplingConfig and stop_ids; through slots only. None: the engine's for all


class Response(NamedTuple):
    """Response so far; slots at and after `count` hold nothing that is read."""

    tokens: jax.Array  # i32[B, M + r]: a whole block fits behind the last token that may be read
    logprobs: jax.Array  # f32[B, M + r]
    count: jax.Array  # i32[B]
    stopped: jax.Array  # bool[B]


class Stats(NamedTuple):
    """Counts of each request, as in `types.Rollouts`."""

    rounds: jax.Array  # i32[B]
    committed: jax.Array  # i32[B]
    proposed: jax.Array  # i32[B]
    accepted: jax.Array  # i32[B, k]


class Verified(NamedTuple):
    """What a round of k drafts, or of a tree of depth k, gives: rows of the path that is kept, r = k + 1 at most."""

    tokens: jax.Array  # i32[B, r] accepted drafts, then one more; entries after it are not read
    logprobs: jax.Array  # f32[B, r]
    accepted: jax.Array  # i32[B] 0..k
    proposed: jax.Array  # i32[B] drafts that were verified
    block: jax.Array  # i32[B, r] tokens that were read, the newest first: those before `tokens`
    taps: jax.Array  # [B, r, A] at them
    hidden: jax.Array  # [B, r, D]


def committed_tokens(
    drafts: Int[Array, "B k"], accepted: Int[Array, " B"], final: Int[Array, " B"]
) -> Int[Array, "B k+1"]:
    """The accepted drafts, then the residual or bonus token; entries after it are not read."""
    padded = jnp.concatenate([drafts, jnp.zeros_like(final)[:, None]], axis=1)
    slots = jnp.arange(padded.shape[1])[None, :]
    return jnp.where(slots == accepted[:, None], final[:, None], padded)


def assemble(
    request: Request,
    out: Response,
    stats: Stats,
    log: ExpertLog | None,
    shape: EngineShape,
    end_reasons: Int[Array, " B"] | None = None,
) -> Rollouts:
    """Lay prompt and response into one padded row."""
    width = shape.prompt_capacity + shape.max_new_tokens
    slots = jnp.arange(width)[None, :]
    offset = slots - request.prompt_lengths[:, None]
    in_prompt = offset < 0
    in_response = (offset >= 0) & (offset < out.count[:, None])
    prompt = jnp.pad(request.prompts, ((0, 0), (0, shape.max_new_tokens)))
    index = jnp.clip(offset, 0, shape.max_new_tokens - 1)
    response = jnp.take_along_axis(out.tokens, index, axis=1)
    tokens = jnp.where(in_prompt, prompt, jnp.where(in_response, response, shape.pad_id))
    logprobs = jnp.where(in_response, jnp.take_along_axis(out.logprobs, index, axis=1), 0.0)
    lengths = request.prompt_lengths + out.count
    return Rollouts(
        tokens=tokens,
        prompt_lengths=request.prompt_lengths,
        lengths=lengths,
        logprobs=logprobs,
        finished=out.stopped,
        rounds=stats.rounds,
        committed=stats.committed,
        accepted=stats.accepted,
        proposed=stats.proposed,
        experts=recorded(log, lengths, width),
        experts_touched=touched_per_forward(log, lengths.shape[0]),
        end_reasons=end_reasons,
    )


def is_stop(tokens: Int[Array, "*b"], shape: EngineShape) -> Bool[Array, "*b"]:
    """Which tokens end a response."""
    hit = jnp.zeros(tokens.shape, bool)
    for stop in shape.stop_ids:
        hit |= tokens == stop
    return hit
