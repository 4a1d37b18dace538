"""Tests that configs of this folder's family and its neighbours without weights of their own survive a saved run."""

from __future__ import annotations

import json

import pytest

from draftco_jax.config_io import from_json, to_json
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.models.families import policy_configs
from draftco_jax.models.qwen3 import Qwen3Config

CONFIGS = [
    NGramConfig(max_match=7),
    SuffixConfig(use_siblings=False, history_tokens=9),
    PreviousConfig(policy=Qwen3Config.tiny(), history_tokens=64),
    MtpConfig.for_target(Qwen3Config.tiny(), style="deepseek"),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg).__name__)
def test_a_draft_config_is_read_back_as_it_was_saved(cfg):
    saved = json.loads(json.dumps(to_json(cfg)))
    assert from_json(type(cfg), saved, policy_configs()) == cfg
    assert cfg.tap_layers == () and "tap_layers" not in saved
