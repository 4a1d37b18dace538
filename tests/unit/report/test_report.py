"""Tests of the report page: complete for every arm, self-contained, honest about what is missing."""

import re
from html.parser import HTMLParser

import pytest

from draftco_jax.errors import UserError
from draftco_jax.report import write_report
from draftco_jax.report.plots import PLOTS

EVERY_PLOT = {plot.name for plot in PLOTS}
ARMS = {
    "cotrained": set(),
    "frozen": {"entropy_mismatch", "draft_loss"},
    "off": {"accepted_length", "acceptance_by_position", "entropy_mismatch", "speed", "draft_loss"},
}
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps the text outside of style, and where things are loaded from."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text, self.sources, self.figures = [], [], [], 0
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.figures += tag == "figure"
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page_of(run_dir):
    html = write_report(run_dir).read_text(encoding="utf-8")
    return html, Page(html)


@pytest.mark.parametrize("arm", ARMS)
def test_every_plot_is_there_or_explained(fake_run, arm):
    run_dir = fake_run(arm, steps=20)
    _, page = page_of(run_dir)
    drawn = {path.stem for path in (run_dir / "plots").iterdir()}
    assert drawn == EVERY_PLOT - ARMS[arm]
    assert page.figures == len(drawn)
    assert page.words.count(f"speculation = {arm}") >= len(ARMS[arm])
    assert ("Plots left out" in page.words) == bool(ARMS[arm])


@pytest.mark.parametrize("arm", ARMS)
def test_page_needs_nothing_but_itself(fake_run, arm):
    html, page = page_of(fake_run(arm, steps=3))
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://|<script|@import|url\(", html)


@pytest.mark.parametrize("arm", ARMS)
def test_no_nan_or_none_is_shown(fake_run, arm):
    _, page = page_of(fake_run(arm, steps=3))
    assert not re.search(r"\b(nan|inf|None|null)\b", page.words.split("Resolved configuration")[0])


def test_headlines_say_what_the_summary_says(fake_run):
    _, page = page_of(fake_run(steps=20))
    for words in (
        "59.0 % → 85.2 %",
        "95 % intervals 52.9–64.8 % and 80.3–89.0 %, 256 held-out prompts",
        "3.31 → 3.78",
        "at most 5; untrained 1.07; frozen twin 3.62",
        "1.20×",
        "k = 2, 1,080 against 900 tokens/s plain",
        "1.06×",
        "draft update overhead 21.0 %",
        "5.10e-14",
    ):
        assert words in page.words


def test_the_story_follows_the_numbers(fake_run):
    _, page = page_of(fake_run(steps=20))
    assert "went from 59.0 % to 85.2 % (+26.2 points). The 95 % intervals of the two do not overlap." in page.words
    assert "speculative rollouts were 20.0 % faster than plain ones" in page.words
    assert re.search(r"changed by \+0\.3\d tokens: \+0\.5\d entropy part .* and -0\.\d\d mismatch part", page.words)


def test_speed_section_has_the_table_and_its_reasons(fake_run):
    _, page = page_of(fake_run(steps=3))
    assert "costs 3.3 plain tokens at batch 1" in page.words and "At batch 32 it costs 5.2." in page.words
    assert "8 2 5,900 5,723 to 6,018 1.05 2.50 3.4" in page.words


def test_values_that_are_not_finite_are_named(fake_run):
    def change(step, metrics):
        if step in (3, 4):
            metrics["draft/loss"] = float("nan")
        if step == 5:
            metrics["policy/gradient_norm"] = float("inf")

    _, page = page_of(fake_run(steps=20, change=change))
    assert "Not finite, and left out of the plots: draft/loss at steps 3, 4" in page.words
    assert "policy/gradient_norm at step 5" in page.words


def test_a_metric_that_is_never_finite_counts_as_missing(fake_run):
    run_dir = fake_run(steps=3, change=lambda _, metrics: metrics.update({"rollout/tokens_per_second": float("nan")}))
    _, page = page_of(run_dir)
    assert not (run_dir / "plots" / "tokens_per_second.png").exists()
    assert "Rollout speed: not in the metrics of this run" in page.words


def test_a_summary_value_that_is_missing_is_said_so(fake_run):
    run_dir = fake_run("off", steps=3)
    text = (run_dir / "summary.json").read_text()
    text = text.replace('"wall_seconds": 187.3', '"wall_seconds": null').replace("5.1e-14", '"nan"')
    (run_dir / "summary.json").write_text(text)
    _, page = page_of(run_dir)
    assert "not measured" in page.words and "not finite (nan)" in page.words


def test_a_run_that_has_not_ended_has_a_report(fake_run):
    run_dir = fake_run(steps=1, finished=False)
    _, page = page_of(run_dir)
    assert "has written no summary yet" in page.words
    assert "it is timed at the end of a run" in page.words
    assert page.figures == len(EVERY_PLOT) - 1


def test_exact_zeros_of_the_kl_are_shown_and_explained(fake_run):
    run_dir = fake_run("off", steps=3, change=lambda _, metrics: metrics.update({"agreement/kl_k3": 0.0}))
    text = (run_dir / "summary.json").read_text().replace("5.1e-14", "0.0")
    (run_dir / "summary.json").write_text(text)
    _, page = page_of(run_dir)
    assert "Exact zeros cannot stand on a logarithmic axis" in page.words
    assert "the same log-probability, to the last bit" in page.words


def test_text_of_the_run_is_escaped(fake_run):
    html, page = page_of(fake_run(steps=1))
    assert "<script>&" in page.words and "&lt;script&gt;&amp;" in html


def test_same_numbers_give_the_same_bytes(fake_run):
    run_dir = fake_run("off", steps=3)
    assert write_report(run_dir).read_bytes() == write_report(run_dir).read_bytes()


def test_a_plot_of_an_earlier_report_is_removed(fake_run):
    run_dir = fake_run("off", steps=3)
    write_report(run_dir)
    (run_dir / "plots" / "draft_loss.png").write_bytes(b"old")
    write_report(run_dir)
    assert not (run_dir / "plots" / "draft_loss.png").exists()


def test_a_directory_without_a_run_is_one_clear_line(fake_run, tmp_path):
    with pytest.raises(UserError, match=r"run_dir=.*: no metrics\.jsonl in it") as no_metrics:
        write_report(tmp_path)
    run_dir = fake_run("off", steps=1)
    (run_dir / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json in it") as no_config:
        write_report(run_dir)
    assert "\n" not in str(no_metrics.value) + str(no_config.value)
    assert not (tmp_path / "report.html").exists()
