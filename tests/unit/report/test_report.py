"""Tests of the report page: complete for every arm, self-contained, honest about what is missing."""

import json
import re
from functools import cache
from html.parser import HTMLParser

import pytest

from draftco_jax.errors import UserError
from draftco_jax.report import write, write_report
from draftco_jax.report.plots import PLOTS
from draftco_jax.report.plots_draft import entropy_and_mismatch
from draftco_jax.report.plots_learning import agreement, gradient_norms
from draftco_jax.report.plots_speed import tokens_per_second
from draftco_jax.report.run_data import load_run
from draftco_jax.report.words import number, sentences, signed

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


@pytest.fixture(scope="module")
def reports(tmp_path_factory, make_run):
    """(run directory, its parsed page, its text) of a fake run, by arm; made once: drawing takes seconds."""

    @cache
    def make(arm):
        run_dir = make_run(tmp_path_factory.mktemp(arm), arm, steps=20)
        html, page = page_of(run_dir)
        return run_dir, page, html

    return make


@pytest.fixture
def without_pixels(monkeypatch):
    """Plots are drawn and not rendered, which is what takes the time: for tests of what a page says."""
    monkeypatch.setattr(write, "to_png", lambda figure: b"\x89PNG")


@pytest.mark.parametrize("arm", ARMS)
def test_every_plot_is_there_or_explained(reports, arm):
    run_dir, page, _ = reports(arm)
    drawn = {path.stem for path in (run_dir / "plots").iterdir()}
    assert drawn == EVERY_PLOT - ARMS[arm]
    assert page.figures == len(drawn)
    assert page.words.count(f"speculation = {arm}") >= len(ARMS[arm])
    assert ("Plots left out" in page.words) == bool(ARMS[arm])


@pytest.mark.parametrize("arm", ARMS)
def test_page_needs_nothing_but_itself(reports, arm):
    _, page, html = reports(arm)
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://|<script|@import|url\(", html)


@pytest.mark.parametrize("arm", ARMS)
def test_no_nan_or_none_is_shown(reports, arm):
    _, page, _ = reports(arm)
    assert not re.search(r"\b(nan|inf|None|null)\b", page.words.split("Resolved configuration")[0])


def test_headlines_say_what_the_summary_says(reports):
    _, page, _ = reports("cotrained")
    for words in (
        "59.0 % → 85.2 %",
        "95 % intervals 52.9–64.8 % and 80.3–89.0 %, 256 held-out prompts",
        "3.31 → 3.78",
        "at most 5; untrained 1.07; frozen twin at the end 3.62",
        "1.20×",
        "k = 2, 1,080 against 900 tokens/s plain",
        "1.06×",
        "draft update overhead 21.0 %",
        "5.1 × 10⁻¹⁴",
    ):
        assert words in page.words


def test_a_policy_without_experts_is_said_to_have_none(fake_run, without_pixels):
    def dense(step, metrics):
        del step
        for name in [name for name in metrics if "experts" in name]:
            del metrics[name]

    run_dir = fake_run(steps=4, change=dense)
    assert "Use of experts: the policy of this run has none" in page_of(run_dir)[1].words
    assert not (run_dir / "plots" / "experts.png").exists()


def test_the_story_follows_the_numbers(reports):
    _, page, _ = reports("cotrained")
    assert "went from 59.0 % to 85.2 % (+26.2 points). The 95 % intervals of the two do not overlap." in page.words
    assert "speculative rollouts were 20.0 % faster than plain ones" in page.words
    assert re.search(
        r"changed by \+0\.3\d tokens: \+0\.5\d entropy part .* and \u22120\.\d\d mismatch part", page.words
    )


def test_speed_section_has_the_table_and_its_reasons(reports):
    _, page, _ = reports("cotrained")
    assert "costs 3.3 plain tokens at batch 1" in page.words and "At batch 32 it costs 5.2." in page.words
    assert "8 2 5,900 1.05 2.50 3.4 5,723 to 6,018" in page.words
    assert "speculative / plain speed of generating one training batch 0.84" in page.words


def test_text_of_the_run_is_escaped(reports):
    _, page, html = reports("off")
    assert "<script>&" in page.words and "&lt;script&gt;&amp;" in html


def test_same_numbers_give_the_same_bytes_and_an_older_plot_goes(reports):
    run_dir, _, html = reports("off")
    (run_dir / "plots" / "draft_loss.png").write_bytes(b"of an earlier report")
    assert write_report(run_dir).read_text(encoding="utf-8") == html
    assert not (run_dir / "plots" / "draft_loss.png").exists()


def test_a_run_that_has_not_ended_has_a_report(fake_run, without_pixels):
    _, page = page_of(fake_run(steps=1, finished=False))
    assert "has written no summary yet" in page.words
    assert "it is timed at the end of a run" in page.words
    assert page.figures == len(EVERY_PLOT) - 1


def test_slower_is_called_slower(fake_run):
    run_dir = fake_run(steps=1)
    text = (run_dir / "summary.json").read_text().replace('"rollout_speedup": 1.2', '"rollout_speedup": 0.8')
    (run_dir / "summary.json").write_text(text)
    assert "speculative rollouts were 20.0\u00a0% slower than plain ones" in " ".join(sentences(load_run(run_dir)))


def test_values_that_are_not_finite_are_named(fake_run):
    def change(step, metrics):
        if step in (3, 4):
            metrics["draft/loss"] = float("nan")
        if step == 5:
            metrics["policy/gradient_norm"] = float("inf")

    words = sentences(load_run(fake_run(steps=6, change=change)))[-1]
    assert words.startswith("Not finite, and left out of the plots: ")
    assert "draft/loss at steps 3, 4" in words and "policy/gradient_norm at step 5" in words


def test_a_metric_that_is_never_finite_counts_as_missing(fake_run):
    nan = {"rollout/tokens_per_second": float("nan")}
    run = load_run(fake_run(steps=2, change=lambda _, metrics: metrics.update(nan)))
    assert "Rollout speed: not in the metrics of this run" in tokens_per_second(run).reason


def test_a_summary_value_that_is_missing_is_said_so():
    assert number(None) == "not measured"
    assert number(float("nan")) == "not finite (nan)"
    assert [number(value) for value in (0.0, 12345.6, 0.85156, 7, "off")] == ["0", "12,346", "0.8516", "7", "off"]


def test_exact_zeros_of_the_kl_are_shown_and_explained(fake_run):
    zero = {"agreement/kl_k3": 0.0}
    run_dir = fake_run("off", steps=3, finished=False, change=lambda _, metrics: metrics.update(zero))
    run = load_run(run_dir)
    drawn = agreement(run)
    assert "Exact zeros cannot stand on a logarithmic axis" in drawn.caption
    lines = [line for line in drawn.figure.axes[0].get_lines() if "exactly 0" in line.get_label()]
    assert [len(line.get_xdata()) for line in lines] == [3]
    assert any("the same log-probability, to the last bit" in words for words in sentences(run))


def test_zeros_of_one_gradient_norm_are_in_sight_beside_the_other(fake_run):
    zero = {"policy/gradient_norm": 0.0}
    drawn = gradient_norms(load_run(fake_run(steps=3, change=lambda _, metrics: metrics.update(zero))))
    axes = drawn.figure.axes[0]
    low, high = axes.get_ylim()
    assert all(low < value < high for line in axes.get_lines() for value in line.get_ydata())
    assert "triangles at its floor" in drawn.caption


def test_changes_are_written_with_a_true_minus_and_no_negative_zero():
    assert [signed(value, 2) for value in (0.256, -0.256, -0.001, 0.0)] == ["+0.26", "\u22120.26", "+0.00", "+0.00"]


def test_entropy_and_mismatch_add_up_to_the_change_of_the_frozen_twin(fake_run):
    def change(step, metrics):
        metrics |= {"draft/tau_prob": 3.0 + 0.1 * step, "frozen_draft/tau_prob": 3.1 + 0.06 * (step - 1)}

    drawn = entropy_and_mismatch(load_run(fake_run(steps=3, change=change)))
    lines = {line.get_label(): line.get_ydata() for line in drawn.figure.axes[0].get_lines()}
    assert lines["entropy part"] == pytest.approx([0.0, 0.1, 0.2])
    assert lines["mismatch part"] == pytest.approx([0.0, -0.04, -0.08])
    assert lines["frozen twin's change (their sum)"] == pytest.approx([0.0, 0.06, 0.12])
    assert "counted in the entropy part" in drawn.caption and "already differed" not in drawn.caption


def test_two_drafts_that_start_apart_are_called_so(fake_run):
    apart = {"draft/tau_prob": 3.0, "frozen_draft/tau_prob": 2.9}
    drawn = entropy_and_mismatch(load_run(fake_run(steps=2, change=lambda _, metrics: metrics.update(apart))))
    assert "already differed by \u22120.100 at step 1" in drawn.caption


def test_a_directory_without_a_run_is_one_clear_line(fake_run, tmp_path):
    with pytest.raises(UserError, match=r"run_dir=.*: no metrics\.jsonl in it") as no_metrics:
        write_report(tmp_path)
    run_dir = fake_run("off", steps=1)
    (run_dir / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json in it") as no_config:
        write_report(run_dir)
    assert "\n" not in str(no_metrics.value) + str(no_config.value)
    assert not (tmp_path / "report.html").exists()


def test_the_pre_training_of_a_draft_has_no_report(fake_run):
    run_dir = fake_run()
    config = json.loads((run_dir / "config.json").read_text()) | {"type": "PretrainConfig"}
    (run_dir / "config.json").write_text(json.dumps(config))
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UserError, match="holds the pre-training of a draft, which has no report"):
        write_report(run_dir)
    assert sorted(run_dir.rglob("*")) == before
