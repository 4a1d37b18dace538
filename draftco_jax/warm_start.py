"""Make the shipped warm starts: a policy that knows the algorithm but slips, and a draft that knows the policy.

The policy is fine-tuned on demonstrations whose digit sums are wrong with probability `noise`. It learns the right
algorithm (greedy decoding is right) and samples the slips, so that RL starts with a clear signal. The draft is trained
on the policy's own rollouts. Both are written in Hugging Face layout, with a card of what was measured.

    python -m draftco_jax.warm_start --digits 3 --out draftco_jax/assets/arithmetic3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from draftco_jax.data.packing import pack, pack_supervised
from draftco_jax.decoding.engine import Engine, EngineShape
from draftco_jax.drafts.eagle3.checkpoint import save_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.training import from_policy
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.evaluation import Evaluation, Evaluator, build_request
from draftco_jax.models.functional import ModelGraph, Params, initialise
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.rewards.exact import score
from draftco_jax.training.fine_tune import fine_tune
from draftco_jax.training.optimizer import OptimizerConfig
from draftco_jax.training.pretrain_draft import pretrain_draft
from draftco_jax.types import PackedBatch, PolicyVersion, ScoredRollouts
from draftco_jax.weight_sync import Publisher


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """One recipe."""

    digits: int
    hidden_size: int
    intermediate_size: int
    noise: float = 0.15
    policy_steps: int = 1200
    policy_learning_rate: float = 4e-3
    draft_intermediate_size: int = 128
    draft_heads: int = 2
    draft_kv_heads: int = 1
    draft_passes: int = 4
    draft_steps: int = 1500
    draft_learning_rate: float = 3e-3
    draft_rollouts: int = 4096
    batch_rows: int = 64
    seed: int = 0


RECIPES = {
    2: WarmStart(digits=2, hidden_size=96, intermediate_size=256),
    3: WarmStart(digits=3, hidden_size=128, intermediate_size=384),
}
_ROLLOUT_BATCH = 256
EVAL_PROMPTS = 256


def demonstrations(task: ArithmeticTask, recipe: WarmStart) -> Iterator[PackedBatch]:
    """Endless batches of noisy demonstrations, one to a row."""
    rng = np.random.default_rng(recipe.seed)
    index, row_tokens = 0, task.max_prompt_tokens + task.max_response_tokens
    while True:
        rows = []
        for _ in range(recipe.batch_rows):
            prompt = task.problem(index)
            text = task.demonstration(prompt, rng, recipe.noise)
            rows.append((prompt.token_ids, task.tokenizer.encode_response(text)))
            index += 1
        yield pack_supervised(rows, row_tokens, recipe.batch_rows)


def own_rollouts(
    engine: Engine, weights: Params, task: ArithmeticTask, recipe: WarmStart, key: jax.Array
) -> list[PackedBatch]:
    """The policy's own rollouts on training prompts, in batches of `batch_rows`."""
    batches = []
    for i in range(recipe.draft_rollouts // _ROLLOUT_BATCH):
        prompts = tuple(task.problem(i * _ROLLOUT_BATCH + j) for j in range(_ROLLOUT_BATCH))
        request = build_request(prompts, 1, engine.shape, jax.random.fold_in(key, i))
        rollouts = jax.device_get(engine.generate(weights, None, request))
        rewards = score(task, prompts, rollouts, task.tokenizer, 1)
        scored = ScoredRollouts(rollouts, prompts, rewards, PolicyVersion(0))
        packed = pack(scored, np.zeros_like(rewards), rollouts.tokens.shape[1], _ROLLOUT_BATCH)
        for first in range(0, _ROLLOUT_BATCH, recipe.batch_rows):
            batches.append(PackedBatch(*(a[first : first + recipe.batch_rows] for a in packed)))
    return batches


def make_policy(recipe: WarmStart, task: ArithmeticTask, log: Callable[..., None]) -> tuple[Qwen3Config, Params]:
    """Fine-tune fresh weights on noisy demonstrations."""
    cfg = Qwen3Config.tiny(hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size)
    graph, policy = initialise(cfg.build, jax.random.fold_in(jax.random.key(recipe.seed), 0))
    optimizer = OptimizerConfig(
        learning_rate=recipe.policy_learning_rate, schedule="cosine", warmup_steps=20, weight_decay=0.01
    )
    batches = demonstrations(task, recipe)
    return cfg, fine_tune(graph, policy, batches, optimizer, steps=recipe.policy_steps, on_step=log)


def make_draft(
    recipe: WarmStart, task: ArithmeticTask, policy_cfg: Qwen3Config, policy: Params, log: Callable[..., None]
) -> tuple[Eagle3Config, ModelGraph, Params]:
    """Train a fresh draft on the policy's own rollouts."""
    key = jax.random.key(recipe.seed)
    cfg = draft_config(recipe, policy_cfg)
    policy_graph, _ = initialise(policy_cfg.build, key)
    graph, draft = initialise(cfg.build, jax.random.fold_in(key, 1))
    publisher = Publisher(policy_graph, None)
    engine = Engine(*publisher.rollout_graphs(policy, None), shape=engine_shape(task), sampling=SamplingConfig())
    weights = publisher.publish(policy, None, PolicyVersion(0))
    batches = own_rollouts(engine, weights.policy, task, recipe, jax.random.fold_in(key, 2))
    rng = np.random.default_rng(recipe.seed)
    draft = pretrain_draft(
        policy_graph,
        policy,
        graph,
        from_policy(draft, policy),
        cfg,
        (batches[i] for i in iter(lambda: int(rng.integers(len(batches))), -1)),
        OptimizerConfig(learning_rate=recipe.draft_learning_rate, schedule="cosine", warmup_steps=10),
        steps=recipe.draft_steps,
        sampling=SamplingConfig(),
        draft_length=4,
        on_step=log,
    )
    return cfg, graph, draft


def draft_config(recipe: WarmStart, policy_cfg: Qwen3Config) -> Eagle3Config:
    """The draft of a recipe: as wide as the policy, since it reads its embeddings, with less inside."""
    return Eagle3Config.for_target(
        policy_cfg,
        intermediate_size=recipe.draft_intermediate_size,
        num_attention_heads=recipe.draft_heads,
        num_key_value_heads=recipe.draft_kv_heads,
        passes=recipe.draft_passes,
    )


def engine_shape(task: ArithmeticTask) -> EngineShape:
    """Room for the task's prompts and full answers."""
    return EngineShape(
        prompt_capacity=task.max_prompt_tokens,
        max_new_tokens=task.max_response_tokens,
        stop_ids=(task.tokenizer.eos_id,),
        pad_id=task.tokenizer.pad_id,
    )


def make(recipe: WarmStart, out: Path, policy_from: Path | None) -> dict[str, Any]:
    """Train both models (or only the draft, for the policy in `policy_from`), write them, return the card."""
    task = ArithmeticTask(ArithmeticConfig(digits=recipe.digits), seed=recipe.seed)

    def log(step: int, loss: jax.Array, *_: Any) -> None:
        if step % 100 == 0:
            print(f"{recipe.digits} digits, step {step}: loss {float(loss):.4f}", flush=True)

    policy_cfg, policy = load_policy(policy_from) if policy_from else make_policy(recipe, task, log)
    draft_cfg, draft_graph, draft = make_draft(recipe, task, policy_cfg, policy, log)
    save_policy(out / "policy", policy_cfg, policy)
    task.tokenizer.save(out / "policy")
    save_draft(out / "draft", draft_cfg, draft_graph, draft)
    card = measure(recipe, task, policy_cfg, policy, draft_graph, draft)
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def measure(
    recipe: WarmStart,
    task: ArithmeticTask,
    policy_cfg: Qwen3Config,
    policy: Params,
    draft_graph: ModelGraph,
    draft: Params,
) -> dict[str, Any]:
    """Pass rates on held-out problems and accepted length, as a card states them."""
    policy_graph, _ = initialise(policy_cfg.build, jax.random.key(0))
    publisher = Publisher(policy_graph, draft_graph)
    graphs, weights = publisher.rollout_graphs(policy, draft), publisher.publish(policy, draft, PolicyVersion(0))
    evaluator = Evaluator(ArithmeticTask(task.config, seed=recipe.seed, split="held_out"), prompts=EVAL_PROMPTS)

    def run(temperature: float, draft_length: int) -> Evaluation:
        engine = Engine(*graphs, shape=engine_shape(task), sampling=SamplingConfig(temperature=temperature))
        key = jax.random.key(recipe.seed + 1)
        return evaluator.run(engine, weights.policy, weights.draft, key, draft_length=draft_length)

    plain, speculative = run(1.0, 0), run(1.0, 4)
    return {
        "recipe": asdict(recipe),
        "eval_prompts": EVAL_PROMPTS,
        "pass_rate_temperature_1": plain.pass_rate,
        "pass_rate_greedy": run(0.0, 0).pass_rate,
        "pass_rate_temperature_1_speculative": speculative.pass_rate,
        "accepted_length_draft_length_4": speculative.accepted_length,
    }


def main() -> None:
    """Make one warm start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--digits", type=int, choices=sorted(RECIPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy-from", type=Path, help="keep the policy of this folder and make a draft for it")
    args = parser.parse_args()
    print(json.dumps(make(RECIPES[args.digits], args.out, args.policy_from), indent=2))


if __name__ == "__main__":
    main()
