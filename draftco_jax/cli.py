"""The `draftco` command; each subcommand is a few lines that call the library.

Nothing heavy is imported before a subcommand is chosen, so `draftco --help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from draftco_jax.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT: 128 + 2

_CONFIG = "configs/grpo_arithmetic2_eagle3_cpu.py"
_PRETRAIN_CONFIG = "configs/pretrain_arithmetic2_eagle3_cpu.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 0, 2 after bad input, 130 after an interrupt."""
    try:
        options = build_parser().parse_args(arguments)
        options.run(options)
    except UserError as error:
        print(f"draftco: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `draftco config ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("draftco: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, as the rest of the command does, and knows no abbreviations."""

    def __init__(self, **settings: Any):
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. It is closed: settings of a run belong in its config, reached by --set."""
    parser = _Parser(prog="draftco", description="GRPO with lossless speculative rollouts and a co-trained draft.")
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND", parser_class=_Parser)

    def add(name: str, run: Callable[[argparse.Namespace], None], does: str, example: str) -> argparse.ArgumentParser:
        added = subcommands.add_parser(
            name, help=does, description=does, epilog=f"example:\n  draftco {name} {example}"
        )
        added.set_defaults(run=run)
        return added

    train = add(
        "train", _train, "Train a policy and its draft.", f"--config {_CONFIG} --set steps=20 --run-dir runs/mine"
    )
    _add_config_options(train)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="where results go (default: runs/<name of FILE>)")
    train.add_argument("--resume", action="store_true", help="continue the run in DIR; a finished run stays as it is")

    pretrain = add(
        "pretrain-draft",
        _pretrain_draft,
        "Train a draft alone, on the policy's own rollouts.",
        f"--config {_PRETRAIN_CONFIG} --set steps=300 --run-dir runs/draft",
    )
    _add_config_options(pretrain)
    pretrain.add_argument("--run-dir", type=Path, metavar="DIR", help="where results go (default: runs/<name of FILE>)")
    pretrain.add_argument("--resume", action="store_true", help="continue the training in DIR")

    config = add("config", _config, "Print the resolved config as JSON and stop.", f"--config {_CONFIG} --set steps=20")
    _add_config_options(config)

    report = add("report", _report, "Write report.html and its plots for a run.", "runs/demo")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")

    generate = add(
        "generate",
        _generate,
        "Write responses of a policy to the prompts of a file, one JSON object a line.",
        "runs/exported/policy --prompts prompts.txt --draft runs/exported/draft --out responses.jsonl",
    )
    _add_generate_options(generate)

    bench = add(
        "bench",
        _bench,
        "Compare drafts or decoding on a shipped or a published policy, or count what long rows over ranks or pipeline "
        "stages cost.",
        "drafts --json",
    )
    _add_bench_options(bench)

    convert = add(
        "convert",
        _convert,
        "Write a policy, a draft or a run in the layouts that transformers and serving engines read.",
        "runs/demo exported --dtype bfloat16",
    )
    _add_convert_options(convert)

    shards = add(
        "shards",
        _shards,
        "Work out what each device holds of a policy on a mesh, without its weights.",
        "qwen3-235b-a22b tensor=4 stage=4 context=2 data=2",
    )
    _add_shards_options(shards)

    plan = add(
        "plan",
        _plan,
        "Draw a pipeline schedule and work out what it needs.",
        "--draw-schedule --stages 4 --microbatches 8 --tap-stages 0,1,2",
    )
    _add_plan_options(plan)

    doctor = add(
        "doctor",
        _doctor,
        "Show versions, devices and accelerator plugins; with MODEL_DIR, whether it loads and what is in the way.",
        "--json doctor.json",
    )
    doctor.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="a policy or a draft to look at")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE, machine-readable")
    return parser


def _add_generate_options(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("model", metavar="MODEL", help="folder of a policy with its tokenizer, or shipped:NAME")
    generate.add_argument("--prompts", required=True, metavar="FILE", help="a prompt a line; - reads standard input")
    generate.add_argument("--format", choices=("text", "jsonl"), help="of FILE (default: jsonl if it ends so, or text)")
    generate.add_argument("--out", default="-", metavar="FILE", help="where responses go (default: standard output)")
    generate.add_argument(
        "--draft", metavar="DIR", help="folder of a draft for this policy, shipped:NAME, ngram or self_int8"
    )
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and caches")
    generate.add_argument(
        "--slots", type=int, metavar="N", help="responses made at a time (default: 8); slots of --set"
    )
    generate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="max_new_tokens, samples, slots, draft_length, verification, stop_strings, min_tokens, seed, "
        "sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p; may be repeated",
    )


def _add_convert_options(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", metavar="SOURCE", help="a policy, a draft, a run directory or a GGUF file")
    convert.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    convert.add_argument("--dtype", metavar="NAME", help="bfloat16, float32 or float16 (default: as the source)")
    convert.add_argument("--kind", metavar="KIND", help="policy or draft (default: what SOURCE is, both of a run)")
    convert.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest weights file (default: 5GB)")
    convert.add_argument("--draft-family", metavar="NAME", help="family of a draft that does not say its own")
    convert.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")


def _add_bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "name",
        choices=tuple(_BENCHES),
        metavar="NAME",
        help="what to measure: drafts, decode, text, slots, attention or pipeline",
    )
    bench.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="change one setting of it")
    bench.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it to FILE, or print it and nothing else"
    )
    bench.add_argument("--plot", type=Path, metavar="FILE", help="attention, decode: draw it, .png or .svg")
    bench.add_argument("--ranks", type=int, metavar="C", help="attention: ranks of what is compiled (default: 8)")
    bench.add_argument(
        "--fast",
        action="store_true",
        help="attention: leave out what is compiled for H100; decode, slots: one small policy, once",
    )
    bench.add_argument("--plots", type=Path, metavar="DIR", help="pipeline: draw it, a picture each")
    bench.add_argument("--policy", metavar="DIR", help="text: folder of the policy, with tokenizer and chat template")
    bench.add_argument("--prompts", metavar="FILE", help="text: JSON lines with question and answer, to learn from")
    bench.add_argument(
        "--held-out", metavar="FILE", help="text: the same, to measure on (default: 1 in 8 of --prompts)"
    )
    bench.add_argument("--minutes", type=float, metavar="N", help="text: for all that is learnt (default: 30)")
    bench.add_argument("--run-dir", type=Path, metavar="DIR", help="text: what is made on the way, to go on from")


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a Python file with get_config()")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="change one setting of it; may be repeated"
    )


def _add_shards_options(shards: argparse.ArgumentParser) -> None:
    shards.add_argument("model", metavar="MODEL", help="a published size (qwen3-8b, ...) or a model folder")
    shards.add_argument("axes", nargs="*", metavar="AXIS=SIZE", help="the mesh: data, stage, context, tensor, expert")
    shards.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the parameters")
    shards.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE, machine-readable")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draw-schedule", action="store_true", help="what each stage does in each tick")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="which (default: 1f1b)")
    parser.add_argument("--stages", type=int, default=4, metavar="S", help="stages of the pipeline (default: 4)")
    parser.add_argument(
        "--chunks", type=int, default=1, metavar="V", help="chunks a stage, > 1: interleaved (default: 1)"
    )
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="of an update (default: 8)")
    parser.add_argument("--tap-stages", default="", metavar="K,K", help="virtual stages that make taps for the draft")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="T", help="tensor ranks that a draft is dealt out to (default: 1)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE, machine-readable")


def _train(options: argparse.Namespace) -> None:
    from draftco_jax.config import load_config
    from draftco_jax.loop import train

    config = load_config(options.config, options.set)
    run_dir = options.run_dir or Path("runs") / options.config.stem
    train(config, run_dir, resume=options.resume)
    print(f"Results are in {run_dir}: open {run_dir / 'report.html'}")


def _pretrain_draft(options: argparse.Namespace) -> None:
    from draftco_jax.pretrain import DRAFT_FOLDER, pretrain
    from draftco_jax.pretrain_config import load_pretrain_config

    config = load_pretrain_config(options.config, options.set)
    run_dir = options.run_dir or Path("runs") / options.config.stem
    lengths = pretrain(config, run_dir, resume=options.resume)["accepted_length"]
    print(f"Held-out accepted length: untrained {lengths['untrained']:.2f}, trained {lengths['end']:.2f}")
    print(f"Draft is in {run_dir / DRAFT_FOLDER}: use it with --set draft_checkpoint={run_dir / DRAFT_FOLDER}")


def _config(options: argparse.Namespace) -> None:
    from draftco_jax.config import load_config
    from draftco_jax.config_io import to_json

    print(json.dumps(to_json(load_config(options.config, options.set)), indent=2))


def _report(options: argparse.Namespace) -> None:
    from draftco_jax.report import write_report

    write_report(options.run_dir)
    print(f"Report is {options.run_dir / 'report.html'}")


def _generate(options: argparse.Namespace) -> None:
    from draftco_jax.config_io import apply_overrides
    from draftco_jax.generate import GenerateConfig
    from draftco_jax.generate.command import generate_file

    slots = [] if options.slots is None else [f"slots={options.slots}"]
    print(
        generate_file(
            apply_overrides(GenerateConfig(), options.set + slots),
            options.model,
            options.draft,
            prompts=options.prompts,
            form=options.format,
            out=options.out,
            dtype=options.dtype,
        ),
        file=sys.stderr if options.out == "-" else sys.stdout,
    )


def _bench(options: argparse.Namespace) -> None:
    for option, names in _OPTIONS_OF_SOME.items():
        given = getattr(options, option)
        if given is not None and given is not False and options.name not in names:
            of = " and ".join(f"`draftco bench {name}`" for name in names)
            raise UserError(f"--{option.replace('_', '-')} is an option of {of}; leave it out")
    if options.json and not Path(options.json).parent.is_dir():  # said now and not after minutes
        folder = Path(options.json).parent
        raise UserError(f"--json {options.json} cannot be written: there is no folder {folder}; make it first")
    _BENCHES[options.name](options)


def _bench_drafts(options: argparse.Namespace) -> None:
    from draftco_jax.bench_drafts import BenchDraftsConfig, bench_drafts
    from draftco_jax.config_io import apply_overrides

    found = bench_drafts(
        apply_overrides(BenchDraftsConfig(), options.set),
        lambda text: print(f"bench drafts: {text}", file=sys.stderr, flush=True),
    )
    if options.json == "-":
        print(json.dumps(found, indent=2))
        return
    if options.json:
        _write_json(Path(options.json), found)
    print(f"{'family':<10}{'accepted length':>16}{'rounds/s':>12}{'tokens/s':>12}{'of plain':>10}")
    for name, row in found["families"].items():
        print(
            f"{name:<10}{row['accepted_length']:>16.2f}{row['rounds_per_second']:>12.0f}"
            f"{row['tokens_per_second']:>12.0f}{row['speedup']:>9.2f}x"
        )
    print(f"Plain decoding: {found['plain']['tokens_per_second']:.0f} tokens/s" + _written(options.json))


def _bench_attention(options: argparse.Namespace) -> None:
    from draftco_jax.bench_attention import BenchAttentionConfig, bench_attention
    from draftco_jax.bench_attention.figure import check_plot, write_figure
    from draftco_jax.bench_attention.table import last_line, table
    from draftco_jax.config_io import apply_overrides

    if options.plot:
        check_plot(options.plot)
    given = [] if options.ranks is None else [f"ranks={options.ranks}"]
    given += ["fast=true"] if options.fast else []
    found = bench_attention(
        apply_overrides(BenchAttentionConfig(), [*options.set, *given]),
        lambda text: print(f"bench attention: {text}", file=sys.stderr, flush=True),
    )
    if options.plot:
        write_figure(found, options.plot)
    _print_found(found, options.json, options.plot, table, last_line)


def _bench_decode(options: argparse.Namespace) -> None:
    from draftco_jax.bench_attention.figure import check_plot
    from draftco_jax.bench_decode import BenchDecodeConfig, bench_decode
    from draftco_jax.bench_decode.figure import write_figure
    from draftco_jax.bench_decode.table import last_line, table
    from draftco_jax.config_io import apply_overrides

    if options.plot:
        check_plot(options.plot)
    settings = apply_overrides(BenchDecodeConfig.fast() if options.fast else BenchDecodeConfig(), options.set)
    found = bench_decode(settings, lambda text: print(f"bench decode: {text}", file=sys.stderr, flush=True))
    if options.plot:
        write_figure(found, options.plot)
    _print_found(found, options.json, options.plot, table, last_line)


def _bench_text(options: argparse.Namespace) -> None:
    from draftco_jax.bench_text import BenchTextConfig, bench_text
    from draftco_jax.bench_text.table import last_line, table
    from draftco_jax.config_io import apply_overrides

    if not options.policy or not options.prompts:
        raise UserError("bench text needs --policy DIR and --prompts FILE; see `draftco bench --help`")
    given = {name: getattr(options, name) for name in ("policy", "prompts", "held_out", "minutes")}
    settings = BenchTextConfig(**{name: value for name, value in given.items() if value is not None})
    found = bench_text(
        apply_overrides(settings, options.set),
        options.run_dir or Path("runs") / "bench-text",
        lambda text: print(f"bench text: {text}", file=sys.stderr, flush=True),
    )
    _print_found(found, options.json, None, table, last_line)


def _bench_slots(options: argparse.Namespace) -> None:
    from draftco_jax.bench_slots import BenchSlotsConfig, bench_slots, last_line, table
    from draftco_jax.config_io import apply_overrides

    settings = apply_overrides(BenchSlotsConfig.fast() if options.fast else BenchSlotsConfig(), options.set)
    found = bench_slots(settings, lambda text: print(f"bench slots: {text}", file=sys.stderr, flush=True))
    _print_found(found, options.json, None, table, last_line)


def _bench_pipeline(options: argparse.Namespace) -> None:
    from draftco_jax.bench_pipeline import BenchPipelineConfig, bench_pipeline
    from draftco_jax.bench_pipeline.figure import check_folder, write_figures
    from draftco_jax.bench_pipeline.table import last_line, table
    from draftco_jax.config_io import apply_overrides

    settings = apply_overrides(BenchPipelineConfig(), options.set)
    if options.plots:
        check_folder(options.plots)
    found = bench_pipeline(settings, lambda text: print(f"bench pipeline: {text}", file=sys.stderr, flush=True))
    if options.plots:
        write_figures(found, options.plots)
    _print_found(found, options.json, options.plots, table, last_line)


def _print_found(
    found: Any, to: str | None, picture: Path | None, table: Callable[[Any], str], last_line: Callable[[Any], str]
) -> None:
    """Figures of a bench as JSON alone (`to` is "-"), or as a table, and where they were written."""
    if to == "-":
        print(json.dumps(found, indent=2))
        return
    if to:
        _write_json(Path(to), found)
    print(table(found))
    print(last_line(found) + _written(" and ".join(str(path) for path in (to, picture) if path)))


_OPTIONS_OF_SOME = {
    "plot": ("attention", "decode"),
    "ranks": ("attention",),
    "fast": ("attention", "decode", "slots"),
    "plots": ("pipeline",),
    "policy": ("text",),
    "prompts": ("text",),
    "held_out": ("text",),
    "minutes": ("text",),
    "run_dir": ("text",),
}
_BENCHES: dict[str, Callable[[argparse.Namespace], None]] = {
    "drafts": _bench_drafts,
    "decode": _bench_decode,
    "text": _bench_text,
    "attention": _bench_attention,
    "pipeline": _bench_pipeline,
    "slots": _bench_slots,
}


def _written(path: str | None) -> str:
    return f"; written to {path}" if path else ""


def _write_json(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from error


def _convert(options: argparse.Namespace) -> None:
    from draftco_jax.convert import Wishes, convert, parse_size

    wishes = Wishes(
        dtype=options.dtype,
        kind=options.kind,
        max_shard_bytes=parse_size(options.max_shard_size),
        draft_family=options.draft_family,
        step=options.step,
    )
    found = convert(options.source, options.out, wishes)
    for note in found.notes:
        print(f"Note: {note}")
    print("; ".join(f"{kind.capitalize()} is in {folder}" for kind, folder in found.written.items()))


def _shards(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from draftco_jax.shard_report import report_of

    found = report_of(options.model, options.axes, options.dtype)
    if options.json:
        _write_json(options.json, asdict(found))
    print(found.table() + (f"\nWritten to {options.json}" if options.json else ""))


def _plan(options: argparse.Namespace) -> None:
    from draftco_jax.schedule_report import parse_stages, plan_schedule

    if not options.draw_schedule:
        raise UserError("plan must be told what to plan; add --draw-schedule")
    found = plan_schedule(
        options.schedule,
        stages=options.stages,
        chunks=options.chunks,
        microbatches=options.microbatches,
        tap_stages=parse_stages(options.tap_stages),
        tensor_ranks=options.tensor,
    )
    if options.svg:
        found.write_svg(options.svg)
    if options.json:
        _write_json(options.json, found.as_json())
    written = " and ".join(str(path) for path in (options.svg, options.json) if path)
    print("\n".join(found.lines()) + (f"\nWritten to {written}" if written else ""))


def _doctor(options: argparse.Namespace) -> None:
    if options.model_dir:
        _doctor_of_model(options)
        return
    from draftco_jax.doctor import describe_installation

    found = describe_installation()
    if options.json:
        _write_json(options.json, found)
    versions = {"python": found["python"], **found["packages"], **found["gpu_packages"]}
    for name, version in versions.items():
        print(f"{name:<18} {version or 'not installed'}")
    print(f"{'cuda plugin':<18} {'yes' if found['cuda_plugin'] else 'no'}")
    print(f"{'devices':<18} {', '.join(found['devices']) or found['devices_error']}")
    if options.json:
        print(f"Written to {options.json}")


def _doctor_of_model(options: argparse.Namespace) -> None:
    from draftco_jax.model_doctor import describe_model, lines_of

    report = describe_model(options.model_dir)
    if options.json:
        _write_json(options.json, report.as_json())
    print("\n".join(lines_of(report)))
    if not report.loads:
        count = len(report.reasons)
        raise UserError(f"{options.model_dir} cannot be used: {count} reason{'s' if count > 1 else ''}, listed above")
    print(f"{options.model_dir} loads as a {report.kind}")


if __name__ == "__main__":
    sys.exit(main())
