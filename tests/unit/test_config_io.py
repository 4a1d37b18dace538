"""Checks the config machinery on toy dataclasses."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import pytest

from draftco_jax.config_io import apply_overrides, diff, from_json, load_python_config, to_json
from draftco_jax.errors import UserError


class Draft(Protocol):
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    depth: int = 4
    decay: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    depth: int = 8
    layers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    size: int = 8
    baseline: Literal["std", "leave_one_out"] = "std"

    def __post_init__(self):
        if self.size < 2 and self.baseline == "std":
            raise ValueError(
                f"size={self.size} must be at least 2 with baseline=std; use leave_one_out or a larger group"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str = "toy"
    resume: bool = False
    steps: int = 100
    limit: int | None = None
    label: str | None = None
    optimizer: Adam = Adam()
    group: Group = Group()
    draft: Chain | Block | None = Chain()
    open_draft: Draft = Chain()
    rewards: tuple[Group, ...] = (Group(), Group(size=3))


REGISTRY = (Chain, Block)


def test_json_round_trip_gives_an_equal_config():
    run = Run(draft=Block(layers=()), open_draft=Block(), limit=3, label="a", optimizer=Adam(clip_norm=None))
    tree = json.loads(json.dumps(to_json(run), allow_nan=False))
    assert tree["type"] == "Run" and tree["draft"] == {"type": "Block", "depth": 8, "layers": []}
    assert from_json(Run, tree, REGISTRY) == run
    assert from_json(Run, to_json(replace(run, draft=None)), REGISTRY).draft is None


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tree: tree.update(stepz=3), "stepz is not a field of Run"),
        (lambda tree: tree["optimizer"].pop("betas"), "optimizer.betas is missing"),
        (lambda tree: tree.update(steps=True), "steps=true must be a whole number"),
        (lambda tree: tree.update(steps=1.5), "steps=1.5 must be a whole number"),
        (lambda tree: tree.update(name={"type": "Adam"}), "name=.* must be a text"),
        (lambda tree: tree.update(resume=1), "resume=1 must be true or false"),
        (lambda tree: tree["optimizer"].update(betas=[0.9]), r"optimizer.betas=\[0.9\] must be a list of 2"),
        (lambda tree: tree["draft"].update(type="Tree"), "draft.type=Tree must be one of Block, Chain"),
        (lambda tree: tree["group"].update(baseline="mean"), "group.baseline=.* must be one of std, leave_one_out"),
        (lambda tree: tree["rewards"][1].update(size=1), r"rewards\[1\]: size=1 must be at least 2"),
        (lambda tree: tree.update(optimizer=None), "optimizer=null must be a Adam"),
    ],
)
def test_a_bad_tree_is_refused_with_its_path(edit, said):
    tree = to_json(Run())
    edit(tree)
    with pytest.raises(UserError, match=said):
        from_json(Run, tree, REGISTRY)


def test_a_value_that_does_not_print_is_refused():
    with pytest.raises(UserError, match="optimizer.learning_rate=inf must be finite"):
        to_json(Run(optimizer=Adam(learning_rate=math.inf)))

    @dataclass(frozen=True)
    class Loose:
        call: object

    with pytest.raises(UserError, match="call=<function"):
        to_json(Loose(call=lambda: 1))


def test_two_registered_classes_with_one_name_are_refused():
    def another():
        @dataclass(frozen=True)
        class Chain:
            depth: int = 1

        return Chain

    with pytest.raises(TypeError, match="two config classes are called Chain"):
        from_json(Run, to_json(Run()), (Chain, another()))


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("steps=12", lambda run: run.steps, 12),
        ("resume=true", lambda run: run.resume, True),
        ("resume=False", lambda run: run.resume, False),
        ("optimizer.learning_rate=1e-4", lambda run: run.optimizer.learning_rate, 1e-4),
        ("optimizer.learning_rate=1", lambda run: run.optimizer.learning_rate, 1.0),
        ("optimizer.clip_norm=none", lambda run: run.optimizer.clip_norm, None),
        ("optimizer.clip_norm=0.5", lambda run: run.optimizer.clip_norm, 0.5),
        ("optimizer.betas=0.8,0.9", lambda run: run.optimizer.betas, (0.8, 0.9)),
        ("optimizer.betas=(0.8, 0.9)", lambda run: run.optimizer.betas, (0.8, 0.9)),
        ("limit=7", lambda run: run.limit, 7),
        ("label=None", lambda run: run.label, None),
        ("label=a=b", lambda run: run.label, "a=b"),
        ("name=3", lambda run: run.name, "3"),
        ("group.baseline=leave_one_out", lambda run: run.group.baseline, "leave_one_out"),
        ("draft.decay=0.5", lambda run: run.draft, Chain(decay=0.5)),
        ("draft=none", lambda run: run.draft, None),
        ("open_draft.depth=2", lambda run: run.open_draft, Chain(depth=2)),
    ],
)
def test_an_override_is_read_by_the_annotation(override, get, value):
    result = get(apply_overrides(Run(), [override]))
    assert result == value and type(result) is type(value)


def test_tuples_of_any_length_are_read():
    run = Run(draft=Block())
    read = {text: apply_overrides(run, [f"draft.layers={text}"]).draft for text in ("", "()", "5", "5,", "[1,2,3]")}
    assert [draft.layers for draft in read.values()] == [(), (), (5,), (5,), (1, 2, 3)]


@dataclass(frozen=True)
class Words:
    words: tuple[str, ...] = ()
    pair: tuple[float, bool | None] = (0.0, None)


def test_a_json_list_holds_texts_as_they_are_written():
    lists = [["\n", ", ", "[a]", ""], [], ['"', "\\n"]]
    assert [apply_overrides(Words(), [f"words={json.dumps(each)}"]).words for each in lists] == list(map(tuple, lists))
    assert apply_overrides(Words(), ["words=a, b"]).words == ("a", "b")
    pair = apply_overrides(Words(), ["pair=[1, null]"]).pair
    assert pair == (1.0, None) and type(pair[0]) is float
    assert apply_overrides(Words(), ["pair=[0.5, true]"]).pair == (0.5, True)
    for text in ('["a"', "[a]", "[1]", "[null]", "[" * 5000):
        with pytest.raises(UserError, match=r"must be a list in which each is a text; what starts with \[ is read as"):
            apply_overrides(Words(), [f"words={text}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=1.5", "steps=1.5 must be a whole number"),
        ("resume=yes", "resume=yes must be true or false"),
        ("limit=many", "limit=many must be a whole number or none"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate=nan must be a finite number"),
        ("optimizer.betas=0.9", "optimizer.betas=0.9 must be a list of 2"),
        ("group.baseline=mean", "group.baseline=mean must be one of std, leave_one_out"),
        ("group.size=1", "group: size=1 must be at least 2"),
        ("draft=Block", "draft=Block cannot be given as text: it is a component .now Chain.; set its fields"),
        ("draft.layers=1", "draft.layers is not a setting; .*fields of draft .Chain. are depth, decay"),
        ("steps.x=1", "steps is 100 in this config and has no field x"),
        ("steps", "'steps' must have the form a.b.c=value"),
        ("a..b=1", "must have the form a.b.c=value"),
    ],
)
def test_a_bad_override_is_refused_in_one_line(override, said):
    with pytest.raises(UserError, match=said) as caught:
        apply_overrides(Run(), [override])
    assert "\n" not in str(caught.value)


def test_an_unknown_path_names_the_nearest_ones():
    with pytest.raises(UserError, match="optimizer.lerning_rate is not a setting; nearest: optimizer.learning_rate;"):
        apply_overrides(Run(), ["optimizer.lerning_rate=1"])
    with pytest.raises(UserError, match="learning_rate is not a setting; nearest: optimizer.learning_rate;"):
        apply_overrides(Run(), ["learning_rate=1"])


def test_overrides_are_checked_together_and_the_last_one_counts():
    run = apply_overrides(Run(), ["group.size=1", "steps=1", "group.baseline=leave_one_out", "steps=2"])
    assert run.group == Group(size=1, baseline="leave_one_out") and run.steps == 2
    for pair in (["draft=none", "draft.depth=1"], ["draft.depth=1", "draft=none"]):
        with pytest.raises(UserError, match="keep one of the two"):
            apply_overrides(Run(), pair)


def test_diff_lists_what_changed():
    old, new = to_json(Run()), to_json(Run(steps=3, draft=Block(), rewards=(Group(), Group(size=4)), limit=0))
    assert diff(old, old) == []
    assert diff(old, new) == [
        "steps: 100 -> 3",
        "limit: null -> 0",
        'draft.type: "Chain" -> "Block"',
        "draft.depth: 4 -> 8",
        "draft.decay: 0.8 -> absent",
        "draft.layers: absent -> [1, 2]",
        "rewards[1].size: 3 -> 4",
    ]
    assert diff({"a": 1, "b": True}, {"a": 1.0, "b": 1}) == ["b: true -> 1"]


def test_a_python_file_may_derive_from_its_neighbour(tmp_path):
    for folder, steps in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "base.py").write_text(f"STEPS = {steps}\n")
        config = tmp_path / folder / "derived.py"
        config.write_text(
            "from fractions import Fraction\nimport base\ndef get_config():\n    return Fraction(base.STEPS)\n"
        )
        from fractions import Fraction

        assert load_python_config(config, Fraction) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", r"bad.py must define a function get_config\(\) that returns a Fraction"),
        ("def get_config():\n    return 3\n", r"get_config\(\) must return a Fraction, it gave a int"),
        ("import no_such_module\n", "bad.py:1: ModuleNotFoundError: No module named"),
        ("def get_config():\n    raise ValueError('a=1 must\\n be 2')\n", "bad.py:2: a=1 must be 2"),
        ("def get_config(:\n", "bad.py:1: SyntaxError: invalid syntax"),
    ],
)
def test_a_bad_python_file_is_refused_with_the_line(tmp_path, text, said):
    from fractions import Fraction

    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        load_python_config(tmp_path / "bad.py", Fraction)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        load_python_config(tmp_path / "missing.py", int)
