"""Makes every test session strict: CPU, no silent promotion, annotations executed."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported, and inherited by the processes that tests start

# Compiling is most of what tests wait for; without LLVM's optimizations it takes 0.4 of the time and computes the same.
# `make test-all` compiles as users do (DRAFTCO_TEST_COMPILE=full). Given flags win: XLA takes the last of two.
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(
            ()
            if os.environ.get("DRAFTCO_TEST_COMPILE") == "full"
            else (
                "--xla_backend_optimization_level=0",
                "--xla_cpu_parallel_codegen_split_count=1",
                # XLA ends the process at a flag it does not know; jax 0.11's has but the one way.
                *(("--xla_cpu_use_fusion_emitters=false",) if metadata.version("jax").startswith("0.10.") else ()),
            )
        ),
        # As updates on several CPU devices are compiled (`distributed.compiler_options`), and here parts of them too.
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        os.environ.get("XLA_FLAGS", ""),
    ]
).strip()

import jax
import jaxtyping
import pytest

# Tracing makes many small objects and few cycles: with Python's own thresholds a twentieth of the time goes into
# collections that find nothing.
gc.set_threshold(50_000, 20, 20)

REPOSITORY = Path(__file__).resolve().parent.parent
# Each a process of its own: the device count and the plugins are fixed when JAX starts; the last one starts several.
OWN_PROCESS = tuple(REPOSITORY / "tests" / room for room in ("multidevice", "aot", "multiprocess"))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiled programs are kept between sessions; the size limit also turns on the lock that makes sharing safe.
# One folder a machine, since an executable is only good for the processor it was compiled on.
jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache" / f"jax-{platform.node()}"))
jax.config.update("jax_compilation_cache_max_size", 2**30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# An int where a float is asked for is fine, as for every type checker (the "numeric tower").
jaxtyping.install_import_hook(
    ["draftco_jax", "pallas_kernels"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves folders that need their own process out unless they are named."""
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    if collection_path in OWN_PROCESS and not any(path.is_relative_to(collection_path) for path in named):
        return True
    return None


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return REPOSITORY


@pytest.fixture(scope="session")
def as_users_compile() -> dict[str, int | bool]:
    """For `jax.jit(compiler_options=...)`, where sums of scalars one after the other, as the quick compile
    makes them, would lose the digits that a test asks for."""
    return {"xla_backend_optimization_level": 3}


@pytest.fixture(scope="session")
def compiled_in_full() -> bool:
    """Whether programs are compiled as users compile them."""
    return os.environ.get("DRAFTCO_TEST_COMPILE") == "full"


@pytest.fixture(scope="session")
def native_matmul() -> Iterator[None]:
    """The compiled product of few rows, built once into the repository's cache."""
    from pallas_kernels.skinny_matmul.build import build, compiler

    if compiler() is None:
        pytest.skip("no C++ compiler: implementation='native' of skinny_matmul cannot be built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(REPOSITORY / ".cache"))
        build()
        yield
