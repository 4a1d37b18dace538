"""Floating-point operations of a training update, counted from configs: matrix products and attention, nothing else.

A product of [n, i] and [i, o] is 2 n i o forward, as much for the gradient of its input and as much for that of its
weight, each only where it is wanted. Attention of one head of width H is 4 H a visible pair forward (scores, values)
and twice that backward. Two ways to count:

    needed     every product of the forward once, and its gradients; statistics that only metrics need left out
    executed   as the program does it: the layers of a pipeline stage are made again for their backward, draft heads go
               through the vocabulary several times so that no logits are kept, and what is logged is computed too

Neither has what an attention kernel makes again for itself, norms, rotations and sums. A micro-batch is one document.

Letters: N tokens, D width, V vocabulary, W draft vocabulary, C anchors, n rows and d drafts of a block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.blocks.config import BlockDraftConfig
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.transformer import DecoderConfig

Counting = Literal["needed", "executed"]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one micro-batch, whole: all devices that share it together."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        """One after the other."""
        return Flops(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __mul__(self, factor: float) -> Flops:
        """So many of them, or a share."""
        return Flops(forward=factor * self.forward, backward=factor * self.backward)


@dataclass(frozen=True, kw_only=True)
class PolicyFlops:
    """A policy's parts as stages hold them."""

    layer: Flops
    """The mean layer."""
    head: Flops
    """With its loss, on the last stage."""


def product(rows: float, inner: int, outer: int, gradients: int = 2) -> Flops:
    """A matrix product; gradients: 2 for input and weight, 1 for either, 0 for none."""
    one = 2.0 * rows * inner * outer
    return Flops(forward=one, backward=gradients * one)


def attention(pairs: float, heads: int, head_dim: int) -> Flops:
    """Scores and values of so many query-key pairs, all heads."""
    one = 4.0 * pairs * heads * head_dim
    return Flops(forward=one, backward=2 * one)


def causal_pairs(tokens: int) -> float:
    """Pairs that a document's tokens see, each itself too."""
    return tokens * (tokens + 1) / 2


def policy_flops(cfg: DecoderConfig, tokens: int, counting: Counting = "needed") -> PolicyFlops:
    """A dense policy on one document; the lookup of embeddings costs no products.

    Raises:
        ValueError: a policy of other blocks than attention and a gated MLP.
    """
    if cfg.mixture is not None or set(cfg.layer_kinds) != {"block"}:
        raise ValueError(f"policy={type(cfg).__name__} must have dense blocks only; use a Llama or Qwen3 config")
    layer = _dense_layer(cfg, tokens, cfg.hidden_size, causal_pairs(tokens))
    head = product(tokens, cfg.hidden_size, cfg.vocab_size)
    if counting == "executed":
        layer, head = (Flops(forward=f.forward, backward=f.backward + f.forward) for f in (layer, head))
    return PolicyFlops(layer=layer, head=head)


def draft_flops(cfg: DraftConfig, tokens: int, counting: Counting = "needed") -> Flops:
    """A draft's training on one micro-batch of one document, its teacher included.

    Raises:
        ValueError: a family without training, or a head whose body is blocks of a policy.
    """
    executed = counting == "executed"
    if isinstance(cfg, Eagle3Config):
        return _eagle3(cfg, tokens, executed)
    if isinstance(cfg, BlockDraftConfig):
        return _blocks(cfg, tokens, executed)
    if isinstance(cfg, MtpConfig) and cfg.layer is None:
        return _mtp(cfg, tokens, executed)
    raise ValueError(f"draft={type(cfg).__name__} must be eagle3, dflash, dspark or a dense mtp; use one of them")


def _eagle3(cfg: Eagle3Config, tokens: int, executed: bool) -> Flops:
    """fc once (its input gets no gradient), then the layer and the head for each pass."""
    width, passes = cfg.hidden_size, cfg.passes
    total = product(tokens, len(cfg.tap_layers) * width, width, gradients=1)
    for k in range(passes):
        total += _dense_layer(cfg, tokens, 2 * width, causal_pairs(tokens) + k * tokens)
    head = _Heads(labels=passes * tokens, states=tokens, paired=tokens, width=width, columns=cfg.draft_vocab_size)
    return total + _laws(head, gradients=2, teacher=cfg.vocab_size, executed=executed)


def _mtp(cfg: MtpConfig, tokens: int, executed: bool) -> Flops:
    """K uses of fc and one layer; the head is the policy's, and its law is logged whatever the loss."""
    width, total = cfg.hidden_size, Flops()
    queries = cfg.num_attention_heads * cfg.head_dim
    for k in range(cfg.steps):
        # The first hidden state is the policy's, but its norm has a weight to train.
        total += product(tokens, 2 * width, width)
        own = k if cfg.attention_pattern == "chain" else 0
        total += _dense_layer(cfg, tokens, width, causal_pairs(tokens) + own * tokens)
        if cfg.attention_output_gate:
            total += product(tokens, width, queries)
    teacher = cfg.vocab_size if executed or cfg.loss.needs_teacher else 0
    head = _Heads(labels=cfg.steps * tokens, states=tokens, paired=tokens, width=width, columns=cfg.vocab_size)
    return total + _laws(head, gradients=1, teacher=teacher, executed=executed)


def _blocks(cfg: BlockDraftConfig, tokens: int, executed: bool) -> Flops:
    """Keys and values of the context in every layer, then C blocks of n rows whose anchors are spread evenly."""
    width, anchors = cfg.hidden_size, min(cfg.row_anchors or cfg.num_anchors, cfg.num_anchors, tokens)
    rows, labels = anchors * cfg.rows, anchors * cfg.max_draft_length
    keys = 2 * cfg.num_key_value_heads * cfg.head_dim
    total = product(tokens, len(cfg.tap_layers) * width, width, gradients=1)
    for kind in cfg.layer_types:
        window = cfg.window_of(kind)
        context = tokens / 2 if window is None else min(tokens / 2, window)
        total += product(tokens, width, keys) + _dense_layer(cfg, rows, width, rows * (context + cfg.rows))
    head = _Heads(labels=labels, states=min(labels, tokens), paired=labels, width=width, columns=cfg.vocab_size)
    teacher = cfg.vocab_size if cfg.loss.needs_teacher else 0
    if isinstance(cfg, DSparkConfig):
        teacher, head = cfg.vocab_size, dataclasses.replace(head, more=cfg.markov_rank)
        total += Flops(backward=2.0 * labels * cfg.markov_rank * cfg.vocab_size)  # W2 is trained, the policy's head not
    laws = _laws(head, gradients=1, teacher=teacher, executed=executed)
    if executed and isinstance(cfg, DFlashConfig) and cfg.proposals == "argmax":
        # What is logged: the likeliest token of each row, and the policy's probability of it.
        laws += product(2 * labels, width, cfg.vocab_size, gradients=0)
    return total + laws


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """Where a draft's law and the policy's meet."""

    labels: float
    states: float  # of the policy, that labels learn from
    paired: float  # how often one is met with the draft's columns
    width: int  # of those
    columns: int  # W
    more: int = 0  # what a label's features have beyond the width


def _laws(heads: _Heads, *, gradients: int, teacher: int, executed: bool) -> Flops:
    """A draft's head on its labels, and `teacher` columns of the policy's on the states that they learn from.

    Executed: the draft's head is walked for the normalisers and again for the sums (once where there is no teacher) and
    once more in the backward; with the sums and in the backward go the draft's columns of the policy's head, for each
    label of a block, but once for all steps of an index (a chunk's border, where some go twice, is left out).
    """
    student = product(heads.labels, heads.width + heads.more, heads.columns, gradients)
    policy = product(heads.states, heads.width, teacher, gradients=0)
    if not executed:
        return student + policy
    again = product(heads.paired, heads.width, heads.columns, gradients=0) if teacher else Flops()
    walks = 2 if teacher else 1
    student = Flops(forward=walks * student.forward, backward=student.backward + student.forward)
    return student + policy + again + Flops(backward=again.forward)


def _dense_layer(
    cfg: DecoderConfig | Eagle3Config | MtpConfig | BlockDraftConfig, rows: float, inner: int, pairs: float
) -> Flops:
    """Attention whose input is `inner` wide, and a gated MLP."""
    width, queries = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
    keys = 2 * cfg.num_key_value_heads * cfg.head_dim
    return (
        product(rows, inner, queries + keys)
        + product(rows, queries, width)
        + product(rows, width, 3 * cfg.intermediate_size)
        + attention(pairs, cfg.num_attention_heads, cfg.head_dim)
    )
