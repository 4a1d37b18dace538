"""Make the shipped warm starts: a policy that knows the algorithm but slips, and drafts that know the policy.

The policy is fine-tuned on demonstrations whose digit sums are wrong with probability `noise`. It learns the right
algorithm (greedy decoding is right) and samples the slips, so that RL starts with a clear signal. The drafts are
pre-trained on the policy's own rollouts, each by its file in configs/. All are written in their official layouts, with
a card of what was measured.

    python -m draftco_jax.warm_start --digits 3 --out draftco_jax/assets/arithmetic3
    python -m draftco_jax.warm_start --digits 3 --out draftco_jax/assets/arithmetic3 --draft dflash
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from draftco_jax.config_io import to_json
from draftco_jax.data.packing import pack_supervised
from draftco_jax.decoding.engine import Engine, EngineShape
from draftco_jax.drafts.catalog import family_of
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.errors import UserError
from draftco_jax.evaluation import Evaluation, Evaluator
from draftco_jax.metrics import write_text_whole
from draftco_jax.models.functional import Params, graph_of, initialise
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pretrain import DRAFT_FOLDER, pretrain
from draftco_jax.pretrain_config import PretrainConfig, load_pretrain_config
from draftco_jax.training.fine_tune import fine_tune
from draftco_jax.training.optimizer import OptimizerConfig
from draftco_jax.types import PackedBatch, PolicyVersion
from draftco_jax.weight_sync import Publisher


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A policy and its EAGLE-3 draft, whose fields say in short what the draft's config file says in full."""

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
EVAL_PROMPTS = 256

# Folder of each draft beside the policy.
DRAFTS = {"eagle3": "draft", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


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


def make_policy(recipe: WarmStart, task: ArithmeticTask, log: Callable[..., None]) -> tuple[Qwen3Config, Params]:
    """Fine-tune fresh weights on noisy demonstrations."""
    cfg = Qwen3Config.tiny(hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size)
    graph, policy = initialise(cfg.build, jax.random.fold_in(jax.random.key(recipe.seed), 0))
    optimizer = OptimizerConfig(
        learning_rate=recipe.policy_learning_rate, schedule="cosine", warmup_steps=20, weight_decay=0.01
    )
    batches = demonstrations(task, recipe)
    return cfg, fine_tune(graph, policy, batches, optimizer, steps=recipe.policy_steps, on_step=log)


def draft_recipe(digits: int, name: str) -> PretrainConfig:
    """How a shipped draft is made: its config file, which is part of the repository and not of the package."""
    return load_pretrain_config(CONFIGS / f"pretrain_arithmetic{digits}_{name}_cpu.py")


def make_draft(digits: int, name: str, out: Path) -> dict[str, Any]:
    """Pre-train a draft for the policy in `out`, write it beside the policy, return what the card says of it."""
    config, folder = draft_recipe(digits, name), out / DRAFTS[name]
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / name
        summary = pretrain(replace(config, policy_checkpoint=str(out / "policy")), run_dir)
        if folder.is_dir():
            shutil.rmtree(folder)
        shutil.copytree(run_dir / DRAFT_FOLDER, folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files for their owner only
    return {
        "recipe": to_json(config),
        "parameters": summary["draft_parameters"],
        "training_seconds": round(summary["training_seconds"], 1),
        "accepted_length_draft_length_4_untrained": summary["accepted_length"]["untrained"],
    } | {"accepted_length_draft_length_4": measure_draft(digits, name, out)}


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


def make(recipe: WarmStart, out: Path) -> dict[str, Any]:
    """Train the policy and all drafts, write them, return the card."""
    task = ArithmeticTask(ArithmeticConfig(digits=recipe.digits), seed=recipe.seed)

    def log(step: int, loss: jax.Array, *_: Any) -> None:
        if step % 100 == 0:
            print(f"{recipe.digits} digits, step {step}: loss {float(loss):.4f}", flush=True)

    policy_cfg, policy = make_policy(recipe, task, log)
    save_policy(out / "policy", policy_cfg, policy)
    task.tokenizer.save(out / "policy")
    drafts = {name: make_draft(recipe.digits, name, out) for name in DRAFTS}
    return write_card(out, measure(recipe, out) | {"drafts": drafts})


def remake_draft(recipe: WarmStart, name: str, out: Path) -> dict[str, Any]:
    """Make one draft for the policy that is there, and bring the card up to date; the rest stays as it is."""
    path = out / "card.json"
    if not path.is_file():
        raise UserError(f"--out {out} has no card.json, so no policy to make a draft for; leave out --draft first")
    drafts = json.loads(path.read_text()).get("drafts", {}) | {name: make_draft(recipe.digits, name, out)}
    ordered = {known: drafts[known] for known in DRAFTS if known in drafts}
    whole = measure(recipe, out) if name == "eagle3" else json.loads(path.read_text())
    return write_card(out, whole | {"drafts": ordered})


def write_card(out: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Write the card, return it."""
    write_text_whole(out / "card.json", json.dumps(card, indent=2) + "\n")
    return card


def measure(recipe: WarmStart, folder: Path) -> dict[str, Any]:
    """Pass rates on held-out problems and the EAGLE-3 draft's accepted length, as a card states them."""
    evaluate = _evaluation(recipe.digits, recipe.seed, folder, "eagle3")
    plain, speculative = evaluate(1.0, 0), evaluate(1.0, 4)
    return {
        "recipe": asdict(recipe),
        "eval_prompts": EVAL_PROMPTS,
        "pass_rate_temperature_1": plain.pass_rate,
        "pass_rate_greedy": evaluate(0.0, 0).pass_rate,
        "pass_rate_temperature_1_speculative": speculative.pass_rate,
        "accepted_length_draft_length_4": speculative.accepted_length,
    }


def measure_draft(digits: int, name: str, folder: Path) -> float | None:
    """Accepted length of a draft on the same held-out problems."""
    return _evaluation(digits, RECIPES[digits].seed, folder, name)(1.0, 4).accepted_length


def _evaluation(digits: int, seed: int, folder: Path, name: str) -> Callable[[float, int], Evaluation]:
    """(temperature, draft length) -> what the policy and one draft of a folder do on held-out problems."""
    policy_cfg, policy = load_policy(folder / "policy")
    config = draft_recipe(digits, name).draft
    load = family_of(config).load
    assert load is not None
    _, graph, draft = load(folder / DRAFTS[name], config)
    publisher = Publisher(graph_of(policy_cfg.build), graph)
    graphs, weights = publisher.rollout_graphs(policy, draft), publisher.publish(policy, draft, PolicyVersion(0))
    held_out = ArithmeticTask(ArithmeticConfig(digits=digits), seed=seed, split="held_out")
    evaluator = Evaluator(held_out, prompts=EVAL_PROMPTS)

    def run(temperature: float, draft_length: int) -> Evaluation:
        engine = Engine(*graphs, shape=engine_shape(held_out), sampling=SamplingConfig(temperature=temperature))
        key = jax.random.key(seed + 1)
        return evaluator.run(engine, weights.policy, weights.draft, key, draft_length=draft_length)

    return run


def main() -> None:
    """Make one warm start, or one draft of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--digits", type=int, choices=sorted(RECIPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft", choices=sorted(DRAFTS), help="make only this draft, for the policy that is in --out")
    args = parser.parse_args()
    recipe = RECIPES[args.digits]
    try:
        card = remake_draft(recipe, args.draft, args.out) if args.draft else make(recipe, args.out)
    except UserError as error:
        parser.error(str(error))
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
