"""Prompts equal to HF's template, masks that come from pieces, and turns that extend history by ids."""

import json
from pathlib import Path

import numpy as np
import pytest

from pyvision_jax.data import chat
from pyvision_jax.data.records import Message, Part
from pyvision_jax.data.tokenizer import IM_END, IMAGE_PAD, VIDEO_PAD, Tokenizer, train_tiny

GOLDEN = json.loads((Path(__file__).parent / "golden/chat.json").read_text(encoding="utf-8"))
PADS = [3, 5, 2, 4]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    # Trained on whole renderings, so that merges run over every border that the format has.
    return train_tiny([case["text"] for case in GOLDEN] * 2, 420)


def to_messages(messages: list[dict]) -> list[Message]:
    count = 0
    out = []
    for message in messages:
        parts = []
        for part in message["content"]:
            if part["type"] == "text":
                parts.append(Part("text", part["text"]))
            else:
                parts.append(Part(part["type"], index=count))
                count += 1
        out.append(Message(message["role"], tuple(parts)))
    return out


def expand(text: str, pads: list[int]) -> str:
    """The placeholders of a rendered text repeated in order."""
    out, counts = "", iter(pads)
    for piece in text.split("<|vision_start|>"):
        for pad in (IMAGE_PAD, VIDEO_PAD):
            if piece.startswith(pad):
                piece = "<|vision_start|>" + pad * next(counts) + piece.removeprefix(pad)
        out += piece
    return out


def case_id(case: dict) -> str:
    return case["name"] + (", generation" if case["generation"] else "")


def check_prompt(case: dict, tokenizer: Tokenizer) -> None:
    messages = to_messages(case["messages"])
    pads = PADS[: len(chat.media_order(messages))]
    prompt = chat.render_prompt(messages, tokenizer, pads, generation_prompt=case["generation"])
    expected = expand(case["text"], pads)
    assert prompt.ids == tokenizer.encode(expected, allow_special=True)
    assert tokenizer.decode(prompt.ids) == expected
    assert [s.start for s in prompt.roles] == [0, *(s.end for s in prompt.roles[:-1])]
    assert prompt.roles[-1].end == len(prompt.ids)
    roles = [m.role for m in messages]
    roles = (roles if roles[0] == "system" else ["system", *roles]) + ["assistant"] * case["generation"]
    assert [s.role for s in prompt.roles] == roles


@pytest.mark.parametrize("case", GOLDEN, ids=case_id)
def test_prompt_equals_stored_rendering_of_hf(tiny, case):
    check_prompt(case, tiny)


def test_prompt_equals_stored_rendering_with_the_real_vocabulary(test_data):
    tokenizer = Tokenizer(test_data("tokenizers") / "qwen2_5")
    for case in GOLDEN:
        check_prompt(case, tokenizer)


@pytest.mark.parametrize("vision_id", [False, True])
def test_exported_template_renders_the_same_in_transformers(vision_id):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    for case in GOLDEN:
        (text,), _ = render(
            [case["messages"]],
            chat_template=chat.CHAT_TEMPLATE,
            add_generation_prompt=case["generation"],
            add_vision_id=vision_id,
        )
        if vision_id:
            pictures = text.count(IMAGE_PAD)
            for number in range(1, pictures + 1):
                assert f"Picture {number}: <|vision_start|>" in text
                text = text.replace(f"Picture {number}: ", "")
            text = text.replace("Video 1: ", "")
        assert text == case["text"]
    strings = [{"role": "user", "content": "Hello"}]
    (text,), _ = render([strings], chat_template=chat.CHAT_TEMPLATE, add_generation_prompt=True)
    assert text == next(c["text"] for c in GOLDEN if c["name"] == "no system" and c["generation"])


def test_no_default_system(tiny):
    prompt = chat.render_prompt([Message("user", (Part("text", "Hi"),))], tiny, [], default_system=False)
    assert tiny.decode(prompt.ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_placeholder_names_in_a_question_stay_text(tiny):
    question = f"how do I convert this to an <image> tag? Or to {IMAGE_PAD}{IM_END}"
    message = Message("user", (Part("image", index=0), Part("text", question)))
    prompt = chat.render_prompt([message], tiny, [6])
    assert prompt.ids.count(tiny.vision_start) == 1
    assert prompt.ids.count(tiny.image_pad) == 6
    assert prompt.ids.count(tiny.im_end) == 2
    assert question in tiny.decode(prompt.ids)


@pytest.mark.parametrize(
    "indices, count, reason",
    [
        ([0, 1], 1, r"message 1 \(tool\) shows media 1, but 1 are given"),
        ([0], 2, r"by role: user 1; media: 2; not shown exactly once: \[1\]"),
        ([0, 0], 1, r"by role: user 1, tool 1; media: 1; not shown exactly once: \[0\]"),
        ([], 1, "by role: none"),
        ([-1], 1, "shows media -1"),
    ],
)
def test_media_and_placeholders_must_match(tiny, indices, count, reason):
    roles = ("user", "tool")
    messages = [Message(role, (Part("image", index=i),)) for role, i in zip(roles, indices, strict=False)]
    with pytest.raises(ValueError, match=reason):
        chat.render_prompt(messages or [Message("user", ())], tiny, [4] * count)


def test_empty_conversation_is_refused(tiny):
    with pytest.raises(ValueError, match="at least one message"):
        chat.render_prompt([], tiny, [])


TRACE = to_messages(next(c["messages"] for c in GOLDEN if c["name"] == "two tool turns"))


def test_trace_learns_exactly_the_assistant_spans_with_their_end(tiny):
    trace = chat.render_trace(TRACE, tiny, PADS[:3])
    weights = chat.span_weights(trace.spans, len(trace.ids))
    assert trace.media == [0, 1, 2]
    learned = "".join(tiny.decode(trace.ids[s.start : s.end]) for s in trace.spans if s.weight)
    assert learned == "".join(m.parts[0].text + IM_END for m in TRACE if m.role == "assistant")
    assert [s.role for s in trace.spans if s.weight] == ["assistant"] * 3
    assert set(weights) == {0.0, 1.0}
    # Padding is the end-of-text id and never looked at: even where the end of a turn is the padding id, it is learned.
    ends = [s.end - 1 for s in trace.spans if s.weight]
    assert all(trace.ids[end] == tiny.im_end and weights[end] == 1 for end in ends)


def test_trace_text_equals_hf(tiny):
    text = next(c["text"] for c in GOLDEN if c["name"] == "two tool turns" and not c["generation"])
    trace = chat.render_trace(TRACE, tiny, PADS[:3])
    assert tiny.decode(trace.ids) == expand(text, PADS[:3])


def test_history_is_extended_by_ids_and_never_rendered_again(tiny):
    trace = chat.render_trace(TRACE, tiny, PADS[:3])
    ids = chat.render_prompt(TRACE[:2], tiny, PADS[:1]).ids
    for message in TRACE[2:]:
        assert trace.ids[: len(ids)] == ids
        if message.role == "assistant":
            ids = ids + tiny.encode(message.parts[0].text) + [tiny.im_end]
        else:
            index = message.parts[1].index
            local = Message(message.role, (message.parts[0], Part("image", index=0), message.parts[2]))
            ids = ids + chat.render_turn(local, tiny, [PADS[index]])
    assert trace.ids == ids + tiny.encode("\n")


def test_prompt_is_a_prefix_of_the_trace_where_the_answer_starts_with_a_line_end(tiny):
    messages = [Message("user", (Part("text", "Hi"),)), Message("assistant", (Part("text", "\n\nso\n"),))]
    prompt = chat.render_prompt(messages[:1], tiny, [])
    assert chat.render_trace(messages, tiny, []).ids[: len(prompt.ids)] == prompt.ids


def test_part_weights_reach_their_tokens(tiny):
    parts = (
        Part("text", "show(image_clue_0.crop(("),
        Part("text", "96", weight=3.0),
        Part("text", ", masked", weight=0.0),
    )
    trace = chat.render_trace([Message("user", ()), Message("assistant", parts)], tiny, [])
    spans = [(tiny.decode(trace.ids[s.start : s.end]), s.weight) for s in trace.spans][-6:]
    assert spans == [
        ("<|im_start|>assistant\n", 0.0),
        ("show(image_clue_0.crop((", 1.0),
        ("96", 3.0),
        (", masked", 0.0),
        (IM_END, 1.0),
        ("\n", 0.0),
    ]


def test_a_turn_without_learned_text_is_not_learned(tiny):
    masked = Message("assistant", (Part("text", "draft", weight=0.0),))
    trace = chat.render_trace([Message("user", ()), masked], tiny, [])
    assert not chat.span_weights(trace.spans, len(trace.ids)).any()


def test_encode_parts_is_bare_content(tiny):
    ids = chat.encode_parts([Part("text", "a "), Part("image", index=0), Part("text", "b")], tiny, [2])
    assert tiny.decode(ids) == f"a <|vision_start|>{IMAGE_PAD * 2}<|vision_end|>b"


def test_mask_view_shows_every_id_once(tiny):
    trace = chat.render_trace(TRACE, tiny, PADS[:3])
    weights = chat.span_weights(trace.spans, len(trace.ids))
    view = chat.mask_view(trace.ids, weights, tiny)
    assert f"{IMAGE_PAD}x{PADS[0]}" in view.plain
    green = "".join(view.plain[s.start : s.end] for s in view.spans if "green" in str(s.style))
    assert green == "".join(m.parts[0].text + IM_END for m in TRACE if m.role == "assistant")
    with pytest.raises(ValueError, match="weights"):
        chat.mask_view(trace.ids, np.zeros(3), tiny)
