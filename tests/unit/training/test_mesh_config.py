"""Checks what a mesh means for rows, axes and stages, and that dealt-out rows lose nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from draftco_jax.data.packing import pack_supervised, pad_rows
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.training.mesh_config import MeshConfig

POLICY = dataclasses.replace(Qwen3Config.tiny(hidden_size=32, intermediate_size=64), num_hidden_layers=5)


def test_one_device_has_no_mesh():
    mesh = MeshConfig()
    assert mesh.sizes == {} and mesh.devices == 1 and mesh.row_groups == 1 and not mesh.staged
    assert mesh.packed().mesh_axes == () and mesh.pipeline(POLICY) is None and mesh.row_tokens(7, 5) == 7


def test_axes_of_size_1_are_left_out():
    mesh = MeshConfig(data=2, context=2, tensor=3)
    assert mesh.sizes == {"data": 2, "context": 2, "tensor": 3} and mesh.devices == 12
    packed = mesh.packed()
    assert packed.row_axes == ("data",) and packed.context_axis == "context" and packed.ranks == 2
    assert packed.tensor_axis == "tensor" and packed.expert_axes == ()


def test_experts_go_over_the_axes_that_are_there():
    mesh = MeshConfig(data=2, expert=2, tensor=2, experts_over=("context", "expert", "tensor"))
    assert mesh.packed().row_axes == ("data", "expert") and mesh.packed().expert_axes == ("expert", "tensor")


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "groups"),
    [
        (MeshConfig(stage=2), 2, 2),
        (MeshConfig(stage=2, microbatches=3, data=2, expert=2), 3, 12),
        (MeshConfig(data=2), 1, 2),
        (MeshConfig(microbatches=4), 4, 4),
    ],
)
def test_rows_are_cut_into_microbatches_of_every_device(mesh, micro_batches, groups):
    assert (mesh.micro_batches, mesh.row_groups) == (micro_batches, groups)
    pipeline = mesh.pipeline(POLICY)
    assert (pipeline is None) == (micro_batches == 1) and ("stage" in mesh.sizes) == (micro_batches > 1)
    assert pipeline is None or pipeline.microbatches == micro_batches


def test_a_pipeline_has_the_layers_it_is_told():
    layout = MeshConfig(stage=2, layers_per_stage=(1, 4)).pipeline(POLICY).layout
    assert [sum(layer >= 0 for layer in row) for row in layout.table] == [1, 4]
    assert MeshConfig(stage=2, chunks=2).pipeline(POLICY).layout.virtual_stages == 4


@pytest.mark.parametrize(
    ("mesh", "tokens", "reach", "wanted"),
    [
        (MeshConfig(context=2), 21, 2, 24),
        (MeshConfig(context=2), 24, 6, 24),
        (MeshConfig(context=2), 21, 7, 28),
        (MeshConfig(context=2, stripe=8), 21, 7, 32),
        (MeshConfig(context=4, stripe=2), 16, 2, 16),
    ],
)
def test_rows_are_padded_to_what_ranks_can_share(mesh, tokens, reach, wanted):
    assert mesh.row_tokens(tokens, reach) == wanted
    assert mesh.packed().row_layout(wanted).piece >= reach


def test_padding_adds_rows_and_tokens_without_documents():
    batch = pack_supervised([((1, 2), (3, 4)), ((5,), (6, 7))], row_tokens=4, rows=2)
    batch = batch._replace(experts=np.ones((2, 4, 1, 2), np.int16))
    padded = pad_rows(batch, 3, 6)
    for name, before, after in zip(batch._fields, batch, padded, strict=True):
        assert after.shape[:2] == (3, 6) and after.dtype == before.dtype
        assert np.array_equal(after[:2, :4], before)
        empty = -1 if name == "experts" else 0
        assert np.all(after[2] == empty) and np.all(after[:, 4:] == empty)
