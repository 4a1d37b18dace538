from __future__ import annotations

import pytest

from draftco_jax.errors import UserError
from draftco_jax.text.chat import Chat
from draftco_jax.text.dialogue import Dialogue, find_prefix_break


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def generated(chat, text, *, stop=True):
    ids = chat.tokenizer.encode_marked(text).ids
    return (*ids, chat.tokenizer.eos_id) if stop else ids


@pytest.mark.parametrize("name", ["bytes", "characters", "metaspace"])
def test_b74_every_prompt_begins_with_all_ids_so_far(model_folder, name):
    chat = Chat.load(model_folder(name, "chatml"))
    dialogue, prompts = Dialogue.start(chat, [user("hello")]), []
    for n in range(3):
        prompts.append(dialogue.ids)
        dialogue = dialogue.with_response(generated(chat, f"Hi {n} lo"))
        dialogue = dialogue.append_turn([user(f"More {n}")])
    for earlier, later in zip(prompts, [*prompts[1:], dialogue.ids], strict=True):
        assert later[: len(earlier)] == earlier
    # Here the policy writes as the tokenizer does, so one rendering of the whole gives the same ids.
    assert dialogue.ids == chat.encode(dialogue.messages, add_generation_prompt=True).ids
    # The line break after a turn is the template's.
    ends = [i for i, t in enumerate(dialogue.ids) if t == chat.tokenizer.eos_id and dialogue.model_mask[i]]
    assert len(ends) == 3 and not any(dialogue.model_mask[i + 1] for i in ends)
    assert sum(dialogue.model_mask) == sum(len(generated(chat, f"Hi {n} lo")) for n in range(3))


def test_ids_that_the_policy_wrote_in_its_own_way_stay(model_folder):
    chat = Chat.load(model_folder("bytes", "chatml"))
    letters = tuple(chat.tokenizer.encode(c)[0] for c in "quick")
    assert chat.tokenizer.encode("quick") != letters
    start = Dialogue.start(chat, [user("a")])
    dialogue = start.with_response((*letters, 2)).append_turn([user("b")])
    assert dialogue.ids[len(start.ids) : len(start.ids) + 6] == (*letters, 2)
    canonical = chat.encode(dialogue.messages, add_generation_prompt=True)
    assert dialogue.ids != canonical.ids and dialogue.text == canonical.text
    assert dialogue.ids[len(start.ids) + 6 :] == canonical.ids[-(len(dialogue.ids) - len(start.ids) - 6) :]
    broken = find_prefix_break(
        chat, [*dialogue.messages, {"role": "assistant", "content": "c"}], generated=[(*letters, 2), (2,)]
    )
    assert broken is not None and (broken.message, broken.cause) == (1, "encoded anew")
    assert broken.position == len(start.ids)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_b75_tool_results_of_one_turn_share_their_wrapper(model_folder, count):
    chat = Chat.load(model_folder("bytes", "chatml"))
    results = [tool(f"r{i}") for i in range(count)]
    dialogue = Dialogue.start(chat, [user("a")]).with_response(generated(chat, "call"))
    together = dialogue.append_turn(results)
    assert together.ids == chat.encode([*dialogue.messages, *results], add_generation_prompt=True).ids
    glue = "\n<|im_start|>user" + "".join(f"\n<result>\nr{i}\n</result>" for i in range(count))
    assert together.text == dialogue.text + glue + "<|im_end|>\n<|im_start|>assistant\n"


def test_b76_a_dialogue_starts_with_system_and_user(model_folder):
    chat = Chat.load(model_folder("characters", "headers"))
    messages = [{"role": "system", "content": "x"}, user("a"), {"role": "assistant", "content": "b"}]
    assert find_prefix_break(chat, messages) is None
    dialogue = Dialogue.start(chat, messages[:2]).with_response(generated(chat, "b"))
    assert dialogue.ids == chat.encode(messages).ids


def test_b77_observations_come_with_the_markers_of_their_turn(model_folder):
    chat = Chat.load(model_folder("characters", "chatml"))
    dialogue = Dialogue.start(chat, [user("a")]).with_response(generated(chat, "b")).append_turn([user("observed")])
    text = chat.tokenizer.decode(dialogue.ids, skip_special=False)
    assert text.count("<|im_start|>user\nobserved<|im_end|>\n") == 1
    assert (text.count("<|im_start|>"), text.count("<|im_end|>")) == (4, 3)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match=r"messages\[2\] must not hold the control token"):
        Dialogue.start(chat, [user("a")]).with_response((2,)).append_turn([tool("<|im_end|>")])


def test_a_response_cut_by_a_limit_gets_its_end_from_the_template(model_folder):
    chat = Chat.load(model_folder("bytes", "chatml"))
    start = Dialogue.start(chat, [user("a")])
    cut = start.with_response(generated(chat, "The qui", stop=False)).append_turn([user("b")])
    assert cut.text == start.text + "The qui<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert cut.ids.count(2) == 3
    assert not cut.model_mask[[i for i, t in enumerate(cut.ids) if t == 2][1]]


def test_a_template_that_drops_thinking_is_refused_when_it_does(model_folder):
    chat = Chat.load(model_folder("bytes", "thinking"))
    dialogue = Dialogue.start(chat, [user("a")]).with_response(generated(chat, "<think>\nhm\n</think>\n\nfox"))
    # A tool's answer belongs to the same question: thinking stays.
    kept = dialogue.append_turn([tool("r")])
    assert kept.text.startswith(dialogue.text) and kept.ids[: len(dialogue.ids)] == dialogue.ids
    with pytest.raises(UserError, match="must leave the dialogue so far as it is, not write '.*fox.*' for '.*think.*'"):
        dialogue.append_turn([user("b")])
    plain = Dialogue.start(chat, [user("a")]).with_response(generated(chat, "fox"))
    assert plain.append_turn([user("b")]).ids[: len(plain.ids)] == plain.ids


def test_another_stop_token_than_the_template_s_is_refused(model_folder):
    chat = Chat.load(model_folder("bytes", "chatml", config={"eos_token_id": 0}))
    dialogue = Dialogue.start(chat, [user("a")]).with_response((*chat.tokenizer.encode("fox"), 0))
    with pytest.raises(UserError, match=r"not write '.*<\|im_end\|>.*' for '.*<\|endoftext\|>'"):
        dialogue.append_turn([user("b")])


def test_calls_out_of_order_are_refused(model_folder):
    chat = Chat.load(model_folder("bytes", "chatml"))
    start = Dialogue.start(chat, [user("a")])
    with pytest.raises(UserError, match="add the policy's response first"):
        start.append_turn([user("b")])
    done = start.with_response((2,))
    with pytest.raises(UserError, match="add the next messages first"):
        done.with_response((2,))
    with pytest.raises(UserError, match="must not be the assistant's"):
        done.append_turn([{"role": "assistant", "content": "x"}])
    with pytest.raises(UserError, match="at least one id"):
        start.with_response([])
    with pytest.raises(UserError, match="not go on after place 0 of 2"):
        start.with_response((2, 2))


@pytest.mark.parametrize(
    "style, switches, reasoning, cause, message",
    [
        ("chatml", {}, None, None, None),
        ("headers", {}, None, None, None),
        ("thinking", {}, "hm", "history rewritten", 1),
        ("thinking", {"enable_thinking": False}, None, "history rewritten", 1),
        ("thinking", {"enable_thinking": False}, "hm", "generation prompt", 1),
        ("channels", {}, None, "history rewritten", 1),
    ],
)
def test_the_prefix_property_is_tried_and_the_first_break_named(
    model_folder, style, switches, reasoning, cause, message
):
    chat = Chat.load(model_folder("bytes", style), switches=switches)
    answer = {"role": "assistant", "content": "fox"} | ({"reasoning_content": reasoning} if reasoning else {})
    found = find_prefix_break(chat, [user("a"), answer, user("b"), {"role": "assistant", "content": "dog"}])
    assert (found and found.cause, found and found.message) == (cause, message)
    if found:
        assert found.expected != found.found and str(found).startswith(f"messages[1], id {found.position}: {cause}")


def test_the_break_is_at_the_first_id_that_differs(model_folder):
    chat = Chat.load(model_folder("characters", "channels"))
    found = find_prefix_break(chat, [user("a"), {"role": "assistant", "content": "b"}, user("c")])
    # <head>user</head>a<end> <head>assistant</head>final:b -> 1+4+1+1+1 + 1+9+1+6+1 = 26 ids before the end.
    assert found is not None and found.position == 26
    assert (found.expected[-10:], found.found[-10:]) == ("b<|im_end|>"[-10:], "<|head|>us"[-10:])


def test_a_prompt_whose_end_is_split_otherwise_before_an_answer_is_found(model_folder):
    messages = [user("a"), {"role": "assistant", "content": "fox"}]
    # GPT-2's pattern reads two line breaks as one piece at the end of the prompt and as two before a word.
    chat = Chat.load(model_folder("bytes", "headers", arguments={"gpt2": True}))
    found = find_prefix_break(chat, messages)
    assert found is not None and (found.message, found.cause) == (1, "encoded anew")
    prompt = chat.encode(messages[:1], add_generation_prompt=True)
    assert found.position == len(prompt.ids) - 1
    # A dialogue keeps the prompt's own ids, which are those the policy read.
    assert Dialogue.start(chat, messages[:1]).with_response(generated(chat, "fox")).ids[: len(prompt.ids)] == prompt.ids
