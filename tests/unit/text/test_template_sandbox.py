from __future__ import annotations

import time

import pytest

from draftco_jax.errors import UserError
from draftco_jax.text import template_sandbox
from draftco_jax.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=None, **options):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages or USER, **options).text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ dict.__base__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('%s' % messages).format.__self__.__class__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ (messages[0] | attr('__class__')).x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_nothing_outside_is_reached(source):
    try:
        text = render(source)
    except UserError as error:
        assert "\n" not in str(error) and "must be able to write this conversation" in str(error)
        return
    # What the sandbox calls undefined is written as nothing.
    assert text in ("", "[Undefined]"), text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].pop('role') }}",
    ],
)
def test_arguments_are_not_changed(source):
    with pytest.raises(UserError, match="SecurityError"):
        render(source)


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(100) %}{% set ns.x = EXPR %}{% endfor %}"
LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + "{% endfor %}" * 3,
        LOOP * 3 + "x" + "{% endfor %}" * 3,
        LOOP + "{{ 'a' * 10000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ range(1000000000) | list }}",
        "{{ 'a' * 10000000000 }}",
        "{{ ['a'] * 10000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'.zfill(width=10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10000000000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ 'a' | indent(10000000000) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        DOUBLING.replace("EXPR", "ns.x + ns.x"),
        DOUBLING.replace("EXPR", "ns.x ~ ns.x"),
        DOUBLING.replace("EXPR", "ns.x * 2"),
        DOUBLING.replace("EXPR", "ns.x.replace('b', 'bb' ~ ns.x)"),
        DOUBLING.replace("EXPR", "ns.x | replace('b', 'bb' ~ ns.x)"),
        DOUBLING.replace("EXPR", "[ns.x, ns.x] | join"),
        DOUBLING.replace("EXPR", "ns.x.join([ns.x, ns.x])"),
        DOUBLING.replace("EXPR", "[ns.x, ns.x]") + "{{ ns.x }}",
        DOUBLING.replace("EXPR", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
        DOUBLING.replace("EXPR", "[ns.x, ns.x]") + "{{ ns.x | string | length }}",
    ],
)
def test_endless_and_huge_work_is_refused_in_one_line(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 1 << 14)  # the annotations of every call are checked here: slow
    started = time.monotonic()
    with pytest.raises(UserError, match="LimitExceeded|RecursionError|OverflowError") as caught:
        render(source)
    assert time.monotonic() - started < 60
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_long_honest_conversations_are_far_from_the_limits(template):
    messages = [{"role": ("user", "assistant")[i % 2], "content": "x" * 200} for i in range(4000)]
    text = render(template("thinking"), messages)
    assert text.count("<|im_end|>") == 4000


def test_counting_does_not_change_what_is_written():
    source = (
        "{%- for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{% if loop.index0 == 3 %}{% break %}"
        "{% endif %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}"
        "{%- macro bold(x) %}*{{ x }}*{{ caller() if caller }}{% endmacro %}{{ bold('a') }}"
        "{%- for k, v in {'p': [1, [2]]}.items() recursive %}{{ k }}{{ v | length }}{% endfor %}"
    )
    messages = [{"role": "user", "content": c} for c in "abcde"]
    assert render(source, messages) == "1a3c*a*p2"


@pytest.mark.parametrize(
    "source, text",
    [
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}\n", "1\n"),
        ("{{ {'a': '<b> & é', 'z': [1, 2.5, none, true]} | tojson }}", '{"a": "<b> & é", "z": [1, 2.5, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=true) }}", '{"a": "\\u00e9"}'),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}|{}'.format('b', 2) }}{{ '%.2f' | format(1.5) }}", "a-007   b|21.50"),
        ("{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['c']) }}{{ 'x' ~ 1 ~ none }}{{ 2 ** 3 * 4 }}", "a, bcx1None32"),
        ("{{ bos_token }}{{ missing }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "<s>1"),
        ("{{ dict(a=1).items() | list }}{{ namespace(obj=1, context=2).obj }}", "[('a', 1)]1"),
    ],
)
def test_what_templates_use_works(source, text):
    assert render(source) == text


def test_generation_marks_inside_a_macro_are_refused_not_misplaced():
    source = "abc{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ 'defg' ~ f() }}"
    with pytest.raises(UserError, match="must not be inside a macro"):
        render(source)


def test_the_limit_of_steps_holds_as_shipped():
    with pytest.raises(UserError, match="more than 1048576 loop passes and macro calls|more than 30.0 seconds"):
        render(LOOP * 2 + "{% endfor %}" * 2)


def test_passes_that_a_loop_s_condition_leaves_out_count_too(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 1 << 14)
    with pytest.raises(UserError, match="more than 16384 loop passes"):
        render("{% for i in range(99999) if false %}x{% endfor %}")


def test_time_ends_what_no_step_shows(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(UserError, match="more than 0.2 seconds"):
        render("{% for i in range(9999) %}{% set x = range(999) | sort | reverse | sum %}{% endfor %}")


def test_one_rendering_does_not_count_for_the_next(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 300)
    source = "{% for i in range(200) %}{% endfor %}ok"
    assert [render(source) for _ in range(3)] == ["ok"] * 3
    with pytest.raises(UserError, match="more than 300 loop passes"):
        render(source * 3)
