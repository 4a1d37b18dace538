"""The report's words: tiles and sentences made from the numbers, with no judgement that the numbers do not give."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from draftco_jax.metrics.intervals import wilson_interval
from draftco_jax.report.run_data import RunData

NOT_MEASURED = "not measured"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Tile(NamedTuple):
    """One headline: a label, the number, the words that say what it is."""

    label: str
    value: str
    detail: str


def number(value: Any) -> str:
    """A value for a table: 4 significant digits, thousands apart, and words where there is no finite number."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return f"not finite ({value})"
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and abs(value) < 1e-3:
        return power_of_ten(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def power_of_ten(value: float) -> str:
    """A small number as people write it: 5.1 × 10⁻¹⁴, in one piece on a line."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(SUPERSCRIPTS)}"


def signed(value: float, digits: int) -> str:
    """A change with its sign, the minus as a minus."""
    # Rounding first, and adding 0, keeps a tiny loss from being shown as a negative zero.
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "\u2212")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f}\u00a0%"


def tiles(run: RunData) -> list[Tile]:
    """The headline tiles; one whose number was not measured is left out."""
    makers = (_pass_rate_tile, _accepted_length_tile, _rollout_tile, _end_to_end_tile, _agreement_tile)
    return [tile for maker in makers if (tile := maker(run)) is not None]


def sentences(run: RunData) -> list[str]:
    """What happened, one sentence or two for each subject that was measured."""
    makers = (_steps_words, _pass_rate_words, _accepted_words, _split_words, _speed_words, _agreement_words)
    return [words for maker in (*makers, _not_finite_words) if (words := maker(run))]


def pass_rates(run: RunData) -> tuple[float, float, int] | None:
    """Pass rate at the start, at the end, and the number of prompts; from the evaluations if there is no summary."""
    evaluations = run.series("eval/pass_rate").values
    start = run.headline("pass_rate_start")
    end = run.headline("pass_rate_end")
    start = evaluations[0] if start is None and evaluations else start
    end = evaluations[-1] if end is None and evaluations else end
    prompts = run.headline("eval_prompts") or max(run.series("eval/prompts").values, default=0)
    return None if start is None or end is None else (start, end, int(prompts))


def _interval(rate: float, count: int) -> str:
    low, high = wilson_interval(rate, count)
    return f"{100 * low:.1f}–{100 * high:.1f}\u00a0%"


def _pass_rate_tile(run: RunData) -> Tile | None:
    if (found := pass_rates(run)) is None:
        return None
    start, end, count = found
    detail = f"95 % intervals {_interval(start, count)} and {_interval(end, count)}, {count} held-out prompts"
    return Tile("Pass rate", f"{percent(start)} → {percent(end)}", detail)


def _accepted_length_tile(run: RunData) -> Tile | None:
    start, end = run.headline("accepted_length_start"), run.headline("accepted_length_end")
    if start is None or end is None:
        return None
    others = [("untrained", "accepted_length_untrained")]
    if run.speculation == "cotrained":
        others.append(("frozen twin at the end", "accepted_length_frozen_end"))
    beside = [f"{label} {value:.2f}" for label, name in others if (value := run.headline(name)) is not None]
    detail = "; ".join([f"tokens per verify round, at most {run.draft_length + 1}", *beside])
    return Tile("Accepted length", f"{start:.2f} → {end:.2f}", detail)


def _rollout_tile(run: RunData) -> Tile | None:
    speedup = run.headline("rollout_speedup")
    if speedup is None:
        return None
    plain, speculative = run.headline("tokens_per_second_plain"), run.headline("tokens_per_second_speculative")
    length = run.headline("rollout_speedup_draft_length")
    parts = [f"k = {length:.0f}"] if length is not None else []
    if plain is not None and speculative is not None:
        parts.append(f"{speculative:,.0f} against {plain:,.0f} tokens/s plain")
    return Tile("Rollout speedup", f"{speedup:.2f}×", ", ".join(parts))


def _end_to_end_tile(run: RunData) -> Tile | None:
    speedup = run.headline("end_to_end_speedup")
    if speedup is None:
        return None
    overhead = run.headline("draft_update_overhead")
    detail = "a whole training step against one with plain rollouts"
    if overhead is not None:
        detail += f"; draft update overhead {percent(overhead)}"
    return Tile("End-to-end speedup", f"{speedup:.2f}×", detail)


def _agreement_tile(run: RunData) -> Tile | None:
    kl = _largest(run, "generator_trainer_kl_max", "agreement/kl_k3")
    if kl is None:
        return None
    difference = _largest(run, "generator_trainer_logprob_diff_max", "agreement/logprob_diff_max")
    detail = "nats, k3, largest over the steps"
    if difference is not None:
        detail += f"; max |Δ log p| {number(difference)}"
    return Tile("Generator-trainer KL", number(kl), detail)


def _largest(run: RunData, headline: str, metric: str) -> float | None:
    found = run.headline(headline)
    return max(run.series(metric).values, default=None) if found is None else found


def _steps_words(run: RunData) -> str:
    arm = {
        "off": "without speculation",
        "frozen": "with speculative rollouts from a frozen draft",
        "cotrained": "with speculative rollouts from a draft co-trained in the policy's update",
    }.get(run.speculation, f"with speculation = {run.speculation}")
    wall = run.headline("wall_seconds")
    took = "" if wall is None else f" in {duration(wall)} of wall-clock time"
    return f"The run made {run.last_step} policy updates {arm}{took}."


def _pass_rate_words(run: RunData) -> str:
    if (found := pass_rates(run)) is None:
        return ""
    start, end, count = found
    change = f"went from {percent(start)} to {percent(end)} ({signed(100 * (end - start), 1)} points)"
    moved = f"was {percent(start)} at the start and at the end" if start == end else change
    words = f"The pass rate on {count} held-out prompts {moved}."
    (low_a, high_a), (low_b, high_b) = wilson_interval(start, count), wilson_interval(end, count)
    overlap = "overlap" if low_b <= high_a and low_a <= high_b else "do not overlap"
    return f"{words} The 95 % intervals of the two {overlap}."


def _accepted_words(run: RunData) -> str:
    start, end = run.headline("accepted_length_start"), run.headline("accepted_length_end")
    if start is None or end is None:
        return ""
    words = (
        f"A verify round committed {start:.2f} tokens at the start and {end:.2f} at the end, "
        f"of at most {run.draft_length + 1}."
    )
    untrained, frozen = run.headline("accepted_length_untrained"), run.headline("accepted_length_frozen_end")
    if untrained is not None:
        words += f" An untrained draft gets {untrained:.2f}."
    if frozen is not None and run.speculation == "cotrained":
        words += f" The frozen twin, which kept the weights it began with, gets {frozen:.2f} at the end."
    return words


def _split_words(run: RunData) -> str:
    ours, theirs = run.series("draft/tau_prob"), run.series("frozen_draft/tau_prob")
    shared = sorted(set(ours.steps) & set(theirs.steps))
    if len(shared) < 2:
        return ""
    ours_at, theirs_at = dict(zip(*ours, strict=True)), dict(zip(*theirs, strict=True))
    entropy_part = ours_at[shared[-1]] - ours_at[shared[0]]
    mismatch_part = theirs_at[shared[-1]] - ours_at[shared[-1]]
    return (
        f"From step {shared[0]} to step {shared[-1]} the frozen twin's expected accepted length changed by "
        f"{signed(entropy_part + mismatch_part, 2)} tokens: {signed(entropy_part, 2)} entropy part "
        f"(learning of the co-trained draft included) and {signed(mismatch_part, 2)} mismatch part."
    )


def _speed_words(run: RunData) -> str:
    words = ""
    speedup = run.headline("rollout_speedup")
    if speedup is not None:
        word = "faster" if speedup > 1 else "slower" if speedup < 1 else "as fast as"
        amount = "" if speedup == 1 else f"{percent(abs(speedup - 1))} "
        than = "" if speedup == 1 else " than"
        words = f"Timed in turns, speculative rollouts were {amount}{word}{than} plain ones."
    whole = run.headline("end_to_end_speedup")
    if whole is not None:
        words += f" A whole training step ran at {whole:.2f} times the speed of one with plain rollouts."
    return words.strip()


def _agreement_words(run: RunData) -> str:
    kl = _largest(run, "generator_trainer_kl_max", "agreement/kl_k3")
    if kl is None:
        return ""
    if kl == 0:
        return "Generator and trainer gave every sampled token the same log-probability, to the last bit."
    return f"The KL between the generator's and the trainer's log-probabilities stayed at or below {number(kl)} nats."


def _not_finite_words(run: RunData) -> str:
    found = run.not_finite()
    if not found:
        return ""
    named = [
        f"{name} at step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:5]))}"
        f"{' and others' if len(steps) > 5 else ''}"
        for name, steps in found.items()
    ]
    return f"Not finite, and left out of the plots: {'; '.join(named)}."
