"""Policy and draft over pipeline stages, as compiled for 8 H100 in bfloat16: what hides behind what, and what it needs.

Small widths and long rows for the order of work, so that what travels matters and little else; Qwen3-8B as published
for the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from draftco_jax.context_parallel import PackedRows
from draftco_jax.distributed.compiler_options import update_options
from draftco_jax.distributed.sharding import shardings
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.compute import ComputeConfig, parameter_dtype
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pipeline.layout import split_layers
from draftco_jax.pipeline.lint import permutes_under_conditions
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder
from draftco_jax.pipeline.tap_channel import TAPS_SCOPE
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.update import (
    Optimizers,
    TrainState,
    batch_spec,
    init_state,
    joint_gradients,
    make_update,
    policy_specs,
    state_layout,
)
from draftco_jax.types import PackedBatch
from pallas_kernels.deviceless import gpu_mesh, permutes
from pallas_kernels.hlo_text import HloText, Operation

LONG, WIDTH = 65536, 512
SMALL = dataclasses.replace(
    Qwen3Config.tiny(vocab_size=512, hidden_size=WIDTH, intermediate_size=2 * WIDTH),
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=LONG,
)
EAGLE = dataclasses.replace(Eagle3Config.for_target(SMALL, passes=2), tap_layers=(1, 4, 6))
MESHES = {"4x2": {"stage": 4, "context": 2}, "2x2x2": {"stage": 2, "context": 2, "tensor": 2}}

LARGE = Qwen3Config.qwen3_8b()
BLOCKS = {"mask_token_id": LARGE.vocab_size - 1, "row_anchors": 512}
DRAFTS = {
    "eagle3": Eagle3Config.for_target(LARGE, passes=3),
    "dflash": DFlashConfig.for_target(LARGE, **BLOCKS),
    "dspark": DSparkConfig.for_target(LARGE, **BLOCKS),
    "mtp": MtpConfig.for_target(LARGE, steps=3),
}
H100_BYTES = 80e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An update and its arguments: shapes, and how they lie on 8 GPUs."""

    mesh: Any
    spec: ObjectiveSpec
    policy: Any
    draft: Any
    batch: PackedBatch
    weight: jax.ShapeDtypeStruct


def case_of(policy_cfg, draft_cfg, sizes, *, tokens: int, microbatches: int, tile: int) -> Case:
    mesh = gpu_mesh("h100", **sizes)
    layout = split_layers(policy_cfg.layer_kinds, stages=sizes["stage"])
    compute = ComputeConfig(dtype="bfloat16", parameter_dtype="bfloat16", remat="block")
    build = lambda rngs: StagedDecoder(policy_cfg, layout, compute, rngs=rngs)  # noqa: E731
    packed = PackedRows(
        ranks=sizes["context"],
        context_axis="context",
        tensor_axis="tensor" if "tensor" in sizes else None,
        implementation="pallas",
    )
    spec = ObjectiveSpec(
        policy_graph=graph_of(build),
        draft_graph=graph_of(draft_cfg.build),
        draft_cfg=draft_cfg,
        algorithm=GrpoConfig(),
        sampling=SamplingConfig(temperature=0.8),
        chunk_tokens=1024,
        draft_length=3,
        packed=packed,
        draft_dtype="bfloat16",
        vocabulary_tile=tile,
        pipeline=PipelineSpec(layout=layout, microbatches=microbatches),
    )
    policy = abstract_params(build)
    placed = shardings(policy_specs(spec.policy_graph, policy, packed, mesh, spec.pipeline), mesh)
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, batch_spec(packed))
    half = lambda path, x: shape_of(x.shape, parameter_dtype(path, jnp.bfloat16), whole)  # noqa: E731
    kinds = {name: jnp.float32 if name.startswith("label") else jnp.int32 for name in PackedBatch._fields}
    kinds.pop("experts")
    return Case(
        mesh=mesh,
        spec=spec,
        policy=jax.tree.map(lambda x, s: shape_of(x.shape, x.dtype, s), policy, placed),
        draft=jax.tree_util.tree_map_with_path(half, abstract_params(draft_cfg.build)),
        batch=PackedBatch(**{name: shape_of((microbatches, tokens), kind, rows) for name, kind in kinds.items()}),
        weight=shape_of((), jnp.float32, whole),
    )


def shape_of(shape, dtype, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.cache
def gradients_of(mesh: str, microbatches: int):
    """Trace and compiled program of the gradients of policy and draft."""
    case = case_of(SMALL, EAGLE, MESHES[mesh], tokens=LONG, microbatches=microbatches, tile=256)
    run, key = joint_gradients(case.spec, case.mesh), case.spec.draft_key(jnp.int32(0))
    step = jax.jit(
        lambda params, batch, weight: run(params, batch, weight, None, None, key),
        compiler_options=update_options(case.mesh, pipeline=True),
    )
    with jax.default_device(case.mesh.devices.flat[0]):  # a kernel asks it what it is compiled for
        traced = step.trace({"policy": case.policy, "draft": case.draft}, case.batch, case.weight)
        return traced.jaxpr, traced.lower().compile()


EVERY_MESH = ["4x2", pytest.param("2x2x2", marks=pytest.mark.slow)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_features_travel_beside_the_ticks_of_a_group(mesh):
    """Each permute of features is under way while a loop of ticks runs; the last ones, while the pipeline drains."""
    spans = permutes(gradients_of(mesh, 8)[1].as_text())
    taps = [span for span in spans if f"/{TAPS_SCOPE}/" in span.source]
    sizes = MESHES[mesh]
    feature = LONG // sizes["context"] * WIDTH * 2
    stages = sizes["stage"]
    # Features by stage are 1, 0, 1, 2 of four and 1, 3 of two; for each distance one permute of each number.
    numbers = {4: 1 + 2, 2: 1 + 3}[stages]
    assert sum(span.bytes for span in taps) == 2 * (stages - 1) * numbers * feature, "in a group, and after the last"
    for span in taps:
        assert span.asynchronous, span
        assert any(work.kind == "loop" for work in span.overlaps), span


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_no_stage_waits_for_a_feature(mesh):
    """In no computation is a permute of features among what a hop of the pipeline, or a loop that has some, needs."""
    program = HloText.of(gradients_of(mesh, 8)[1].as_text())
    with_hops = {name for name in program.bodies if hops_in(program, name)}
    seen = 0
    for name, lines in program.bodies.items():
        operations = {op.name: op for op in map(Operation.of, lines) if op is not None}
        taps = {op.name for op in operations.values() if is_permute(op, f"/{TAPS_SCOPE}/")}
        if not taps:
            continue
        hops = [op for op in operations.values() if is_permute(op, "/stage_hop/") or called(op) & with_hops]
        assert hops, f"{name}: something of the pipeline runs beside"
        for hop in hops:
            assert not taps & needed(hop, operations), (name, hop.name)
        seen += len(taps)
    assert seen


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_no_permute_is_under_a_condition_of_the_stage(mesh):
    jaxpr, compiled = gradients_of(mesh, 8)
    assert permutes_under_conditions(jaxpr) == []
    program = HloText.of(compiled.as_text())
    for lines in program.bodies.values():
        operations = {op.name: op for op in map(Operation.of, lines) if op is not None}
        for op in operations.values():
            if op.opcode == "conditional" and any(reaches(program, name, "collective-permute") for name in called(op)):
                made_of = {operations[name].opcode for name in needed_of(op.operands[:1], operations)}
                assert "partition-id" not in made_of, op.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_micro_batches():
    few, *more = (gradients_of("4x2", m)[1].memory_analysis().temp_size_in_bytes for m in (8, 16, 32))
    for many in more:
        assert 0.95 * few < many < 1.05 * few


def is_permute(op: Operation, scope: str) -> bool:
    return op.opcode.startswith("collective-permute") and not op.opcode.endswith("-done") and scope in op.rest


def called(op: Operation) -> set[str]:
    """Computations that an operation runs."""
    found = re.findall(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", op.rest)
    branches = re.search(r"branch_computations=\{([^}]*)\}", op.rest)
    return {*found, *(branches[1].replace("%", "").split(", ") if branches else ())}


def hops_in(program: HloText, name: str) -> bool:
    return reaches(program, name, "collective-permute", "/stage_hop/")


def reaches(program: HloText, name: str, opcode: str, scope: str = "") -> bool:
    """Whether a computation, or one that it runs, has such an operation."""
    for op in filter(None, map(Operation.of, program.bodies.get(name, []))):
        if op.opcode.startswith(opcode) and not op.opcode.endswith("-done") and scope in op.rest:
            return True
        if any(reaches(program, inner, opcode, scope) for inner in called(op)):
            return True
    return False


def needed(op: Operation, operations: dict[str, Operation]) -> set[str]:
    return needed_of(op.operands, operations)


def needed_of(names: tuple[str, ...], operations: dict[str, Operation]) -> set[str]:
    """All operations of a computation that lead to these, themselves included."""
    found: set[str] = set()
    todo = [name for name in names if name in operations]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [x for x in operations[name].operands if x in operations]
    return found


def bytes_of(tree: Any) -> int:
    """Of one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def state_of(case: Case, optimizers: Optimizers) -> TrainState:
    state = jax.eval_shape(lambda *models: init_state(*models, optimizers), case.policy, case.draft)
    placed = state_layout(state, case.spec, case.mesh)
    return jax.tree.map(lambda x, s: shape_of(x.shape, x.dtype, s), state, placed)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "draft", ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in DRAFTS if name != "eagle3")]
)
def test_qwen3_8b_and_its_draft_fit_eight_h100(draft, capsys):
    """Rows of 20K tokens, stage = context = tensor = 2, float32 master weights and AdamW: one whole update."""
    sizes = {"stage": 2, "context": 2, "tensor": 2}
    case = case_of(LARGE, DRAFTS[draft], sizes, tokens=20480, microbatches=4, tile=8192)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6), 100)
    optimizers = Optimizers(optimizer, optimizer)
    state = state_of(case, optimizers)
    update: Any = make_update(case.spec, optimizers, case.mesh, donate=True)
    with jax.default_device(case.mesh.devices.flat[0]):
        compiled = update.lower(state, case.batch, case.weight).compile()
    plan = compiled.memory_analysis()
    most = plan.argument_size_in_bytes + plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    parts = {
        "parameters": bytes_of((state.policy, state.draft)),
        "optimizer state": bytes_of((state.policy_optimizer, state.draft_optimizer)),
        "float32 gradients": 2 * bytes_of((state.policy, state.draft)),
    }
    parts["activations and other temporaries"] = plan.temp_size_in_bytes - parts["float32 gradients"]
    with capsys.disabled():
        print(
            f"\nQwen3-8B with {draft}: {most / 1e9:.1f} GB of a GPU;", *(f"{n} {b / 1e9:.1f}" for n, b in parts.items())
        )
    assert plan.alias_size_in_bytes > 0.99 * bytes_of(state), "the new state takes the place of the old one"
    assert most < H100_BYTES, parts
