"""The figures of `draftco bench text` as text; all of them are in its JSON."""

from __future__ import annotations

from typing import Any

from draftco_jax.bench_decode.table import lines_of, lines_of_machine


def table(found: dict[str, Any]) -> str:
    """What was learnt, then a line a cell."""
    texts = found["texts"]
    lines = [f"The policy's own texts: {texts['tokens']} tokens in {texts['seconds']:.0f} s"]
    for family, draft in found["drafts"].items():
        length = draft["accepted_length"]
        lines.append(
            f"{family}: {draft['draft_parameters'] / 1e6:.1f}M parameters, {draft['steps']} steps in "
            f"{draft['training_seconds']:.0f} s ({draft['epochs']:.1f} epochs), held-out accepted length "
            f"{length['untrained']:.2f} untrained, {length['end']:.2f} trained"
        )
    return "\n".join([*lines, *lines_of(found["cells"]), *lines_of_machine(found)])


def last_line(found: dict[str, Any]) -> str:
    """What to remember."""
    best = max(found["cells"], key=lambda cell: cell["speedup"])
    return (
        f"Speculation gains up to {best['speedup']:.2f}x ({best['policy']}, batch {best['batch']}, "
        f"{best['sampling'].replace('_', ' ')}) and at worst {found['worst_over_plain']:.2f}x"
    )
