"""A process of its own that writes a synthetic checkpoint, loads it onto four devices and says what memory it took.

`python checkpoint_child.py FOLDER LAYERS HIDDEN EXPERTS SHARD_BYTES REPLICAS`; the last line is the answer as JSON.
Tensors are bfloat16 and stay so: parameters take as many bytes as the files.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.models.checkpoint_files import Deferred, SafetensorsReader, write_sharded
from draftco_jax.models.checkpoint_trees import Stacked, Tensor, TensorSpec, Transposed, load_tree


def peak_bytes():
    """Largest resident memory since the last call of `forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def forget_peak():
    """From here on the peak counts anew; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def make(shape, seed):
    """Values that tell tensors and places apart."""
    pattern = np.random.default_rng(seed).standard_normal(4093, np.float32).astype(jnp.bfloat16)
    return np.resize(pattern, shape)


def model(layers, hidden, experts):
    """Tensors of the file by name, and of the model: source, shape, sharding, and the tensors it is made of."""
    stored, wanted = {}, {}
    for layer in range(layers):
        for name, axes in (("row", ("t", None)), ("column", (None, "t")), ("copied", ())):
            stored[f"layers.{layer}.{name}"] = (hidden, hidden)
            wanted[layer, name] = (Transposed(Tensor(f"layers.{layer}.{name}")), (hidden, hidden), axes)
        if layer:  # one tensor on all devices is enough: each has its own copy of it
            del stored[f"layers.{layer}.copied"], wanted[layer, "copied"]
        names = [f"layers.{layer}.experts.{expert}" for expert in range(experts)]
        stored |= dict.fromkeys(names, (hidden, hidden // 4))
        stack = Stacked(tuple(Transposed(Tensor(name)) for name in names))
        wanted[layer, "experts"] = (stack, (experts, hidden // 4, hidden), ("t",))
    return stored, wanted


class Counting(SafetensorsReader):
    """Counts the bytes that are read."""

    bytes_read = 0

    def read(self, name, index=None):
        values = super().read(name, index)
        self.bytes_read += values.nbytes
        return values


def main(folder, layers, hidden, experts, shard_bytes, replicas):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((replicas, 4 // replicas), ("d", "t"))
    stored, wanted = model(layers, hidden, experts)
    jax.device_put(np.ones(4, np.float32)).block_until_ready()
    seeds = {name: seed for seed, name in enumerate(stored)}

    before = forget_peak()
    deferred = (
        (name, Deferred(shape=shape, dtype=jnp.bfloat16, make=functools.partial(make, shape, seeds[name])))
        for name, shape in stored.items()
    )
    files = write_sharded(Path(folder), deferred, max_shard_bytes=shard_bytes)
    written = peak_bytes() - before

    specs = {
        key: TensorSpec(source=source, shape=shape, dtype=jnp.bfloat16) for key, (source, shape, _) in wanted.items()
    }
    named = jax.sharding.NamedSharding
    shardings = {key: named(mesh, jax.sharding.PartitionSpec(*axes)) for key, (_, _, axes) in wanted.items()}
    before = forget_peak()
    reader = Counting(Path(folder))
    arrays = load_tree(reader, specs, shardings)
    loaded = peak_bytes() - before

    negate = jax.jit(jnp.negative, donate_argnums=0)
    report = {
        "parameter_bytes": sum(array.nbytes for array in arrays.values()),
        "device_bytes": sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards),
        "largest_array_bytes": max(array.nbytes for array in arrays.values()),
    }
    for key, array in arrays.items():
        parts = [make(stored[name], seeds[name]).T for name in specs[key].source.names()]
        expected = np.stack(parts) if key[1] == "experts" else parts[0]
        assert array.sharding == shardings[key]
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
        if key[0] == 0:
            # What was loaded may be given up to a computation: replicas made of one buffer must not meet there.
            for shard in negate(array).addressable_shards:
                np.testing.assert_array_equal(shard.data, -expected[shard.index])
    report |= {
        "largest_tensor_bytes": max(2 * rows * columns for rows, columns in stored.values()),
        "bytes_read": reader.bytes_read,
        "files": len(files),
        "peak_of_writing": written,
        "peak_of_loading": loaded,
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
