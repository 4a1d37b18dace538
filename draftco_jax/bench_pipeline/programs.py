"""What is read from compiled updates on virtual devices: bytes and permutes of features by transport, memory over M.

Sizes are tiny, since neither bytes over a formula nor whether memory grows depends on them. Numbers are float32: XLA
sends bfloat16 as float32 on a CPU. Eq. 5 of arXiv 2609.07108 lets each feature of a micro-batch that is made on another
stage than the one it is used on cross the network once; the final state counts as a feature.

Letters: S stages, M micro-batches, A bytes of a feature of one micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from draftco_jax.context_parallel import PackedRows
from draftco_jax.context_parallel.traffic import Collective, collectives
from draftco_jax.distributed.axes import MeshAxis, make_mesh
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.compute import FLOAT32
from draftco_jax.models.functional import graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pipeline.host_staging import MEMORY
from draftco_jax.pipeline.layout import split_layers
from draftco_jax.pipeline.schedule import ScheduleName
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.pipeline.tap_channel import TAPS_SCOPE, Baseline, Placement, TapMode, TapPlan
from draftco_jax.training.algorithm import GrpoConfig
from draftco_jax.training.objective import ObjectiveSpec
from draftco_jax.training.update import joint_gradients
from draftco_jax.types import PackedBatch

TOKENS, WIDTH, LAYERS_A_STAGE = 64, 64, 2
FEATURE_BYTES = TOKENS * WIDTH * 4
"""A: one row of tokens is a micro-batch."""
OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Programs are read and hardly run: what LLVM makes of their loops does not matter."""


class Transport(NamedTuple):
    """A placement of the draft and a way for features to get there."""

    placement: Placement
    mode: TapMode | Baseline


TRANSPORTS: dict[str, Transport] = {
    "all_stages": Transport("all_stages", "direct"),
    "last_stage": Transport("last_stage", "direct"),
    "relay": Transport("last_stage", "relay"),
    "host": Transport("last_stage", "host"),
}


def device_facts(stages: int, microbatches: int, memory_microbatches: Sequence[int]) -> dict[str, Any]:
    """Everything of this module. Needs as many devices as stages."""
    programs = {name: Program(stages, microbatches, *route) for name, route in TRANSPORTS.items()}
    rows = {name: program.traffic() for name, program in programs.items()}
    memory = []
    for schedule in ("1f1b", "gpipe"):
        for count in memory_microbatches:
            program = _compiled(programs, stages, count, schedule)
            sent = program.traffic()
            ratio = sent["tap_bytes"] / sent["eq5_bytes"]
            row: dict[str, Any] = {"schedule": schedule, "microbatches": count, "bytes": program.temp_bytes}
            memory.append(row | {"tap_bytes_over_eq5": ratio, "formula": program.formula()})
    return {
        "tap_bytes_over_eq5": {name: row["tap_bytes"] / row["eq5_bytes"] for name, row in rows.items()},
        "tap_bytes_over_eq5_formula": {name: programs[name].formula() for name in rows},
        "transports": rows,
        "feature_bytes": FEATURE_BYTES,
        "temp_bytes_by_microbatches": memory,
        "host_staged_bytes": programs["host"].run_staged(),
    }


class Program:
    """One update's gradients, compiled when asked."""

    def __init__(
        self,
        stages: int,
        microbatches: int,
        placement: Placement = "all_stages",
        mode: TapMode | Baseline = "direct",
        schedule: ScheduleName = "1f1b",
    ) -> None:
        self.stages, self.microbatches = stages, microbatches
        policy, draft = models(stages)
        layout = split_layers(policy.layer_kinds, stages=stages)
        pipeline = PipelineSpec(
            layout=layout,
            microbatches=microbatches,
            schedule=schedule,
            draft_placement=placement,
            tap_mode=mode,
            head_placement="last_stage",  # on all stages its collectives stand under a condition, and are not counted
        )
        self.plan: TapPlan = pipeline.plan(draft.tap_layers)
        self.build = {"policy": partial(_staged, policy, layout), "draft": draft.build}
        self.spec = ObjectiveSpec(
            policy_graph=graph_of(self.build["policy"]),
            draft_graph=graph_of(draft.build),
            draft_cfg=draft,
            algorithm=GrpoConfig(),
            sampling=SamplingConfig(),
            chunk_tokens=TOKENS,
            draft_length=2,
            packed=PackedRows(),
            pipeline=pipeline,
        )
        self._compiled: jax.stages.Compiled | None = None

    @property
    def compiled(self) -> jax.stages.Compiled:
        """Kept: it takes a quarter of a minute."""
        if self._compiled is None:
            run = jax.jit(joint_gradients(self.spec, make_mesh({MeshAxis.STAGE: self.stages})))
            shapes = jax.eval_shape(self.arguments)
            self._compiled = run.lower(*shapes).compile(compiler_options=OPTIONS)
        return self._compiled

    @property
    def temp_bytes(self) -> int:
        """What the compiler plans for everything between arguments and results, on one device."""
        planned = self.compiled.memory_analysis()
        assert planned is not None, "compilers for CPUs say what they plan"
        return int(planned.temp_size_in_bytes)

    def arguments(self) -> tuple[Any, ...]:
        """Of the gradients; one document a row."""
        models = {name: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(0)))) for name, build in self.build.items()}
        ones = jnp.ones((self.microbatches, TOKENS), jnp.float32)
        ids = ones.astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32)[None], ids.shape)
        batch = PackedBatch(
            tokens=ids,
            positions=positions,
            segment_ids=ids,
            sample_ids=ids,
            label_mask=ones,
            label_logprobs=-ones,
            label_advantages=ones,
            label_rewards=ones,
        )
        return models, batch, jnp.float32(1.0), None, None, jax.random.key(0)

    def traffic(self) -> dict[str, Any]:
        """Permutes of features and of activations, and what Eq. 5 lets the features take."""
        permutes = [c for c in collectives(self.compiled.as_text() or "") if c.kind == "collective-permute"]
        taps = [c for c in permutes if TAPS_SCOPE in c.name]
        others = [c for c in permutes if TAPS_SCOPE not in c.name]
        return {
            "tap_bytes": _bytes(taps),
            "tap_permutes": sum(c.times for c in taps),
            "activation_bytes": _bytes(others),
            "activation_permutes": sum(c.times for c in others),
            "eq5_bytes": remote_features(self.plan) * FEATURE_BYTES,
        }

    def formula(self) -> float:
        """What `tap_bytes` over Eq. 5 should be.

        last_stage sends in every tick with a forward, M + S - 1 of them for M micro-batches; relay on as many links as
        a feature crosses. all_stages sends for each group of S micro-batches. host sends a count from stage to stage.
        """
        total = self.plan.schedule.microbatches
        ticks = (total + self.stages - 1) / total
        if self.plan.placement == "all_stages":
            return 1.0
        hops = [self.stages - 1 - made for made in self.plan.made_at if made != self.stages - 1]
        count = ticks * (self.stages - 1) * 4 / (len(hops) * FEATURE_BYTES)
        return {"direct": ticks, "relay": ticks * sum(hops) / len(hops), "host": count}[self.plan.mode]

    def run_staged(self) -> dict[str, int]:
        """host: run one update, and count what went to host memory and came back."""
        MEMORY.clear()
        jax.block_until_ready(self.compiled(*jax.device_put(self.arguments(), self.compiled.input_shardings[0])))
        jax.effects_barrier()
        return {"to_host": MEMORY.bytes_in, "from_host": MEMORY.bytes_out}


def models(stages: int) -> tuple[Qwen3Config, Eagle3Config]:
    """A policy of two layers a stage whose first layer of each stage is tapped, and both layers of the second."""
    policy = Qwen3Config(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS_A_STAGE * stages,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2 * TOKENS,
    )
    taps = sorted({*range(0, LAYERS_A_STAGE * stages, LAYERS_A_STAGE), LAYERS_A_STAGE + 1})
    return policy, dataclasses.replace(Eagle3Config.for_target(policy, passes=1), tap_layers=tuple(taps))


def remote_features(plan: TapPlan) -> int:
    """Features of all micro-batches that are used on another stage than the one they are made on."""
    stages, total = plan.layout.stages, plan.schedule.microbatches
    used = np.arange(total) % stages if plan.placement == "all_stages" else np.full(total, stages - 1)
    made = np.array(plan.made_at) % stages
    return int((made[None] != used[:, None]).sum())


def _staged(policy: Qwen3Config, layout: Any, rngs: nnx.Rngs) -> StagedDecoder:
    return StagedDecoder(policy, layout, FLOAT32, rngs=rngs)


def _bytes(found: Sequence[Collective]) -> int:
    """Of all pairs of all permutes, as often as they run."""
    return sum(c.total_bytes * c.pairs for c in found)


def _compiled(programs: Mapping[str, Program], stages: int, microbatches: int, schedule: ScheduleName) -> Program:
    """With the draft on all stages; the one that is there already where it is the same."""
    found = programs["all_stages"]
    if (found.microbatches, schedule) == (microbatches, found.plan.schedule.name):
        return found
    return Program(stages, microbatches, schedule=schedule)
