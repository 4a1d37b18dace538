"""A process of its own for what has to be settled before JAX starts: `python -m draftco_jax.bench_attention.child`.

`devices RANKS SEED` makes that many virtual CPU devices, `h100 RANKS` puts the compiler for GPUs within reach. The last
line of the output is the answer as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jax

from pallas_kernels import deviceless


def main(arguments: Sequence[str]) -> int:
    """Answers one question."""
    what, *numbers = arguments
    jax.config.update("jax_platforms", "cpu")
    if what == "devices":
        from draftco_jax.bench_attention.devices import device_facts

        ranks, seed = map(int, numbers)
        jax.config.update("jax_num_cpu_devices", ranks)
        found = device_facts(ranks, seed)
    elif what == "h100":
        deviceless.prepare()
        # What comes out of a cache was not compiled here.
        jax.config.update("jax_enable_compilation_cache", False)
        from draftco_jax.bench_attention.h100 import memory_rows

        found = memory_rows(*map(int, numbers))
    else:
        raise ValueError(f"what={what!r} must be 'devices' or 'h100'; `draftco bench attention` asks for both")
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
