"""From a task's config to the task."""

from __future__ import annotations

from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.environments.base import Split, Task
from draftco_jax.environments.math import MathConfig, MathTask
from draftco_jax.environments.reasoning_gym import ReasoningGymConfig, ReasoningGymTask
from draftco_jax.environments.word_problems import WordProblemsConfig, WordProblemsTask
from draftco_jax.text.tokenizer import Tokenizer

TaskConfig = ArithmeticConfig | MathConfig | ReasoningGymConfig | WordProblemsConfig


def build_task(config: TaskConfig, seed: int, split: Split = "train") -> Task:
    """The task a config asks for; the two splits of one config share no problem."""
    match config:
        case ArithmeticConfig():
            return ArithmeticTask(config, seed, split)
        case MathConfig():
            return MathTask(config, split)
        case ReasoningGymConfig():
            return ReasoningGymTask(config, seed, Tokenizer.load(config.tokenizer_dir), split)
        case WordProblemsConfig():
            return WordProblemsTask(config, split)
