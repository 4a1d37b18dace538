"""A whole run on math problems from files, with a tiny policy of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

import draftco_jax as dc
from draftco_jax.metrics import read_metrics

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"

CONFIG = """
import draftco_jax as dc
from draftco_jax.config import CheckpointConfig, EvaluationConfig, RolloutConfig, SpeedConfig
from draftco_jax.data.problem_files import FileRules
from draftco_jax.environments.math import MathConfig
from draftco_jax.training.optimizer import OptimizerConfig


def get_config():
    return dc.RunConfig(
        steps=1,
        task=MathConfig(
            train="{folder}/train.jsonl",
            held_out="{folder}/test.jsonl",
            files=FileRules(layout="gsm8k"),
            model_dir="{folder}",
            reward="judges_of_additions:length",
            score_truncated=True,
            max_prompt_tokens=24,
            max_response_tokens=12,
        ),
        policy=dc.Qwen3Config(
            vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        ),
        policy_checkpoint=None,
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=2),
        policy_optimizer=OptimizerConfig(learning_rate=1e-3),
        speculation="off",
        evaluation=EvaluationConfig(prompts=16),  # as many as the sequences of a step, so that one program does
        speed=SpeedConfig(repetitions=0),
    )
"""

JUDGE = """
def length(response, answer):
    return {"total": len(response) / 20, "correct": 0.0, "gold": float(answer)}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes, 24 problems in GSM8K's layout, a scoring function, a config file."""
    alphabet = ["<s>", "<e>", "<end>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in alphabet[:3]])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": TEMPLATE}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    rows = [{"question": f"{i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(24)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
    (tmp_path / "judges_of_additions.py").write_text(JUDGE)
    (tmp_path / "additions.py").write_text(CONFIG.replace("{folder}", str(tmp_path)))
    return tmp_path


def test_a_config_file_trains_on_eight_problems_and_says_what_it_read(folder: Path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    config = dc.load_config(folder / "additions.py", ["task.max_response_tokens=10"])
    dc.train(config, folder / "run")
    before, step = read_metrics(folder / "run")
    assert (before["eval/prompts"], before["eval/pass_rate"]) == (16, 0.0)
    assert step["reward/component_gold"] == sum(2 * i for i in range(8)) / 8, (
        "each problem was scored by its own answer"
    )
    assert step["reward/component_correct"] == step["reward/faults_fraction"] == 0.0
    assert 0 < step["reward/mean"] <= 1.0 and 0 < step["rollout/response_tokens_mean"] <= 10
    assert step["policy/gradient_norm"] > 0.0
    told = "".join(capfd.readouterr())
    assert "train.jsonl: 8 rows, 8 used" in told and "test.jsonl: 16 rows, 16 used" in told
