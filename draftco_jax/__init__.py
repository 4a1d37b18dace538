"""draftco: GRPO with lossless speculative rollouts and a draft trained inside the policy's own update.

import draftco_jax as dc

config = dc.load_config("configs/grpo_arithmetic2_eagle3_cpu.py", ["steps=20"])
dc.train(config, "runs/mine")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftco_jax.config import RunConfig, load_config
    from draftco_jax.drafts.dflash.config import DFlashConfig
    from draftco_jax.drafts.dspark.config import DSparkConfig
    from draftco_jax.drafts.eagle3.config import Eagle3Config
    from draftco_jax.drafts.mtp.config import MtpConfig
    from draftco_jax.drafts.ngram.config import NGramConfig
    from draftco_jax.drafts.self_int8.config import SelfInt8Config
    from draftco_jax.drafts.suffix.config import SuffixConfig
    from draftco_jax.errors import UserError
    from draftco_jax.loop import train
    from draftco_jax.models.compute import ComputeConfig, DtypeConfig
    from draftco_jax.models.gpt_oss import GptOssConfig
    from draftco_jax.models.hf_weights import load_policy, save_policy
    from draftco_jax.models.llama import LlamaConfig
    from draftco_jax.models.nemotron_h import NemotronHConfig
    from draftco_jax.models.qwen3 import Qwen3Config
    from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
    from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
    from draftco_jax.pretrain import pretrain
    from draftco_jax.pretrain_config import PretrainConfig, load_pretrain_config

__all__ = [
    "ComputeConfig",
    "DFlashConfig",
    "DSparkConfig",
    "DtypeConfig",
    "Eagle3Config",
    "GptOssConfig",
    "LlamaConfig",
    "MtpConfig",
    "NGramConfig",
    "NemotronHConfig",
    "PretrainConfig",
    "Qwen35MoeConfig",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "RunConfig",
    "SelfInt8Config",
    "SuffixConfig",
    "UserError",
    "load_config",
    "load_policy",
    "load_pretrain_config",
    "pretrain",
    "save_policy",
    "train",
]

_HOMES = {
    "ComputeConfig": "draftco_jax.models.compute",
    "DFlashConfig": "draftco_jax.drafts.dflash.config",
    "DSparkConfig": "draftco_jax.drafts.dspark.config",
    "DtypeConfig": "draftco_jax.models.compute",
    "Eagle3Config": "draftco_jax.drafts.eagle3.config",
    "GptOssConfig": "draftco_jax.models.gpt_oss",
    "LlamaConfig": "draftco_jax.models.llama",
    "MtpConfig": "draftco_jax.drafts.mtp.config",
    "NGramConfig": "draftco_jax.drafts.ngram.config",
    "NemotronHConfig": "draftco_jax.models.nemotron_h",
    "PretrainConfig": "draftco_jax.pretrain_config",
    "Qwen35MoeConfig": "draftco_jax.models.qwen3_5_moe",
    "Qwen3Config": "draftco_jax.models.qwen3",
    "Qwen3MoeConfig": "draftco_jax.models.qwen3_moe",
    "RunConfig": "draftco_jax.config",
    "SelfInt8Config": "draftco_jax.drafts.self_int8.config",
    "SuffixConfig": "draftco_jax.drafts.suffix.config",
    "UserError": "draftco_jax.errors",
    "load_config": "draftco_jax.config",
    "load_policy": "draftco_jax.models.hf_weights",
    "load_pretrain_config": "draftco_jax.pretrain_config",
    "pretrain": "draftco_jax.pretrain",
    "save_policy": "draftco_jax.models.hf_weights",
    "train": "draftco_jax.loop",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `draftco --help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
