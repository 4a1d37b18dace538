"""Counted FLOPs against hand counts and against the sizes of the very arrays that are multiplied with."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.losses.law_pair import Teacher, law_pair_terms
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.planner.flops import attention, draft_flops, policy_flops, product

POLICY = Qwen3Config(
    vocab_size=64,
    hidden_size=8,
    intermediate_size=20,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
N = 32
HEAD = 2 * N * 8 * 64
"""One product of all tokens with the policy's head."""


def kernels(cfg, inside):
    """Numbers in the matrices under this part of a model."""
    state = nnx.eval_shape(lambda: nnx.state(cfg.build(nnx.Rngs(0)), nnx.Param))
    found = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return sum(math.prod(x.shape) for path, x in found if x.ndim == 2 and inside in jax.tree_util.keystr(path))


def test_a_product_and_its_gradients():
    one = product(3, 5, 7)
    assert (one.forward, one.backward) == (2 * 3 * 5 * 7, 4 * 3 * 5 * 7)
    assert product(3, 5, 7, gradients=0).total == one.forward
    assert attention(10, heads=4, head_dim=6).forward == 2 * 2 * 10 * 4 * 6  # scores and values


def test_a_policy_is_its_matrices_and_its_visible_pairs():
    found = policy_flops(POLICY, N)
    pairs = N * (N + 1) / 2
    assert found.layer.forward == 2 * N * kernels(POLICY, "'layers'][0]") + 4 * pairs * 4 * 6
    assert found.layer.backward == 2 * found.layer.forward
    assert (found.head.forward, found.head.total) == (HEAD, 3 * HEAD)
    made_again = policy_flops(POLICY, N, "executed")
    assert made_again.layer.total == 4 * found.layer.forward and made_again.head.total == 4 * HEAD


def test_qwen3_8b_by_hand():
    found = policy_flops(Qwen3Config.qwen3_8b(), 20_480)
    matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert found.layer.forward == 2 * 20_480 * matrices + 4 * (20_480 * 20_481 / 2) * 4096


def test_eagle3_by_hand():
    cfg = Eagle3Config.for_target(POLICY, tap_layers=(0, 2), passes=3, draft_vocab_size=16)
    layer = 2 * N * kernels(cfg, "midlayer")
    pairs = [N * (N + 1) / 2 + k * N for k in range(3)]
    forward = 2 * N * kernels(cfg, "'fc'") + sum(layer + 4 * p * 4 * 6 for p in pairs)
    labels, teacher = 3 * 2 * N * kernels(cfg, "lm_head"), HEAD
    found = draft_flops(cfg, N)
    assert found.forward == forward + labels + teacher
    # fc reads taps, which get no gradient; the teacher gets none at all.
    assert found.backward == 2 * (forward + labels) - 2 * N * kernels(cfg, "'fc'")
    # A label of the program: the draft's head 3 times and its two gradients. The kept ids of the policy's head twice.
    executed = 2 * N * 8 * (3 * 5 * 16 + 2 * 16) + HEAD
    assert draft_flops(cfg, N, "executed").total == pytest.approx(found.total - 3 * labels - teacher + executed)


@pytest.mark.parametrize(("teacher", "frozen", "span"), [(True, 0, None), (True, 8, None), (True, 5, N), (False, 0, N)])
def test_executed_products_of_heads_are_those_of_the_traced_program(teacher, frozen, span):
    """Of 3 N labels, N states, 16 draft ids; one chunk and one tile, so that a trace has no loop to guess at."""
    f32, i32 = (lambda *shape, t=t: jax.ShapeDtypeStruct(shape, t) for t in (jnp.float32, jnp.int32))
    policy = Teacher(f32(N, 6), f32(6, 64), i32(3 * N)) if teacher else None
    rule = {"kept": jnp.arange(16), "sampling": SamplingConfig(), "tile": 64, "chunk_tokens": 3 * N}

    def loss(features, kernel, policy, labels):
        terms = law_pair_terms(features, kernel, policy, labels, **rule, frozen_rows=frozen, span=span)
        return jnp.sum(jnp.stack(terms[:4]))

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(f32(3 * N, 8), f32(8, 16), policy, i32(3 * N))
    once, label = 2 * N * 6 * 64, 2 * 3 * N * 16
    gradients = label * (8 + 8 - frozen)
    paired = 2 * 6 * label // (3 if span else 1)
    expected = once + label * 3 * 8 + paired + gradients if teacher else label * 2 * 8 + gradients
    assert sum(products(traced.jaxpr)) == expected


def products(jaxpr):
    """FLOPs of every product of a jaxpr and of all jaxprs in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[i] for i in left)
            yield 2 * inner * equation.outvars[0].aval.size
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def test_a_smaller_draft_vocabulary_saves_the_drafts_head_only():
    cfg = Eagle3Config.for_target(POLICY, passes=1)
    small = dataclasses.replace(cfg, draft_vocab_size=16)
    assert draft_flops(cfg, N).total - draft_flops(small, N).total == 3 * 2 * N * 8 * (64 - 16)


@pytest.mark.parametrize("executed", [False, True])
def test_dflash_by_hand(executed):
    blocks = {"mask_token_id": 1, "num_hidden_layers": 2, "block_size": 4, "num_anchors": 5, "tap_layers": (0, 2)}
    cfg = DFlashConfig.for_target(POLICY, **blocks)
    rows, context = 5 * 4, N / 2
    fc, layer = 2 * N * kernels(cfg, "'fc'"), 2 * rows * kernels(cfg, "'layers'][0]")
    keys = 2 * N * 8 * 2 * 2 * 6
    heads = 4 * rows * (context + 4) * 4 * 6
    label = 2 * 5 * 3 * 8 * 64
    # Its head is the policy's and is not trained. Executed: 3 products, and two more for what is logged.
    head = 5 * label if executed else 2 * label
    found = draft_flops(cfg, N, "executed" if executed else "needed")
    assert found.total == 2 * fc + 2 * 3 * (keys + layer + heads) + head


def test_dspark_adds_its_teacher_and_its_bias():
    blocks = {"mask_token_id": 1, "num_hidden_layers": 1, "num_anchors": 4, "tap_layers": (2,)}
    plain = DFlashConfig.for_target(POLICY, **blocks, block_size=7)
    cfg = DSparkConfig.for_target(POLICY, **blocks, block_size=7, markov_rank=3)
    one = 2 * 4 * 64
    # 7 labels a block and not 6; the bias has a weight of its own to train, and the policy's law is compared with.
    more = one * (7 * (2 * (8 + 3) + 3 + 8) - 6 * 2 * 8)
    assert draft_flops(cfg, N).total - draft_flops(plain, N).total == more
    # 16 blocks have 112 labels and a text of 32 tokens has 32 laws; what is more than 4 blocks' is 4 times theirs.
    forward = [[draft_flops(dataclasses.replace(c, num_anchors=n), N).forward for c in (cfg, plain)] for n in (4, 16)]
    few, many = (one - other for one, other in forward)
    assert many - 4 * few == 2 * 8 * 64 * (32 - 4 * 28)


def test_mtp_has_its_own_fc_for_each_step():
    one, two = (draft_flops(MtpConfig.for_target(POLICY, steps=k), N) for k in (1, 2))
    cfg = MtpConfig.for_target(POLICY)
    matrices = 2 * N * (kernels(cfg, "'fc'") + kernels(cfg, "'layers'"))
    label = 2 * HEAD  # forward and its input's gradient; cross-entropy with the texts' tokens needs no teacher
    assert one.total == 3 * (matrices + 4 * (N * (N + 1) / 2) * 4 * 6) + label
    assert two.total - 2 * one.total == 3 * 4 * N * 4 * 6  # the second step sees its own key too


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="policy=Qwen3MoeConfig must have dense blocks only"):
        policy_flops(Qwen3MoeConfig.qwen3_235b_a22b(), N)
    with pytest.raises(ValueError, match="draft=NGramConfig must be eagle3"):
        draft_flops(NGramConfig(), N)
    with pytest.raises(ValueError, match="draft=MtpConfig must be eagle3"):
        draft_flops(MtpConfig.for_target(POLICY, like_policy=True), N)
