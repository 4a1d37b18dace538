"""Holds the import order of the house: a room imports only from rooms above it, and no two rooms need each other."""

from __future__ import annotations

import graphlib

# A line imports from the lines above it; rooms on one line may import each other as long as there is no cycle.
ORDER = (
    ("errors",),
    ("config_io",),
    ("types", "distributed", "numerics", "text"),
    ("context_parallel",),
    ("models", "losses"),
    ("drafts", "pipeline"),
    ("decoding", "environments", "rewards", "data"),
    ("rollout", "training", "planner"),
    (
        "weight_sync",
        "checkpoint",
        "metrics",
        "profiling",
        "report",
        "evaluation",
        "doctor",
        "model_doctor",
        "shard_report",
        "schedule_report",
    ),
    ("config", "pretrain_config"),
    ("run", "starting_weights", "pretrain_setup", "round_profile", "speed", "summary"),
    (
        "loop",
        "pretrain",
        "convert",
        "generate",
        "warm_start",
        "bench_drafts",
        "bench_decode",
        "bench_text",
        "bench_slots",
        "bench_attention",
        "bench_pipeline",
    ),
    ("cli",),
)
LINES = {room: number for number, rooms in enumerate(ORDER) for room in rooms}


def room_of(module: str) -> str | None:
    """The room a dotted name of draftco_jax is in; None for the package's own facade."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def edges(package_sources):
    """(file, importing room, imported room) for every import between rooms of draftco_jax."""
    for source in package_sources:
        if not source.module.startswith("draftco_jax.") or source.module == "draftco_jax":
            continue
        for name in source.imports:
            if name.startswith("draftco_jax.") and room_of(name) != room_of(source.module):
                yield source.path, room_of(source.module), room_of(name)


def test_every_room_has_a_place_in_the_order(package_sources):
    rooms = {room_of(source.module) for source in package_sources if source.module.startswith("draftco_jax.")}
    assert rooms <= set(LINES), f"not in the order: {sorted(rooms - set(LINES))}"


def test_nothing_imports_upwards(package_sources):
    upwards = [
        f"{path} imports {above}, which is below {room}"
        for path, room, above in edges(package_sources)
        if LINES.get(above, len(ORDER)) > LINES.get(room, len(ORDER))
    ]
    assert not upwards, "\n".join(upwards)


def test_no_cycle_between_rooms(package_sources):
    needs: dict[str, set[str]] = {}
    for _, room, above in edges(package_sources):
        needs.setdefault(room, set()).add(above)
    graphlib.TopologicalSorter(needs).prepare()


def test_kernels_know_nothing_of_rl(package_sources):
    for source in package_sources:
        if source.path.startswith("pallas_kernels/"):
            strangers = {name for name in source.imports if name.split(".")[0] == "draftco_jax"}
            assert not strangers, f"{source.path} imports {strangers}"
