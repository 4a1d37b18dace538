"""Peak memory of every family's loss and gradient, as compiled: bounded by the chunk, not by tokens x vocabulary.

A scaled 64k tokens x 152k vocabulary: 2k tokens x 32k vocabulary, of which one float32 array has 256 MiB.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from draftco_jax.drafts.base import DraftConfig, Target, TrainingContext
from draftco_jax.drafts.catalog import FAMILIES, family_of
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

ROWS, TOKENS, VOCAB, WIDTH = 64, 32, 32768, 16
LOGITS_BYTES = 4 * ROWS * TOKENS * VOCAB
POLICY = Qwen3Config.tiny(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32)


def config_of(name: str, loss: DraftLossConfig) -> DraftConfig:
    narrow: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "loss": loss}
    block = narrow | {"mask_token_id": 0, "num_hidden_layers": 1, "block_size": 3, "num_anchors": 8, "row_anchors": 8}
    return {
        "eagle3": lambda: Eagle3Config.for_target(POLICY, passes=2, **narrow),
        "dflash": lambda: DFlashConfig.for_target(POLICY, **block),
        "dspark": lambda: DSparkConfig.for_target(POLICY, markov_rank=4, **block),
        "mtp": lambda: MtpConfig.for_target(POLICY, steps=2, **narrow),
    }[name]()


def gradient_program(cfg: DraftConfig, *, rows: int, chunk: int, tile: int):
    """The compiled gradient of the loss; nothing is run."""
    family, graph = family_of(cfg), graph_of(cfg.build)
    context = TrainingContext(SamplingConfig(), chunk, 4, tile)
    assert family.loss is not None and family.denominator is not None
    loss_fn, denominator = family.loss, family.denominator

    def loss(params, target, batch, key):
        count = denominator(batch, cfg, key)
        return loss_fn(graph.merge(params), target, batch, denominator=count, key=key, context=context)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    i32, labels = jax.ShapeDtypeStruct((rows, TOKENS), jnp.int32), f32(rows, TOKENS)
    taps = len(cfg.tap_layers) * WIDTH
    target = Target(f32(rows, TOKENS, taps), f32(rows, TOKENS, WIDTH), f32(WIDTH, VOCAB), f32(VOCAB, WIDTH))
    batch = PackedBatch(i32, i32, i32, labels, labels, labels, labels, i32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    return gradient, (abstract_params(cfg.build), target, batch, key)


def peak_bytes(cfg: DraftConfig, **sizes: int) -> int:
    gradient, arguments = gradient_program(cfg, **sizes)
    return gradient.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


# All terms at once, so that none of them is the exception.
LOSS = DraftLossConfig(soft_cross_entropy=0.2, hard_cross_entropy=0.1, l1=0.9, end_to_end_tv=0.5, lk_alpha=0.1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("dspark", "mtp") else name
        for name, family in FAMILIES.items()
        if family.trained
    ],
)
def test_bug_case_b17_the_draft_loss_is_bounded_by_its_chunk(name):
    cfg = config_of(name, LOSS)
    small = peak_bytes(cfg, rows=ROWS, chunk=128, tile=1024)
    whole = peak_bytes(cfg, rows=ROWS, chunk=ROWS * TOKENS, tile=VOCAB)
    print(f"{name}: {small / 2**20:.1f} MiB chunked and tiled, {whole / 2**20:.1f} MiB at once")
    assert small < LOGITS_BYTES / 8 < LOGITS_BYTES < whole


def test_bug_case_b18_no_array_of_the_draft_loss_has_a_vocabulary_for_every_token():
    """Of all arrays of forward and backward pass the largest has less than an eighth of tokens x vocabulary."""
    cfg = config_of("eagle3", LOSS)
    gradient, arguments = gradient_program(cfg, rows=ROWS, chunk=128, tile=1024)
    largest = max(
        (variable.aval.size for equation in every_equation(gradient.trace(*arguments).jaxpr.jaxpr)
         for variable in equation.outvars if hasattr(variable.aval, "size")),
    )  # fmt: skip
    assert largest < ROWS * TOKENS * VOCAB / 8


def every_equation(jaxpr):
    """Equations of a jaxpr and of all jaxprs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from every_equation(inner)
