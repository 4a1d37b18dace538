"""Pre-training of the EAGLE-3 draft of the 3-digit policy on its own rollouts, on two CPU cores in a few minutes.

draftco pretrain-draft --config configs/pretrain_arithmetic3_eagle3_cpu.py --run-dir runs/draft
"""

from draftco_jax.config import EvaluationConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.environments.arithmetic import ArithmeticConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.pretrain_config import OwnRolloutsConfig, PretrainConfig
from draftco_jax.training.optimizer import OptimizerConfig

POLICY = Qwen3Config.tiny(hidden_size=128, intermediate_size=384)


def get_config() -> PretrainConfig:
    return PretrainConfig(
        steps=1500,
        task=ArithmeticConfig(digits=3),
        policy=POLICY,
        policy_checkpoint="shipped:arithmetic3/policy",
        draft=Eagle3Config.for_target(
            POLICY, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, passes=4
        ),
        draft_length=4,
        rollout=OwnRolloutsConfig(sequences=4096),
        batch_rows=64,
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=10),
        evaluation=EvaluationConfig(prompts=256, every_steps=250),
    )
