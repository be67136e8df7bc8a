"""Conversations: what is printed, what is kept as files, and that turns go on behind the ids that were sampled."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from PIL import Image

from pyvision_jax.data.jsonl import read_records
from pyvision_jax.recipes.collect import open_pool
from pyvision_jax.serving.chat import Chat
from pyvision_jax.serving.speech import Speech
from tests.policy_rig import ANSWER, Script, code, scripted, settings


@pytest.fixture(scope="module")
def pool():
    with open_pool(settings().sandbox) as pool:
        yield pool


class Terminal:
    """A chat with a scripted policy, and all that it has printed."""

    def __init__(self, pool, folder, *turns: str, **sizes: int):
        self.said: list[str] = []
        self.script = Script()
        self.script.turns = list(turns)
        self.acting = scripted(pool, self.script, slots=1, **sizes)
        self.requests: list[list[int]] = []
        submit = self.acting.engine.submit

        def spied(request):
            self.requests.append(list(request.ids))
            self.acting.engine.turns = {}
            return submit(request)

        self.acting.engine.submit = spied
        self.chat = Chat(self.acting, folder, self.said.append)

    @property
    def text(self) -> str:
        return "".join(self.said)


@pytest.fixture
def terminal(pool, tmp_path):
    opened: list[Terminal] = []

    def open_one(*turns: str, **sizes: int) -> Terminal:
        opened.append(Terminal(pool, tmp_path / "chat", *turns, **sizes))
        return opened[-1]

    yield open_one
    for one in opened:
        one.chat.close()
        assert not one.acting.engine._rows and not one.chat.loop.sessions and not one.chat.loop.alive
    assert pool.metrics().sessions == 0


@pytest.fixture
def photo(tmp_path):
    Image.new("RGB", (96, 64), "red").save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_a_conversation_of_two_turns(terminal, photo, tmp_path):
    cut = "Look.\n" + code("n = 5\nprint(image_clue_0.size)\nimage_clue_0.crop((0, 0, 40, 30))")
    one = terminal(cut, ANSWER)
    one.chat.run([f"/image {photo}\n", "Which digit?\n"])
    text = one.text
    assert f"[image_clue_0: {photo}, 96x64]" in text
    assert text.index("Look.") < text.index("[tool: ok") < text.index("| (96, 64)") < text.index("[answer: 7]")
    picture = tmp_path / "chat" / "chat_001" / "image_clue_1.png"
    assert f"[image_clue_1: {picture}, 40x30]" in text and Image.open(picture).size == (40, 30)
    assert len([piece for piece in one.said if piece in cut]) > 3, "text comes as it is decoded"

    one.script.turns = [code("print(n, image_clue_0.size, image_clue_1.size)"), ANSWER]
    one.chat.run(["And now?\n", "/save\n", "/quit\n", "never said\n"])
    assert "| 5 (96, 64) (40, 30)" in one.text, "variables and pictures are kept"
    tokens = one.acting.host.tokenizer
    before, after = one.requests
    assert after[: len(before)] == before
    rest = tokens.decode(after[len(before) :])
    assert rest.startswith(cut) and rest.endswith("\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    assert "never said" not in "".join(tokens.decode(ids) for ids in one.requests)

    (record,) = read_records(tmp_path / "chat" / "chat_001" / "chat.jsonl")
    assert [m.role for m in record.messages] == ["user", "assistant", "tool", "assistant"] * 2
    assert record.answer.value == "7" and [m.path for m in record.media] == [str(photo), str(picture)]
    assert one.acting.host.protocol.example(record).loss_weights.sum() > 0, "it is a trace to learn from"


def test_a_picture_of_a_later_turn_is_a_variable(terminal, photo, tmp_path):
    one = terminal(code("keep = 41"), "Yes.<end>")
    one.chat.run([f"/image {photo}", "One?"])
    Image.effect_noise((300, 200), 90).convert("RGB").save(tmp_path / "noise.png")
    one.script.turns = [code("print(keep + 1, image_clue_1.size, image_clue_1.mode)"), "Done.<end>"]
    one.chat.run([f"/image {tmp_path / 'noise.png'}", "Two?"])
    assert "[image_clue_1:" in one.text and "| 42 (300, 200) RGB" in one.text
    one.script.turns = [code("print(image_clue_2.size)"), "Done.<end>"]
    one.chat.run([f"/image {photo}", "Three?"])
    assert "| (96, 64)" in one.text


def test_reset_begins_anew(terminal, photo):
    one = terminal(code("keep = 1"), ANSWER)
    one.chat.run([f"/image {photo}", "One?"])
    one.script.turns = [code("print('keep' in globals())"), ANSWER]
    one.chat.run(["/save", "/reset", "Two?", "/save"])
    assert "| False" in one.text and "One?" not in one.acting.host.tokenizer.decode(one.requests[-1])
    assert "chat_001/chat.jsonl" in one.text and "chat_002/chat.jsonl" in one.text


def test_what_cannot_be_used_is_said_and_the_chat_goes_on(terminal, photo, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    one = terminal("Yes.<end>", max_length=300)
    one.chat.run([f"/image {tmp_path / 'none.png'}", f"/image {tmp_path / 'broken.png'}", "/save", "/what", ""])
    text = one.text
    assert "none.png: No such file" in text and "broken.png: not a picture" in text
    assert "[nothing has been said]" in text and "/image PATH" in text and not one.requests
    one.chat.run(["x" * 900])
    assert "at most 299 fit" in one.text and not one.requests
    one.chat.run(["/tmp/a is a path", "Fine?"])
    assert len(one.requests) == 2 and one.text.count("Yes.") == 2


def test_a_policy_does_not_drive_the_terminal(terminal):
    one = terminal("a\x1b[2Jb\x07\tc\n<end>")
    one.chat.run(["Hello"])
    assert "a[2Jb\tc\n" in one.text and "\x1b" not in one.text


def test_a_full_conversation_says_so(terminal):
    one = terminal("word " * 200, max_length=200)
    one.chat.run(["Go on."])
    assert "[ended: over_length]" in one.text
    one.chat.run(["And?"])
    assert "at most 199 fit: /reset" in one.text and len(one.requests) == 1


@pytest.mark.parametrize("where", ["decode", "tool"])
def test_an_interrupt_ends_the_turn_and_keeps_the_rest(terminal, photo, where):
    slow = code("import time\nprint('x')\ntime.sleep(30)")
    one = terminal(code("keep = 7"), {"decode": "word " * 110, "tool": slow}[where])
    one.acting.engine.delay = 0.03
    main, sent = threading.get_ident(), []

    def interrupt():
        while not ("word" in one.text or one.text.count("sleep(30)")):
            time.sleep(0.01)
        time.sleep(0.3)
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    one.chat.run([f"/image {photo}", "Begin."])
    thread.join()
    assert "[ended: cancelled]" in one.text and time.monotonic() - sent[0] < 8
    one.script.turns = [code("print(keep)"), ANSWER]
    one.chat.run(["Go on."])
    assert "| 7\n" in one.text and "[answer: 7]" in one.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------------------------------------------------- speech


def spoken(text: str, stops: tuple[str, ...], size: int) -> tuple[str, str, list[str]]:
    data = text.encode()
    speech = Speech(stops)
    shown = [speech.feed([data[k : k + size]]) for k in range(0, len(data), size)]
    return speech.text, "".join([*shown, speech.finish()]), shown


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_speech_shows_whole_characters_and_holds_back_what_may_be_a_stop(size):
    text, shown, pieces = spoken("ab é🙂 STO STOP tail", ("STOP", "xyz"), size)
    assert text == shown == "ab é🙂 STO "
    assert all("�" not in piece for piece in pieces)
    text, shown, _ = spoken("ab ST", ("STOP",), size)
    assert text == shown == "ab ST", "the end shows what was held back"
    text, shown, _ = spoken("aab", ("ab", "aab"), size)
    assert text == shown == "", "the stop that begins first cuts"


def test_speech_counts_the_ids_it_took():
    speech = Speech(("no",))
    speech.feed([b"a", b"n", b"o", b"b", b"c"])
    assert (speech.fed, speech.text, speech.stopped) == (3, "a", "no")
    assert Speech().feed([b"\xff"]) == "�"
