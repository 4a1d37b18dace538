"""Tests of the fields of block drafts: published defaults, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftco_jax.config_io import from_json, to_json
from draftco_jax.drafts.blocks.config import default_taps, published_decay
from draftco_jax.drafts.dflash import DFLASH
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark import DSPARK
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.qwen3 import Qwen3Config

POLICY = Qwen3Config.qwen3_8b()
FLASH = DFlashConfig.for_target(POLICY, mask_token_id=151669)
SPARK = DSparkConfig.for_target(POLICY, mask_token_id=151669)


def test_published_drafts_of_qwen3_8b():
    assert FLASH.tap_layers == SPARK.tap_layers == (1, 9, 17, 25, 33)
    assert (FLASH.num_hidden_layers, FLASH.block_size, FLASH.max_draft_length, FLASH.loss_decay_gamma) == (5, 16, 15, 7)
    assert (SPARK.block_size, SPARK.max_draft_length, SPARK.markov_rank, SPARK.loss_decay_gamma) == (7, 7, 256, 4)
    assert FLASH.loss == DraftLossConfig(hard_cross_entropy=1.0) and FLASH.proposals == "argmax"
    assert SPARK.loss == DraftLossConfig(hard_cross_entropy=0.1, l1=0.9) and SPARK.confidence_loss_weight == 1.0
    assert SPARK.sample_from_anchor and SPARK.markov_head_type == "vanilla" and SPARK.confidence_head_with_markov
    assert FLASH.num_anchors == SPARK.num_anchors == 512 and FLASH.layer_types == ("full_attention",) * 5
    for cfg in (FLASH, SPARK):
        cfg.check_target(POLICY)


@pytest.mark.parametrize(
    ("count", "layers", "expected"),
    [
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 32, (1, 8, 15, 22, 29)),
        (5, 40, (1, 10, 19, 28, 37)),
        (5, 64, (1, 16, 31, 46, 61)),
        (1, 36, (18,)),
        (5, 4, (0, 1, 2, 3)),
        (5, 6, (1, 2, 3)),
    ],
)
def test_default_taps(count, layers, expected):
    assert default_taps(count, layers) == expected


def test_decay_follows_the_block():
    assert [published_decay(b) for b in (16, 10, 8, 6)] == [7, 5, 4, 3]
    assert DFlashConfig.for_target(POLICY, mask_token_id=1, block_size=8).loss_decay_gamma == 4
    plain = DFlashConfig.for_target(POLICY, mask_token_id=1, block_size=8, loss_decay_gamma=None)
    assert plain.loss_decay_gamma is None


def test_the_mask_token_has_no_default():
    with pytest.raises(TypeError, match="mask_token_id"):
        DFlashConfig.for_target(POLICY)  # pyright: ignore


@pytest.mark.parametrize(
    ("cfg", "changes", "words"),
    [
        (FLASH, {"mask_token_id": 151936}, "mask_token_id=151936 must be in 0..151935; take"),
        (FLASH, {"mask_token_id": -1}, "mask_token_id=-1 must be in 0..151935; take"),
        (FLASH, {"block_size": 1}, "block_size=1 must leave room for a draft; 16 is usual"),
        (SPARK, {"block_size": 0}, "block_size=0 must leave room for a draft"),
        (FLASH, {"tap_layers": (3, 1)}, "tap_layers=.* must be increasing"),
        (FLASH, {"layer_types": ("full_attention",)}, "layer_types=.* must be 5 times"),
        (FLASH, {"layer_types": ("linear_attention",) * 5}, "layer_types=.* must be 5 times"),
        (FLASH, {"layer_types": ("sliding_attention",) * 5}, "sliding_window=None must be >= 1"),
        (FLASH, {"row_anchors": 0}, "row_anchors=0 must be >= 1; use none"),
        (FLASH, {"num_anchors": 0}, "num_anchors=0 must be >= 1"),
        (FLASH, {"loss_decay_gamma": 0.0}, "loss_decay_gamma=0.0 must be > 0; use none"),
        (FLASH, {"head_dim": 5}, "head_dim=5 must be even"),
        (SPARK, {"markov_rank": -1}, "markov_rank=-1 must be >= 0; use 0"),
        (SPARK, {"markov_rank": 0}, "confidence_head_with_markov=True must be False"),
        (SPARK, {"confidence_loss_weight": -1.0}, "confidence_loss_weight=-1.0 must be >= 0; use 0"),
    ],
)
def test_values_that_fit_nothing_are_refused_in_one_line(cfg, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        replace(cfg, **changes)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_a_draft_of_another_policy_is_refused():
    with pytest.raises(ValueError, match="hidden_size=4096 must equal the policy's 128"):
        FLASH.check_target(Qwen3Config.tiny(vocab_size=151936))


@pytest.mark.parametrize(("family", "cfg"), [(DFLASH, FLASH), (DSPARK, SPARK)], ids=["dflash", "dspark"])
def test_a_family_knows_its_config_and_a_config_survives_json(family, cfg):
    assert family.config is type(cfg) and family.trained
    assert from_json(type(cfg), to_json(cfg)) == cfg
    other = replace(cfg, num_anchors=7, loss=DraftLossConfig(l1=1.0), tap_layers=(0, 1, 2, 3, 4))
    assert cfg.with_training_of(other) == replace(cfg, num_anchors=7, loss=DraftLossConfig(l1=1.0))


def test_a_tiny_policy_gets_a_draft_that_can_be_built():
    cfg = DSparkConfig.for_target(Qwen3Config.tiny(), mask_token_id=31, num_hidden_layers=1, markov_rank=8)
    assert cfg.tap_layers == (0, 1) and cfg.vocab_size == 32
