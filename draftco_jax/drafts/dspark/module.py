"""DSpark (arXiv 2607.05147): a block whose drafts are drawn one after another, each biased by the one before it.

    z_i = U_i + W2 g_i          U_i the policy's head on the state h_i of draft i, g_i [r] from the token before it:
    vanilla   g_i = W1[x_{a+i}]
    gated     g_i = sigmoid(gate_proj [h_i ; W1[x_{a+i}]]) * W1[x_{a+i}]
    rnn       [u, c, o] = joint_proj [s ; W1[x_{a+i}] ; h_i];  g_i = tanh(o);
              s = sigmoid(u) s + (1 - sigmoid(u)) tanh(c)

The body runs once; only these small products are serial. Source: deepseek-ai/DeepSpec, modeling/dspark/markov_head.py.

Letters: B requests, D width, r rank of the bias, V vocabulary, k drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.drafts.base import DraftSampling, Growth, Proposal, Shared, TreeCall
from draftco_jax.drafts.blocks.body import BlockDraft, BlockState, head_logits
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.models.layers import Linear, parameter
from draftco_jax.numerics.sampling import draw


class Embedding(nnx.Module):
    """Rows of a table [V, r]."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], *, rngs: nnx.Rngs) -> None:
        self.weight = parameter(rngs, shape, axes, nnx.initializers.normal(0.02))

    def __call__(self, ids: Int[Array, "*b"]) -> Float[Array, "*b r"]:
        """Look up ids, all of which lie in the table."""
        return self.weight[...].at[ids].get(mode="promise_in_bounds")


class BiasedLinear(nnx.Module):
    """y = x @ kernel + bias, kernel [in, out]."""

    def __init__(self, shape: tuple[int, int], axes: tuple[str, str], *, rngs: nnx.Rngs) -> None:
        self.kernel = parameter(rngs, shape, axes, nnx.initializers.normal(0.02))
        self.bias = parameter(rngs, shape[1:], axes[1:], nnx.initializers.zeros)

    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        """Project the last dim in the dtype of x."""
        bias = jnp.expand_dims(self.bias[...].astype(x.dtype), range(x.ndim - 1))
        return x @ self.kernel[...].astype(x.dtype) + bias


class MarkovHead(nnx.Module):
    """What the token before a draft says about it, as r numbers that W2 takes to logits."""

    def __init__(self, cfg: DSparkConfig, *, rngs: nnx.Rngs) -> None:
        width, rank = cfg.hidden_size, cfg.markov_rank
        self.kind, self.rank = cfg.markov_head_type, rank
        self.markov_w1 = Embedding((cfg.vocab_size, rank), ("vocab", "markov"), rngs=rngs)
        self.markov_w2 = Linear((rank, cfg.vocab_size), ("markov", "vocab"), rngs=rngs)
        if self.kind == "gated":
            self.gate_proj = BiasedLinear((width + rank, rank), ("markov_in", "markov"), rngs=rngs)
        elif self.kind == "rnn":
            self.joint_proj = BiasedLinear((2 * rank + width, 3 * rank), ("markov_in", "markov"), rngs=rngs)

    def start(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b r"]:
        """Memory before the first draft; only the rnn has any use for it."""
        return jnp.zeros((*hidden.shape[:-1], self.rank), hidden.dtype)

    def step(
        self, memory: Float[Array, "*b r"], hidden: Float[Array, "*b D"], previous: Int[Array, "*b"]
    ) -> tuple[Float[Array, "*b r"], Float[Array, "*b r"]]:
        """g of one draft, and the memory after it."""
        token = self.markov_w1(previous).astype(hidden.dtype)
        if self.kind == "vanilla":
            return token, memory
        if self.kind == "gated":
            return jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, token], axis=-1))) * token, memory
        joint = self.joint_proj(jnp.concatenate([memory, token, hidden], axis=-1))
        update, candidate, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(update)
        return jnp.tanh(out), keep * memory + (1 - keep) * jnp.tanh(candidate)

    def sequence(self, hidden: Float[Array, "*b d D"], previous: Int[Array, "*b d"]) -> Float[Array, "*b d r"]:
        """g of all drafts of a block when the tokens before them are known."""
        if self.kind != "rnn":
            return self.step(self.start(hidden), hidden, previous)[0]
        memory, found = self.start(hidden[..., 0, :]), []
        for i in range(hidden.shape[-2]):
            g, memory = self.step(memory, hidden[..., i, :], previous[..., i])
            found.append(g)
        return jnp.stack(found, axis=-2)


class ConfidenceHead(nnx.Module):
    """Logit of the probability that a draft is accepted. float32 throughout: bfloat16 lets its loss run away."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.proj = BiasedLinear((width, 1), ("embed", "one"), rngs=rngs)

    def __call__(self, features: Float[Array, "*b F"]) -> Float32[Array, "*b"]:
        """w x + b."""
        kernel, bias = (p[...].astype(jnp.float32) for p in (self.proj.kernel, self.proj.bias))
        return jnp.matmul(features.astype(jnp.float32), kernel)[..., 0] + bias[0]


class SparkBranches(NamedTuple):
    """What drafting a tree keeps of the block and of the m nodes that it has come to."""

    states: jax.Array  # [B, D, width]
    base: jax.Array  # f32[B, D, V] logits without the bias
    memory: jax.Array | None  # [B, m, r]; None without a Markov head


class DSpark(BlockDraft):
    """Draft i of a block stands for x_{a+1+i}; its law is that of a chain, given the drafts before it."""

    cfg: DSparkConfig

    def __init__(self, cfg: DSparkConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(cfg, rngs=rngs)
        if cfg.markov_rank:
            self.markov_head = MarkovHead(cfg, rngs=rngs)
        if cfg.enable_confidence_head:
            extra = cfg.markov_rank if cfg.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(cfg.hidden_size + extra, rngs=rngs)

    def propose(
        self,
        state: BlockState,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, BlockState]:
        """Draw the first k drafts one after another, and return the very laws they were drawn from."""
        count = uniforms.shape[1]
        self.check_length(count)
        states = self.block(state, newest, anchor, shared)[:, :count]
        base = head_logits(states, shared.head)
        memory = self.markov_head.start(states[:, 0]) if self.cfg.markov_rank else None
        previous, tokens, laws = newest, [], []
        for i in range(count):
            logits = base[:, i]
            if memory is not None:
                g, memory = self.markov_head.step(memory, states[:, i], previous)
                logits = logits + head_logits(g, self.markov_head.markov_w2.kernel[...])
            laws.append(sampling.law(logits, i))
            previous = draw(laws[-1], uniforms[:, i])
            tokens.append(previous)
        full = jnp.full(newest.shape, count, jnp.int32)
        return Proposal(jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), full), state

    @property
    def draws_tokens(self) -> bool:
        """Always."""
        return True

    def begin_tree(self, state: BlockState, call: TreeCall) -> Growth:
        """The block is run once; what differs from node to node is the bias of the token before, and its memory."""
        depth = call.tree.depth
        self.check_length(depth)
        states = self.block(state, call.newest, call.anchor, call.shared)[:, :depth]
        branches = SparkBranches(states, head_logits(states, call.shared.head), None)
        if self.cfg.markov_rank:
            branches = branches._replace(memory=self.markov_head.start(states[:, :1]))
        return self._after(branches, 0, call.newest[:, None], call, state)

    def extend_tree(self, growth: Growth, depth: int, tokens: Int[Array, "B m"], call: TreeCall) -> Growth:
        """Each node goes on from its parent's memory."""
        branches: SparkBranches = growth.branches
        if branches.memory is not None:
            parents = call.tree.levels[depth - 1].growing_parents
            branches = branches._replace(memory=branches.memory[:, parents])
        return self._after(branches, depth, tokens, call, growth.state)

    def _after(
        self, branches: SparkBranches, depth: int, previous: Int[Array, "B m"], call: TreeCall, state: BlockState
    ) -> Growth:
        """Laws of the drafts number `depth` of the block after these tokens."""
        rows = lambda values: jnp.broadcast_to(values[:, depth, None], (*previous.shape, values.shape[-1]))  # noqa: E731
        logits = rows(branches.base)
        if branches.memory is not None:
            g, memory = self.markov_head.step(branches.memory, rows(branches.states), previous)
            logits = logits + head_logits(g, self.markov_head.markov_w2.kernel[...])
            branches = branches._replace(memory=memory)
        return Growth(call.sampling.law(logits), state, branches)

    def label_features(
        self, states: Float[Array, "R C d D"], previous: Int[Array, "R C d"], head: Float[Array, "D V"]
    ) -> tuple[Float[Array, "R C d F"], Float[Array, "F V"]]:
        """What the logits of training labels are the product of: [h ; g] and [head ; W2], so F = D + r."""
        if not self.cfg.markov_rank:
            return states, head
        features = jnp.concatenate([states, self.markov_head.sequence(states, previous)], axis=-1)
        w2 = self.markov_head.markov_w2.kernel[...]
        return features, jnp.concatenate([head, w2.astype(head.dtype)], axis=0)

    def confidence(self, states: Float[Array, "*b D"], previous: Int[Array, "*b"]) -> Float32[Array, "*b"]:
        """Logit of each draft's acceptance, from its state and the token before it."""
        features = states
        if self.cfg.confidence_head_with_markov:
            features = jnp.concatenate([states, self.markov_head.markov_w1(previous).astype(states.dtype)], axis=-1)
        if self.cfg.confidence_cut_inputs:
            features = jax.lax.stop_gradient(features)
        return self.confidence_head(features)
