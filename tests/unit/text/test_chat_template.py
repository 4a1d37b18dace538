from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest

from draftco_jax.errors import UserError
from draftco_jax.text.chat import Chat
from draftco_jax.text.chat_template import ChatTemplate
from draftco_jax.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
DATE = datetime(2026, 5, 4)


def load(folder, **options):
    return ChatTemplate.load(folder, Tokenizer.load(folder), **options)


def test_a_conversation_as_text(model_folder):
    template = load(model_folder(style="chatml"))
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hello"}, USER]
    assert template.render(messages, add_generation_prompt=True).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_date_and_switches_reach_the_template(model_folder):
    folder = model_folder(style="headers")
    text = load(folder, now=DATE).render([USER], tools=[{"name": "f", "text": "<é>"}]).text
    assert text == (
        '<s><|head|>system<|/head|>\n\nToday is 04 May 2026\n{\n    "name": "f",\n    "text": "<é>"\n}<|im_end|>'
        "<|head|>user<|/head|>\n\nHi<|im_end|>"
    )
    thinking = model_folder(folder="b", style="thinking")
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert load(thinking).render([USER], add_generation_prompt=True).text == prompt
    off = load(thinking, switches={"enable_thinking": False})
    assert off.render([USER], add_generation_prompt=True).text == prompt + "<think>\n\n</think>\n\n"
    documents = ChatTemplate({"default": "{% for d in documents %}{{ d.title }};{% endfor %}"}, {})
    assert documents.render([USER], documents=[{"title": "a"}, {"title": "b"}]).text == "a;b;"


def test_where_templates_are_found_and_which_is_used(model_folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = model_folder(changes={"chat_template": named})
    assert load(folder).render([USER]).text == "plain"
    assert load(folder).render([USER], tools=[]).text == "with tools"
    assert load(folder, name="default").render([USER], tools=[]).text == "plain"
    with pytest.raises(UserError, match=r"template='rag' must be one of \['default', 'tool_use'\]"):
        load(folder, name="rag")
    (folder / "chat_template.jinja").write_bytes(b"from a file\r\nend\n")
    assert load(folder).render([USER], tools=[]).text == "from a file\nend"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    assert load(folder).render([USER], tools=[]).text == "tools from a file"
    only = ChatTemplate({"rag": "x"}, {})
    with pytest.raises(UserError, match="none of which is 'default'"):
        only.render([USER])


def test_a_folder_without_template_is_refused(model_folder):
    with pytest.raises(UserError, match="chat template of .* is missing; put chat_template.jinja"):
        load(model_folder())
    with pytest.raises(UserError, match="must be a text or a list of tables"):
        load(model_folder(folder="b", changes={"chat_template": [1]}))


def test_saved_templates_are_read_back(model_folder, tmp_path):
    named = [{"name": "default", "template": "a\n{{ 1 }}\n"}, {"name": "tool_use", "template": "b"}]
    folder = model_folder(changes={"chat_template": named})
    template = load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    template.save(folder)
    assert load(folder).templates == template.templates


def test_none_is_no_value_and_reasoning_goes_by_every_name():
    show = ChatTemplate({"default": "{% for k, v in messages[0].items() | sort %}{{ k }}={{ v }};{% endfor %}"}, {})
    assert show.render([{"role": "a", "content": None, "tool_calls": None}]).text == "role=a;"
    for name in ("reasoning_content", "thinking", "reasoning"):
        text = show.render([{"role": "a", name: "why"}]).text
        assert "reasoning_content=why;" in text and "thinking=why;" in text


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], r"messages=\[\] must hold at least one message"),
        ([{"content": "x"}], r"messages\[0\]=.* must be a table with a role"),
        ([{"role": "user", "content": np.float32(1)}], r"messages\[0\].content=.* must be text, number, list or table"),
        (
            [{"role": "user", "content": [{"a": {1: 2}}]}],
            r"messages\[0\].content\[0\].a must have texts as keys, not 1",
        ),
        ([{"role": "assistant", "content": "x"}], "the first turn must be a user turn.*roles: assistant"),
    ],
)
def test_bad_conversations_are_refused_in_one_line(template, messages, message):
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate({"default": template("headers")}, {"bos_token": "<s>"}).render(messages)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_jinja_says_its_line():
    with pytest.raises(UserError, match=r"chat template='default' must be a Jinja template \(.*, line 2\)"):
        ChatTemplate({"default": "a\n{% for %}"}, {}).render([USER])


def test_switches_cannot_replace_the_conversation():
    with pytest.raises(UserError, match=r"switches=\['messages'\] must not be arguments"):
        ChatTemplate({"default": ""}, {}, {"messages": []})


def test_b78_settings_of_another_run_are_noticed(model_folder):
    folder = model_folder(style="thinking")
    mine = load(folder, switches={"enable_thinking": False}, now=DATE)
    stored = json.loads(json.dumps(mine.settings()))
    mine.require_settings(stored, "the draft")
    for other in (load(folder, now=DATE), load(folder, switches={"enable_thinking": True}, now=DATE)):
        with pytest.raises(UserError, match="chat template switches=.* must be those of the draft"):
            other.require_settings(stored, "the draft")
    with pytest.raises(UserError, match="chat template now="):
        load(folder, switches={"enable_thinking": False}).require_settings(stored, "the draft")
    changed = ChatTemplate({"default": mine.templates["default"] + " "}, {}, mine.switches, now=DATE)
    with pytest.raises(UserError, match="chat template templates="):
        changed.require_settings(stored, "the draft")


def test_chat_loads_everything_of_a_folder(model_folder):
    chat = Chat.load(model_folder(style="chatml", generation_config={"eos_token_id": [0]}))
    assert chat.stops.ids == (0, 2)
    assert chat.encode([USER]).ids[0] == 1
