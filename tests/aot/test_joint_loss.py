"""The whole joint loss, policy and draft with all gradients, as compiled for 8 H100 in bfloat16.

Small widths, since nothing here depends on them, but kernels, ring and shard_map are those of a long run.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import PackedRows
from draftco_jax.context_parallel.traffic import collectives
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.models.compute import ComputeConfig, parameter_dtype
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.objective import GrpoConfig, ObjectiveSpec
from draftco_jax.training.update import batch_spec, joint_loss
from draftco_jax.types import PackedBatch
from pallas_kernels.deviceless import compile_for, gpu_mesh, kernel_resources, permutes

RANKS, TOKENS = 8, 65536
POLICY = dataclasses.replace(
    Qwen3Config.tiny(vocab_size=512, hidden_size=128, intermediate_size=256),
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=TOKENS,
)
DRAFTS = {
    "eagle3": Eagle3Config.for_target(POLICY, passes=3),
    "dflash": DFlashConfig.for_target(
        POLICY, mask_token_id=511, num_hidden_layers=2, block_size=8, row_anchors=256, num_anchors=256
    ),
}
PACKED = PackedRows(ranks=RANKS, context_axis="context", implementation="pallas")


def build_policy(rngs: nnx.Rngs) -> Decoder:
    """In bfloat16: so are the activations, and with them what the ring sends."""
    return POLICY.build(rngs, ComputeConfig(dtype="bfloat16", parameter_dtype="bfloat16"))


@pytest.fixture(scope="module", params=DRAFTS)
def compiled(request):
    cfg = DRAFTS[request.param]
    spec = ObjectiveSpec(
        policy_graph=graph_of(build_policy),
        draft_graph=graph_of(cfg.build),
        draft_cfg=cfg,
        algorithm=GrpoConfig(),
        sampling=SamplingConfig(temperature=0.8),
        chunk_tokens=1024,
        draft_length=3,
        packed=PACKED,
        draft_dtype="bfloat16",
        vocabulary_tile=256,  # of 512 columns: heads are walked in tiles, as real ones are
    )
    mesh = gpu_mesh("h100", context=RANKS)
    half = lambda path, x: jax.ShapeDtypeStruct(x.shape, parameter_dtype(path, jnp.bfloat16))  # noqa: E731
    params = {"policy": abstract_params(build_policy)}
    params["draft"] = jax.tree_util.tree_map_with_path(half, abstract_params(cfg.build))
    names = [name for name in PackedBatch._fields if name != "experts"]
    kinds = {name: jnp.float32 if name.startswith("label") else jnp.int32 for name in names}
    batch = PackedBatch(**{name: jax.ShapeDtypeStruct((1, TOKENS), kind) for name, kind in kinds.items()})
    gradients = jax.value_and_grad(joint_loss(spec, None), has_aux=True)  # `compile_for` is the shard_map

    def run(params, batch, weight):
        return gradients(params, batch, weight, None, None, spec.draft_key(jnp.int32(0)))

    whole = PartitionSpec()
    weight = jax.ShapeDtypeStruct((), jnp.float32)
    return compile_for(mesh, run, params, batch, weight, in_specs=(whole, batch_spec(PACKED), whole), out_specs=whole)


def test_what_is_sent_is_rings_halos_anchors_and_sums_and_no_hop_of_a_ring_is_exposed(compiled):
    """Hops inside a loop are beside kernels; single ones, first or last of a backward, at least beside a matmul."""
    hlo = compiled.as_text()
    assert {c.kind for c in collectives(hlo)} <= {"collective-permute", "all-reduce", "all-gather"}
    hop = 2 * TOKENS // RANKS * POLICY.num_key_value_heads * POLICY.head_dim * 2
    rings = [span for span in permutes(hlo) if span.bytes >= hop]
    assert len(rings) >= 12, "two layers of the policy and the draft, forward and backward"
    for span in rings:
        assert span.asynchronous and span.overlaps, span
        assert span.hidden or span.times == 1, span
        assert any("dot" in work.name or work.kind != "fusion" for work in span.overlaps), span


def test_every_kernel_stays_in_registers(compiled):
    found = kernel_resources(compiled)
    assert any("block_attention" in name for name in found) and any("branch" in name for name in found)
    spilled = {name: kernel for name, kernel in found.items() if kernel.spill_bytes != 0 and "attention" in name}
    assert not spilled, spilled
