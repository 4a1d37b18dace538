"""A process of its own, since the number of devices is settled before JAX starts.

`python -m draftco_jax.bench_pipeline.child STAGES MICROBATCHES [MICROBATCHES ...]`: micro-batches of the transports,
then those that memory is compiled for. The last line of the output is the answer as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jax


def main(arguments: Sequence[str]) -> int:
    """Answers."""
    stages, microbatches, *memory = map(int, arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", stages)
    from draftco_jax.bench_pipeline.programs import device_facts

    sys.stdout.write("\n" + json.dumps(device_facts(stages, microbatches, memory)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
