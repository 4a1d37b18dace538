"""A policy's files are read straight into the splits of the table, layers one by one or stacked."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from draftco_jax.distributed.axes import make_mesh
from draftco_jax.distributed.sharding import TRAIN, partition_specs, shardings
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig

POLICIES = {"qwen3_5_moe": Qwen35MoeConfig.tiny(), "nemotron_h": NemotronHConfig.tiny()}


@pytest.mark.parametrize("family", POLICIES)
@pytest.mark.parametrize("stacked", [False, True])
def test_each_device_gets_its_part_of_the_files(family, stacked, tmp_path):
    cfg, compute = POLICIES[family], ComputeConfig(scan_layers=stacked)
    params = initialise(cfg.build, jax.random.key(0))[1]
    save_policy(tmp_path, cfg, params, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2})
    module = nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0), compute))
    wanted = shardings(partition_specs(module, TRAIN, mesh.shape), mesh)
    _, whole = load_policy(tmp_path, compute=compute)
    _, spread = load_policy(tmp_path, compute=compute, shardings=wanted)
    split = 0
    for one, many, sharding in zip(*map(jax.tree.leaves, (whole, spread, wanted)), strict=True):
        np.testing.assert_array_equal(many, one)
        assert many.sharding.is_equivalent_to(sharding, many.ndim)
        split += many.addressable_shards[0].data.size < many.size
    assert split > len(jax.tree.leaves(whole)) / 2, "most arrays are in parts"
