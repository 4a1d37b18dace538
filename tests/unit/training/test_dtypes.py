"""bfloat16 policies and drafts, alone and together: losses near those of float32, float32 where it has to be."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.models.compute import ComputeConfig, cast_params
from draftco_jax.models.functional import graph_of, initialise
from draftco_jax.training.objective import global_counts, objective

BLOCK = {"mask_token_id": 0, "block_size": 3}
DRAFTS = {
    "eagle3": (Eagle3Config, {}),
    "mtp": (MtpConfig, {}),
    "dflash": (DFlashConfig, BLOCK),
    "dspark": (DSparkConfig, BLOCK),
}


def terms(setup, batch, name, policy_dtype, draft_dtype):
    """Loss, metrics and gradients of one joint objective."""
    family, changes = DRAFTS[name]
    cfg = family.for_target(setup.policy_cfg, **changes)
    compute = ComputeConfig(dtype=policy_dtype, parameter_dtype=policy_dtype)
    graph, draft = initialise(cfg.build, jax.random.key(3))
    spec = replace(
        setup.spec,
        policy_graph=graph_of(partial(setup.policy_cfg.build, compute=compute)),
        draft_graph=graph,
        draft_cfg=cfg,
        draft_dtype=draft_dtype,
    )
    params = {"policy": cast_params(setup.policy, policy_dtype), "draft": cast_params(draft, draft_dtype)}
    key = spec.draft_key(jnp.int32(0))

    @jax.jit
    def run(params, batch):
        counts = global_counts(batch, cfg, key)
        loss = lambda params: objective(params, batch, counts, jnp.float32(1), None, None, spec, key)  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(params)

    return params, *run(params, batch)


@pytest.mark.parametrize(
    "name", ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in DRAFTS if name != "eagle3")]
)
def test_losses_of_bfloat16_are_near_those_of_float32(setup, batch, name):
    _, (_, exact_metrics), _ = terms(setup, batch, name, "float32", "float32")
    pairs = [("bfloat16", "bfloat16")] + ([("bfloat16", "float32"), ("float32", "bfloat16")] if name == "mtp" else [])
    for policy_dtype, draft_dtype in pairs:
        params, (loss, metrics), gradients = terms(setup, batch, name, policy_dtype, draft_dtype)
        assert loss.dtype == jnp.float32 and all(value.dtype == jnp.float32 for value in metrics.values())
        for part, dtype in (("policy", policy_dtype), ("draft", draft_dtype)):
            assert {str(leaf.dtype) for leaf in jax.tree.leaves(params[part])} <= {dtype, "float32"}
            assert jax.tree.map(lambda leaf: leaf.dtype, gradients[part]) == jax.tree.map(
                lambda leaf: leaf.dtype, params[part]
            )
            assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(gradients[part]))
        np.testing.assert_allclose(metrics["draft/loss"], exact_metrics["draft/loss"], rtol=0.03)
        np.testing.assert_allclose(metrics["policy/loss"], exact_metrics["policy/loss"], atol=0.05)
        # How far generator and trainer are apart is told, and is bounded by bfloat16's 8 bits on these logits.
        gap = metrics["agreement/logprob_diff_max"] - exact_metrics["agreement/logprob_diff_max"]
        assert abs(float(gap)) < 0.2
