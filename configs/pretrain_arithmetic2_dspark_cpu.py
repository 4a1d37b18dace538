"""Pre-training of a DSpark draft (blocks of 5 drafts) of the 2-digit policy, on two CPU cores in a few minutes.

    draftco pretrain-draft --config configs/pretrain_arithmetic2_dspark_cpu.py --run-dir runs/draft-dspark

The recipe of the 3-digit policy, for a narrower one.
"""

from dataclasses import replace

from pretrain_arithmetic2_eagle3_cpu import get_config as two_digits
from pretrain_arithmetic3_dspark_cpu import get_config as three_digits

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
