"""The decoder-only policy: packed rows for training, cached steps for decoding; families say what a block is.

Letters as in `layers`: B batch, T tokens, D width, N heads, K key-value heads, H head width, V vocabulary, plus
A = number of taps * D, the width of the concatenated target features that a draft reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.block import Block
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.compute import FLOAT32, ComputeConfig, FloatName
from draftco_jax.models.full_attention import AttentionSpec
from draftco_jax.models.kv_cache import Cache, visible_branches
from draftco_jax.models.layer_runs import Run, find_runs
from draftco_jax.models.layer_walk import BlockCall, Walked, Way, in_loops, one_by_one
from draftco_jax.models.layers import GatedMLP, Linear, LinearGroup, NormRule, RMSNorm, packed, parameter, project
from draftco_jax.models.moe import MoEConfig
from draftco_jax.models.moe_routing import RoutingSums, routing_sums
from draftco_jax.models.paged_cache import PagedCache
from draftco_jax.models.rotary import Rotary
from draftco_jax.models.token_tree import Tree
from draftco_jax.models.vocabulary import logits, lookup
from pallas_kernels.skinny_matmul import available


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every family states, and the parts that it makes of it; subclasses say what a block is.

    Field names are those of the published config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        check_sizes(self, ("vocab_size", "num_hidden_layers", "max_position_embeddings"))
        _ = self.mixture, self.rotary  # refuse sizes of theirs here, and not when a module is built of them

    @property
    def rotary(self) -> Rotary | None:
        """What queries and keys are turned with; None: nothing."""
        return Rotary(width=self.head_dim, theta=self.rope_theta)

    @property
    def norm_rule(self) -> NormRule:
        """Rule of the norms of the residual stream."""
        return "cast_first"

    @property
    def output_scale(self) -> float:
        """Standard deviation of fresh projections back into the residual stream: 0.02 / sqrt(2 * layers)."""
        return 0.02 / (2 * self.num_hidden_layers) ** 0.5

    @property
    def mixture(self) -> MoEConfig | None:
        """The mixture of experts of the layers that have one; None: a policy without."""
        return None

    @property
    def layer_kinds(self) -> tuple[Hashable, ...]:
        """One for each layer; layers of one kind differ by their weights alone."""
        return ("block",) * self.num_hidden_layers

    @property
    def recurrent(self) -> bool:
        """Whether some layer carries a state from token to token, which goes one way only and follows no branches."""
        return False

    @property
    def runs(self) -> tuple[Run, ...]:
        """How layers are stacked where they are."""
        return find_runs(self.layer_kinds)

    def make_norm(self, rngs: nnx.Rngs) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(self.hidden_size, eps=self.rms_norm_eps, rngs=rngs, rule=self.norm_rule)

    def attention(self, **changes: Any) -> AttentionSpec:
        """The attention of a layer: plain grouped-query, with `changes`."""
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "eps": self.rms_norm_eps,
            "out_scale": self.output_scale,
        }
        return AttentionSpec(**(sizes | changes))

    def gated_mlp(self, rngs: nnx.Rngs) -> GatedMLP:
        """SwiGLU of `intermediate_size`."""
        down_init = nnx.initializers.normal(self.output_scale)
        return GatedMLP(self.hidden_size, self.intermediate_size, rngs=rngs, down_init=down_init)

    def block(self, index: int, rngs: nnx.Rngs) -> Block:
        """Block `index` with freshly drawn weights."""
        raise NotImplementedError

    def build(self, rngs: nnx.Rngs, compute: ComputeConfig = FLOAT32) -> Decoder:
        """The Flax module with freshly drawn weights."""
        return Decoder(self, compute, rngs=rngs)


def pre_norm_block(cfg: DecoderConfig, mixer: tuple[str, nnx.Module], ffn: nnx.Module, rngs: nnx.Rngs) -> Block:
    """A mixer (by its attribute name) and an MLP or experts, each after its norm: the block of most families."""
    return Block(
        mixer=("input_layernorm", *mixer),
        ffn=("post_attention_layernorm", "mlp", ffn),
        norm=lambda: cfg.make_norm(rngs),
    )


def check_sizes(cfg: Any, names: tuple[str, ...]) -> None:
    """Refuse sizes below 1, heads that do not share evenly, and constants no norm or rotation can use."""
    attention = ("num_attention_heads", "num_key_value_heads", "head_dim")
    for name in ("hidden_size", "intermediate_size", *attention, *names):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be >= 1; set it to the model's size")
    if cfg.num_attention_heads % cfg.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={cfg.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={cfg.num_key_value_heads}; change one of them"
        )
    if cfg.head_dim % 2:
        raise ValueError(f"head_dim={cfg.head_dim} must be even, rotary pairs need it; use the next even number")
    for name in ("rms_norm_eps", "rope_theta"):
        if not getattr(cfg, name) > 0:
            raise ValueError(f"{name}={getattr(cfg, name)} must be > 0; 1e-6 and 1e6 are usual")


def check_branches(cfg: DecoderConfig) -> None:
    """Refuse policies that cannot read the nodes of a token tree."""
    if cfg.recurrent:
        raise ValueError(
            f"policy={type(cfg).__name__} must not be recurrent with a token tree: a state follows one line of tokens; "
            "use verification=token or block"
        )


class PolicyRouting(NamedTuple):
    """Where the tokens of a call went, by layer with experts (M of them, in order)."""

    ids: jax.Array  # i32[R, T, M, k]
    sums: RoutingSums  # arrays [M, ...], over tokens that are not padding


class PolicyOutput(NamedTuple):
    """What a forward over packed rows gives."""

    hidden: jax.Array  # [R, T, D] final-normed
    taps: jax.Array  # [R, T, A] without gradient
    routing: PolicyRouting | None  # None: a policy without experts


class StepOutput(NamedTuple):
    """What a cached step gives."""

    hidden: jax.Array  # [B, T, D] final-normed
    taps: jax.Array  # [B, T, A]
    cache: Any  # of the kind that was given
    experts: jax.Array | None  # i32[B, T, M, k] ids; None: a policy without experts


class Decoder(nnx.Module):
    """Embedding, blocks, final norm, head.

    Taps: the residual stream AFTER the named blocks (OUTPUT convention, 0-based), un-normed, concatenated in the
    order given. They are what a draft reads; no gradient goes back through them.

    Blocks are one by one in `layers`, or stacked in `runs` (`layer_runs`), each run a loop.
    """

    head_panels: nnx.Param  # of a packed policy whose head is tied

    def __init__(self, cfg: DecoderConfig, compute: ComputeConfig = FLOAT32, *, rngs: nnx.Rngs) -> None:
        self.cfg, self.compute, self.packed_head = cfg, compute, False
        self.embed_tokens = parameter(
            rngs, (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), nnx.initializers.normal(0.02)
        )
        self._make_blocks(rngs)
        self.norm = cfg.make_norm(rngs)
        if not cfg.tie_word_embeddings:
            self.lm_head = Linear((cfg.hidden_size, cfg.vocab_size), ("embed", "vocab"), rngs=rngs)
        compute.cast_parameters(self)

    def _make_blocks(self, rngs: nnx.Rngs) -> None:
        cfg = self.cfg
        if self.compute.scan_layers:
            groups = [[stacked_block(cfg, run.layer(0, p), (run.repeats,), rngs) for p in range(run.period)]
                      for run in cfg.runs]  # fmt: skip
            self.runs = nnx.List([nnx.List(group) for group in groups])
        else:
            self.layers = nnx.List([cfg.block(i, rngs) for i in range(cfg.num_hidden_layers)])

    def embed(self, tokens: Int[Array, "*b"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b D"]:
        """Rows of the embedding table; every id is below the vocabulary size."""
        return lookup(self.embed_tokens[...], tokens, packed.tensor_axis).astype(self.compute.dtype)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The output projection, tied or not; over a tensor axis this rank's columns."""
        return self.embed_tokens[...].T if self.cfg.tie_word_embeddings else self.lm_head.matrix()

    def tables(self, dtype: FloatName) -> tuple[Float[Array, "V D"], Float[Array, "D V"]]:
        """Embedding in `dtype`, and output projection, whole: what drafts read."""
        return self.embed_tokens[...].astype(dtype), self.head_kernel()

    def logits(self, hidden: Float[Array, "*b D"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b V"]:
        """Logits of normed hidden states, accumulated in float32."""
        if self.packed_head:
            kernel = self.head_panels if self.cfg.tie_word_embeddings else self.lm_head.kernel
            return project(hidden, kernel[...], self.cfg.vocab_size)
        return logits(hidden, self.head_kernel(), packed.tensor_axis)

    def __call__(
        self,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        *,
        tap_layers: Sequence[int] = (),
        packed: PackedRows = WHOLE_ROWS,
        experts: Int[Array, "R T M k"] | None = None,
    ) -> PolicyOutput:
        """Final-normed hidden states and taps of packed rows; `packed` says how they are spread over devices.

        Positions count 0, 1, 2, ... in each document: where it starts is read off them.
        `experts`: routing to be replayed, the ids that a rollout recorded; -1 lets the router choose.
        """
        rotary = self.cfg.rotary
        call = PackedCall(positions, segment_ids, None if rotary is None else rotary.angles(positions), packed)
        counted = segment_ids > 0

        def block(module: Block, x: Array, state: tuple[()], chosen: Array | None) -> tuple[Array, tuple[()], Any]:
            x, routing = module(x, call, chosen)
            return x, state, None if routing is None else (routing.ids, routing_sums(routing, counted))

        x = self.embed(tokens, packed)
        walked = self._through(block, x, None, experts, tap_layers)
        found = walked.said
        routing = None if found is None else PolicyRouting(jnp.moveaxis(found[0], 0, 2), found[1])
        return PolicyOutput(self.norm(walked.x), walked.tapped, routing)

    def step(
        self,
        tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        cache: Cache | PagedCache,
        *,
        tap_layers: Sequence[int],
        lengths: Int[Array, " B"] | None = None,
        active: Bool[Array, "B T"] | None = None,
        packed: PackedRows = WHOLE_ROWS,
        tree: Tree | None = None,
    ) -> StepOutput:
        """The same for T new tokens at positions start, start + 1, ... whose past is in the cache.

        `lengths`: the tokens are (pieces of) prompts of these lengths, padded; None: they are a call of at most
        lookahead + 1 tokens.
        `active`: tokens whose output may be read; the others, after them in each request, use no expert and no page.
        None: all.
        `tree`: the tokens are its nodes, the root at `start`; `kv_cache.compacted` then keeps a path of it. `active`
        ones may lie anywhere. For policies that are not `recurrent`, with a `Cache`, weights not split.
        `packed` says over which axes the weights are split.
        """
        count = tokens.shape[1]
        if tree is not None:
            call = self._tree_call(start, cache, active, tree)
        else:
            angles = None if self.cfg.rotary is None else cache.angles_at(start, count)
            call = CachedCall(start, angles, cache.seen(start, count, active), lengths, active, packed)

        def block(module: Block, x: Array, state: Any, chosen: Array | None) -> tuple[Array, Any, Any]:
            del chosen  # a rollout records its routing and replays none
            x, state, routing = module.step(x, state, call)
            return x, state, None if routing is None else routing.ids

        walked = self._through(block, self.embed(tokens, packed), cache.layers, None, tap_layers)
        cache, ids = cache._replace(layers=walked.states), walked.said
        return StepOutput(self.norm(walked.x), walked.tapped, cache, None if ids is None else jnp.moveaxis(ids, 0, 2))

    def _tree_call(
        self, start: Int[Array, " B"], cache: Cache | PagedCache, active: Array | None, tree: Tree
    ) -> CachedCall:
        check_branches(self.cfg)
        if not isinstance(cache, Cache):
            raise ValueError("a tree must be read into a cache of rows, and this one has pages; use empty_cache")
        angles = None if self.cfg.rotary is None else cache.tree_angles(start, tree)
        visible = visible_branches(cache.capacity, start, tree.mask())
        return CachedCall(start, angles, visible, None, active, tree=tree)

    def _through(
        self, block: BlockCall, x: Array, states: Sequence[Any] | None, experts: Array | None, taps: Sequence[int]
    ) -> Walked:
        """Every layer in its turn; `states` of the mixers as `empty_cache` orders them."""
        way = Way(block, self.compute, tuple(taps), experts)
        if self.compute.scan_layers:
            return in_loops(self.cfg.runs, self.runs, way, x, states)
        return one_by_one(self.layers, way, x, states)

    def empty_cache(self, batch: int, capacity: int, lookahead: int = 0) -> Cache:
        """Room for `capacity` tokens of each request, read in calls of up to lookahead + 1 tokens after the prompt."""
        cfg, dtype = self.cfg, jnp.dtype(self.compute.dtype)
        empty = lambda block: block.empty_state(batch, capacity, lookahead, dtype)  # noqa: E731
        if self.compute.scan_layers:
            layers = tuple(
                tuple(_repeated(empty(_at(block, 0)), run.repeats) for block in group)
                for run, group in zip(cfg.runs, self.runs, strict=True)
            )
        else:
            layers = tuple(empty(block) for block in self.layers)
        if cfg.rotary is None:
            return Cache(layers, jnp.zeros((capacity, 0)), jnp.zeros((capacity, 0)))
        cos, sin = cfg.rotary.angles(jnp.arange(capacity)[None])
        return Cache(layers, cos[0, :, 0], sin[0, :, 0])


def stacked_block(cfg: DecoderConfig, layer: int, dims: tuple[int, ...], rngs: nnx.Rngs) -> Block:
    """Blocks of the kind of a layer as one, its arrays with leading dims over all of them; the first of them is split
    over stages where there are any ("layers")."""
    graphs = []

    def draw(key: Array) -> Any:
        graph, weights = nnx.split(cfg.block(layer, nnx.Rngs(params=key)))
        graphs.append(graph)
        return weights

    for _ in dims:
        draw = jax.vmap(draw)
    weights = draw(jax.random.split(rngs.params(), dims))
    block = nnx.merge(graphs[0], weights)
    names = ("layers", *("slot" for _ in dims[1:]))
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(logical_axes=(*names, *variable.get_metadata("logical_axes")))
    return block


def _at(block: Block, index: int) -> Block:
    """One of the blocks that are stacked."""
    graph, weights = nnx.split(block)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[index], weights))


def _repeated(tree: Any, repeats: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (repeats, *leaf.shape)), tree)


def fuse_projections(module: nnx.Module) -> None:
    """Turn a module from the train layout to the rollout layout: every `LinearGroup` becomes one matmul."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, LinearGroup) and not node.fused:
            node.fuse()


def to_rollout_layout(module: nnx.Module) -> None:
    """Turn a policy or a draft from the train layout to the rollout layout: fused, and packed where that is asked."""
    fuse_projections(module)
    if isinstance(module, Decoder) and module.compute.step_matmul == "skinny":
        pack_projections(module)


def pack_projections(policy: Decoder) -> None:
    """Pack what a step multiplies with; a tied head gets panels beside the embedding, which lookups go on reading."""
    if not available():
        raise ValueError(
            "step_matmul='skinny' must have its kernel built, and runs on CPUs only; run `python -m "
            "pallas_kernels.skinny_matmul.build` or set step_matmul=xla"
        )
    found = [node for _, node in nnx.iter_graph(policy) if isinstance(node, Linear | LinearGroup)]
    for node in found:
        node.pack()
    if policy.cfg.tie_word_embeddings:
        policy.head_panels = packed(policy.head_kernel())
    policy.packed_head = True


def count_parameters(params: dict) -> int:
    """Number of scalars in a parameter tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
