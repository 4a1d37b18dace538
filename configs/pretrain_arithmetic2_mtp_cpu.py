"""Pre-training of an MTP head (4 recursive steps) of the 2-digit policy, on two CPU cores in a few minutes.

    draftco pretrain-draft --config configs/pretrain_arithmetic2_mtp_cpu.py --run-dir runs/draft-mtp

The recipe of the 3-digit policy, for a narrower one.
"""

from dataclasses import replace

from pretrain_arithmetic2_eagle3_cpu import get_config as two_digits
from pretrain_arithmetic3_mtp_cpu import get_config as three_digits

from draftco_jax.pretrain_config import PretrainConfig


def get_config() -> PretrainConfig:
    recipe, base = three_digits(), two_digits()
    return replace(
        recipe,
        task=base.task,
        policy=base.policy,
        policy_checkpoint=base.policy_checkpoint,
        draft=replace(recipe.draft, hidden_size=base.policy.hidden_size),
    )
