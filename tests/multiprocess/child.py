"""One of the processes of `test_pipeline.py`: its part of a pipelined update, all digits of what came out.

python child.py PROCESS PROCESSES PORT
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

DEVICES = 8
SIZES = {"stage": 2, "context": 2, "tensor": 2}
MICROBATCHES = 3
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multidevice" / "pipeline"))


def leave_with_the_test() -> None:
    """Standard input is held open by the test: when that is gone, so is this process."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()


def results() -> dict[str, str]:
    """Losses and squared norms of gradients."""
    import cases

    from draftco_jax.training.update import joint_gradients, place_batch

    policy = cases.dense(4)
    setup = cases.Setup(policy, cases.draft_configs(policy)["eagle3"])
    setup.policy, setup.draft = jax.device_get((setup.policy, setup.draft))
    staged = setup.staged(SIZES, microbatches=MICROBATCHES, stamps=True)
    spec, mesh = staged.spec, staged.mesh
    rows = cases.batch_of_rows(MICROBATCHES)
    batch = place_batch(rows, spec.packed, mesh, draft_cfg=setup.draft_cfg, pipeline=spec.pipeline)
    whole = NamedSharding(mesh, PartitionSpec())
    gradients = joint_gradients(spec, mesh)

    def step(params, batch):
        found, metrics = gradients(params, batch, jnp.float32(0.7), None, None, spec.draft_key(jnp.int32(3)))
        norms = {f"{name}/squared_norm": optax.tree.norm(tree, squared=True) for name, tree in found.items()}
        return metrics | norms

    out = jax.jit(step, out_shardings=whole)(setup.params(staged.policy), batch)
    return {name: repr(float(np.asarray(value))) for name, value in out.items()}


if __name__ == "__main__":
    process, processes, port = map(int, sys.argv[1:])
    leave_with_the_test()
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)
    assert jax.process_count() == processes and len(jax.devices()) == DEVICES
    print("RESULTS", json.dumps(results()), flush=True)
