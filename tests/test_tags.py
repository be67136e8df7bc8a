"""The tag automaton: any cut into tokens, exact ends, regions, and the real vocabulary."""

from __future__ import annotations

import json
import lzma
import random
import time
from pathlib import Path

import numpy as np
import pytest

from pyvision_jax.rollout.tags import Mark, Tag, TagAutomaton

CODE = Tag("code", "</code>", "<code>", temperature=0.0)
ANSWER = Tag("answer", "</answer>", "<answer>")
THINK = Tag("think", "</think>", "<think>", stop=False, inside=("code",))
END, ROLE = 256, 257


def build(*tags: Tag, extra: tuple[bytes, ...] = ()) -> TagAutomaton:
    """All single bytes, an end token, a role token, then `extra` tokens from id 258 on."""
    tokens = [*(bytes([b]) for b in range(256)), b"<|im_end|>", b"<|im_start|>", *extra]
    return TagAutomaton.build(tokens, tags, {END: "im_end"}, [ROLE], vocab_size=len(tokens) + 3)


def walk(automaton: TagAutomaton, ids: list[int] | bytes, state: int = 0) -> list[int]:
    """State after each id, until the first stop."""
    states = []
    for token in ids:
        state = int(automaton.next[state, token])
        states.append(state)
        if automaton.stop[state]:
            break
    return states


def stop_of(automaton: TagAutomaton, ids: list[int] | bytes, state: int = 0) -> tuple[int, str] | None:
    """(index of the id that stops, name of its event)."""
    states = walk(automaton, ids, state)
    if not states or not automaton.stop[states[-1]]:
        return None
    return len(states) - 1, automaton.events[automaton.event[states[-1]]]


def test_stops_exactly_at_the_closing_tag():
    automaton = build(CODE, ANSWER)
    text = b"a < b <cod <code>x = '</cod'\n</code> more"
    assert stop_of(automaton, text) == (text.index(b"</code>") + 6, "code")
    assert stop_of(automaton, b"<<answer>yes<</answer>") == (21, "answer")
    assert stop_of(automaton, b"</code> closes nothing </answer>") is None


def test_an_answer_inside_code_is_text_and_the_other_way_round():
    automaton = build(CODE, ANSWER)
    text = b"<code>print('<answer>4</answer>')</code>"
    assert stop_of(automaton, text) == (len(text) - 1, "code")
    text = b"<answer><code>1</code></answer>"
    assert stop_of(automaton, text) == (len(text) - 1, "answer")


def test_regions_nest_and_a_stop_rests_in_the_enclosing_one():
    automaton = build(CODE, ANSWER, THINK)
    assert set(automaton.regions) == {(), ("code",), ("answer",), ("think",), ("think", "code")}
    text = b"<think>maybe <answer>3</answer>? <code>1</code>"
    states = walk(automaton, text)
    assert len(states) == len(text) and automaton.events[automaton.event[states[-1]]] == "code"
    rest = int(automaton.rest[states[-1]])
    assert automaton.regions[automaton.region[rest]] == ("think",)
    assert stop_of(automaton, b"<answer>3</answer></think><answer>4</answer>", rest) == (43, "answer")


def test_temperature_covers_the_code_and_its_closing_tag():
    automaton = build(CODE, ANSWER, THINK)
    table = automaton.temperatures(0.7)
    text = b"x<code>y</code>"
    before = [0, *walk(automaton, text)[:-1]]
    got = [float(table[automaton.region[state]]) for state in before]
    assert got == pytest.approx([0.7] * 7 + [0.0] * 8)
    override = automaton.temperatures(0.7, code=0.2, answer=None)
    assert {path: round(float(t), 3) for path, t in zip(automaton.regions, override, strict=True)} == {
        (): 0.7, ("code",): 0.2, ("answer",): 0.7, ("think",): 0.7, ("think", "code"): 0.2,
    }  # fmt: skip


def test_a_token_that_ends_a_tag_in_its_middle_is_trimmed_by_bytes():
    automaton = build(CODE, ANSWER, extra=(b"</code>\n\nSo", b"de>", b"x<code>1</code>", b"</answer><code>"))
    long, tail, whole, both = range(258, 262)
    inside = automaton.scan(b"<code>x")
    assert stop_of(automaton, [long], inside) == (0, "code") and automaton.trim(inside, long) == 4
    partial = automaton.scan(b"<code>x</co")
    assert stop_of(automaton, [tail], partial) == (0, "code") and automaton.trim(partial, tail) == 0
    assert stop_of(automaton, [whole]) == (0, "code") and automaton.trim(0, whole) == 0
    answer = automaton.scan(b"<answer>2")
    assert stop_of(automaton, [both], answer) == (0, "answer") and automaton.trim(answer, both) == 6
    assert automaton.rest[automaton.next[answer, both]] == 0  # the bytes past the stop open nothing
    assert automaton.marks([*b"<code>", long], 0) == [Mark("code", "open", 5, 0), Mark("code", "close", 6, 4)]


def test_end_tokens_are_matched_by_id_and_roles_reset():
    automaton = build(CODE, ANSWER)
    assert stop_of(automaton, [*b"<code>x", END]) == (7, "im_end")
    assert automaton.trim(automaton.scan(b"<code>"), END) == 0
    assert stop_of(automaton, b"<|im_end|>") is None
    assert automaton.scan([*b"<code>x", ROLE]) == 0
    assert automaton.next[5, len(automaton.token_bytes)] == 5  # ids that the tokenizer lacks read as nothing
    # only what follows the last role decides where a prompt leaves off
    prompt = [*b"write <code> first", ROLE, *b"assistant\n<answer>"]
    assert automaton.regions[automaton.region[automaton.prompt_state(prompt)]] == ("answer",)
    assert automaton.marks([*b"<answer>", END])[-1] == Mark("im_end", "end", 8, 0)


def test_plain_stop_strings_and_overlapping_prefixes():
    automaton = build(Tag("call", "</tool_call>"), Tag("short", "abab"), Tag("tail", "ba!"))
    assert stop_of(automaton, b"ababa") == (3, "short")
    assert stop_of(automaton, b"aaba!") == (4, "tail")
    assert stop_of(automaton, b"</tool_</tool_call>") == (18, "call")


def test_any_cut_into_tokens_gives_the_same_verdict():
    """Against a direct search of the bytes, over random texts cut at random places."""
    rng = random.Random(0)
    parts = [
        b"<code>",
        b"</code>",
        b"<answer>",
        b"</answer>",
        b"<think>",
        b"</think>",
        b"<",
        b"</",
        b"co",
        b"x",
        "é".encode(),
    ]
    pieces = sorted({text[i:j] for text in parts for i in range(len(text)) for j in range(i + 1, len(text) + 1)})
    automaton = build(CODE, ANSWER, THINK, extra=tuple(pieces))
    index = {piece: 258 + i for i, piece in enumerate(pieces)}

    def expected(data: bytes) -> tuple[int, str] | None:
        path: list[str] = []
        words = {(): ["<code>", "<answer>", "<think>"], ("think",): ["<code>", "</think>"]}
        start = 0
        for end in range(1, len(data) + 1):
            for word in words.get(tuple(path), [f"</{path[-1]}>"] if path else []):
                if data[start:end].endswith(word.encode()):
                    start = end
                    if not word.startswith("</"):
                        path.append(word[1:-1])
                    elif path.pop() != "think":
                        return end, word[2:-1]
                    break
        return None

    stops = 0
    for _ in range(500):
        data = b"".join(rng.choices(parts, k=rng.randint(3, 14)))
        ids, at = [], 0
        while at < len(data):
            size = max(n for n in range(1, 10) if n == 1 or (rng.random() < 0.6 and data[at : at + n] in index))
            piece = data[at : at + size]
            ids.append(index.get(piece, piece[0]))
            at += size
        found, want = stop_of(automaton, ids), expected(data)
        assert (found is None) == (want is None), data
        if found and want:
            stops += 1
            ended = sum(len(automaton.token_bytes[i]) for i in ids[: found[0] + 1])
            state = walk(automaton, ids[: found[0]])[-1] if found[0] else 0
            assert (ended - automaton.trim(state, ids[found[0]]), found[1]) == want, data
    assert stops > 100


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ((CODE, CODE), "not unique"),
        ((Tag("a", "", "<a>"),), "empty"),
        ((Tag("a", "</a>", "<a>", inside=("b",)),), "unknown tag 'b'"),
        ((Tag("a", "</a>", "<a>", inside=("a",)),), "inside itself"),
        ((Tag("a", "</a>", "<x>"), Tag("b", "</b>", "<x>")), "means two things"),
    ],
)
def test_bad_tags_are_named(tags: tuple[Tag, ...], message: str):
    with pytest.raises(ValueError, match=message):
        build(*tags)


def test_real_vocabulary(test_data):
    """152k tokens are lifted in seconds, and the table agrees with running the bytes."""
    path: Path = test_data("tokenizers") / "qwen2_5" / "tokenizer.json.xz"
    data = json.loads(lzma.decompress(path.read_bytes()))
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}  # GPT-2's printable alphabet
    added = {entry["id"]: entry["content"].encode() for entry in data["added_tokens"]}
    tokens = [b""] * (max(*data["model"]["vocab"].values(), *added) + 1)
    for text, token in data["model"]["vocab"].items():
        tokens[token] = bytes(byte_of[c] for c in text)
    for token, text in added.items():
        tokens[token] = text
    im_end, im_start = tokens.index(b"<|im_end|>"), tokens.index(b"<|im_start|>")

    start = time.perf_counter()
    automaton = TagAutomaton.build(tokens, (CODE, ANSWER, THINK), {im_end: "im_end"}, [im_start], 152_064)
    assert time.perf_counter() - start < 10
    assert automaton.next.shape[1] == 152_064 and automaton.next.dtype == np.int16

    rng = np.random.default_rng(0)
    tricky = [i for i, t in enumerate(tokens) if b"<" in t or b">" in t or b"/" in t]
    for token in [*rng.choice(len(tokens), 500).tolist(), *rng.choice(tricky, 500).tolist()]:
        if token in (im_end, im_start):
            continue
        for begin in rng.choice(len(automaton.next), 4).tolist():
            state = begin
            for byte in tokens[token]:
                state = int(automaton.byte_next[state, byte])
            assert automaton.next[begin, token] == state
    ends = [t for t in tokens if t.endswith(b"code") and len(t) > 4]
    closing = [i for i, t in enumerate(tokens) if t.startswith(b">\n")]
    assert ends and closing  # the vocabulary does cut tags across tokens
    inside = automaton.scan([tokens.index(bytes([b])) for b in b"<code>1</code"])
    for token in closing:
        assert automaton.events[automaton.event[automaton.next[inside, token]]] == "code"
        assert automaton.trim(inside, token) == len(tokens[token]) - 1
