"""What is counted for Qwen3-8B: the draft on the critical path, what it adds to an update, waiting for taps.

Work is counted FLOPs (`planner.flops`) of one document a micro-batch, spread evenly over the devices that share it: the
policy over stages, tensor and context ranks, a draft over context ranks, since every tensor rank has all of it. On all
stages its micro-batches are dealt out over tensor ranks too; on the last stage every rank computes it (a second figure
has it split like the policy). The policy's head is where the draft is: all on the last stage, as published, or a part
of the tokens on each. Stages move in step, so times are ratios of FLOPs; only waiting for taps needs a rate and
bandwidths, which are assumed.

Letters: S stages, T tensor ranks, M micro-batches, f and b forward and backward of a stage, h the head with its loss, d
the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.pipeline.layout import split_layers
from draftco_jax.pipeline.mailbox import Placement
from draftco_jax.pipeline.schedule import Schedule, make_schedule
from draftco_jax.pipeline.slack import Costs, Form, draft_critical_path, tap_wait_share
from draftco_jax.planner.flops import Counting, draft_flops, policy_flops

PLACEMENTS: tuple[Placement, ...] = ("last_stage", "all_stages")
TENSOR = CONTEXT = 2
PAPER_STAGES = 2
PUBLISHED_VOCABULARY = 32000
"""Draft ids of the EAGLE-3 drafts published for this policy."""
BANDWIDTHS = (0.5, 1, 2, 5, 10, 25, 50, 100, 200, 400)
"""GB a second of one device."""
RATIO_TARGET = 0.3
TARGETS = {"eagle3": 0.10, "dflash": 0.05, "dspark": 0.05}
PAPER: dict[str, Any] = {
    "source": "arXiv 2609.07108, Table 2: Qwen3-8B on H100, tensor 2, stage 2, context 2; micro-batches not printed",
    "update_seconds": {"none": 31.5, "eagle3": 42.4, "dflash": 35.8, "dspark": 36.1},
    "update_overhead": {"eagle3": 0.343, "dflash": 0.136, "dspark": 0.146},
    "tap_wait_seconds": {"eagle3": 0.37, "dflash": 0.57, "dspark": 0.54},
}
POLICY = Qwen3Config.qwen3_8b()


def drafts() -> dict[str, DraftConfig]:
    """The published shapes on this policy; EAGLE-3 also with the policy's whole vocabulary."""
    return {
        "eagle3": Eagle3Config.for_target(POLICY, draft_vocab_size=PUBLISHED_VOCABULARY),
        "eagle3_whole_vocabulary": Eagle3Config.for_target(POLICY),
        "dflash": DFlashConfig.for_target(POLICY, mask_token_id=0),
        "dspark": DSparkConfig.for_target(POLICY, mask_token_id=0),
        "mtp": MtpConfig.for_target(POLICY),
    }


def stage_costs(stages: int, tokens: int, counting: Counting, tensor: int = TENSOR) -> tuple[Costs, float]:
    """f and b, and h, in FLOPs of one device; layers are spread evenly, in fractions if need be."""
    flops = policy_flops(POLICY, tokens, counting)
    shared = tensor * CONTEXT
    layers = POLICY.num_hidden_layers / stages
    costs = Costs(forward=layers * flops.layer.forward / shared, backward=layers * flops.layer.backward / shared)
    return costs, flops.head.total / shared


def draft_cost(cfg: DraftConfig, tokens: int, counting: Counting) -> float:
    """d, in FLOPs of one device."""
    return draft_flops(cfg, tokens, counting).total / CONTEXT


def critical_path_rows(stages: int, microbatches: int, tokens: int) -> list[dict[str, Any]]:
    """What the draft adds to the ticks of an update on S stages, by placement, over the update without it."""
    schedule = make_schedule("1f1b", stages=stages, microbatches=microbatches)
    rows = []
    for tensor in (1, TENSOR):
        costs, head = stage_costs(stages, tokens, "needed", tensor)
        for family, cfg in drafts().items():
            cost = draft_cost(cfg, tokens, "needed")
            row: dict[str, Any] = {"family": family, "tensor": tensor}
            row |= added_shares(schedule, costs, head, cost, tensor)
            paths = (draft_critical_path(schedule, cost, place, tensor_ranks=tensor) for place in PLACEMENTS)
            last, everywhere = paths
            rows.append(row | {"ratio": everywhere.added / last.added})
    return rows


def added_shares(schedule: Schedule, costs: Costs, head: float, draft: float, tensor: int) -> dict[str, float]:
    """What the draft adds to an update over the update without it, by placement.

    In step every micro-batch costs the head on top of a stage's work: (M + S - 1)(f + b) + M h on the last stage and
    h / S on all of them. A draft adds M d on the last stage, and d for each round of S T micro-batches on all of them.
    """
    shares = {}
    for place in PLACEMENTS:
        path = draft_critical_path(schedule, draft, place, costs=costs, tensor_ranks=tensor)
        of_head = head if place == "last_stage" else head / schedule.stages
        shares[place] = path.added / (path.without + schedule.microbatches * of_head)
    return shares


def overhead_rows(microbatches: int, tokens: int) -> list[dict[str, Any]]:
    """(critical path with the draft / without) - 1 on the paper's mesh."""
    schedule = make_schedule("1f1b", stages=PAPER_STAGES, microbatches=microbatches)
    rows = []
    for counting in get_args(Counting):
        costs, head = stage_costs(PAPER_STAGES, tokens, counting)
        for family, cfg in drafts().items():
            cost = draft_cost(cfg, tokens, counting)
            row: dict[str, Any] = {"family": family, "counting": counting}
            row |= added_shares(schedule, costs, head, cost, TENSOR)
            split = added_shares(schedule, costs, head, cost / TENSOR, TENSOR)["last_stage"]
            row |= {"last_stage_split": split, "paper": PAPER["update_overhead"].get(family)}
            rows.append(row | {"target": TARGETS.get(family)})
    return rows


def wait_rows(stages: int, microbatches: int, tokens: int, teraflops: float) -> list[dict[str, Any]]:
    """Share of an update spent waiting for taps, with the draft on the last stage; bfloat16 features.

    Every tensor rank sends its own copy of a feature, of its part of the tokens. The head is left out, so that there
    is less to hide behind than there will be.
    """
    layout = split_layers(POLICY.layer_kinds, stages=stages)
    work, _ = stage_costs(stages, tokens, "executed")
    feature = tokens / CONTEXT * POLICY.hidden_size * 2
    rate = teraflops * 1e12
    rows = []
    for family in ("eagle3", "dflash"):
        cfg = drafts()[family]
        made = [layout.stage_of(layer) for layer in cfg.tap_layers]
        draft = draft_cost(cfg, tokens, "executed")
        costs = Costs(forward=work.forward / rate, backward=work.backward / rate, draft=draft / rate)
        for form in get_args(Form):
            share = tap_wait_share(
                form,
                stages=stages,
                microbatches=microbatches,
                costs=costs,
                features={k: made.count(k) for k in sorted(set(made)) if k < stages - 1},
                feature_times=[feature / (1e9 * bandwidth) for bandwidth in BANDWIDTHS],
            )
            rows.append({"family": family, "form": form, "share": share.tolist()})
    return rows


def counted(stages: int, microbatches: int, tokens: int, teraflops: float) -> dict[str, Any]:
    """All of it."""
    critical = critical_path_rows(stages, microbatches, tokens)
    return {
        "draft_critical_path": critical,
        "draft_critical_path_all_over_last": max(row["ratio"] for row in critical),
        "update_overhead": overhead_rows(microbatches, tokens),
        "flops": _flop_rows(tokens),
        "tap_wait_share": wait_rows(stages, microbatches, tokens, teraflops),
        "tap_wait_bandwidths": list(BANDWIDTHS),
        "targets": {"draft_critical_path_all_over_last": RATIO_TARGET, "update_overhead": TARGETS},
        "paper": PAPER,
    }


def _flop_rows(tokens: int) -> list[dict[str, Any]]:
    """Of one micro-batch, all devices together."""
    rows: list[dict[str, Any]] = []
    countings: Sequence[Counting] = get_args(Counting)
    for counting in countings:
        policy = policy_flops(POLICY, tokens, counting)
        layers = POLICY.num_hidden_layers * policy.layer.total
        parts = {"policy layers": layers, "policy head": policy.head.total}
        parts |= {family: draft_flops(cfg, tokens, counting).total for family, cfg in drafts().items()}
        rows += [{"what": what, "counting": counting, "flops": flops} for what, flops in parts.items()]
    return rows
