"""The server over HTTP: answers and streams, refusals that name the field, and clients that go away."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")

from PIL import Image
from typer.testing import CliRunner

from pyvision_jax.cli import app
from pyvision_jax.data.records import Answer, Media, Message, Part, Record
from pyvision_jax.recipes.collect import open_pool
from pyvision_jax.serving.dialogue import conversation, follow_up
from pyvision_jax.serving.errors import Limits
from pyvision_jax.worlds import tiny
from tests.policy_rig import ANSWER, Script, code, scripted, settings
from tests.serve_rig import MODEL, asked, picture_url, server

QUEUE = 2
LONG = "thinking " * 60


@pytest.fixture(scope="module")
def acting():
    script = Script()
    with open_pool(settings().sandbox) as pool:
        yield scripted(pool, script)


@pytest.fixture(scope="module")
def running(acting):
    limits = Limits(picture_pixels=10_000, pictures=3, queue=QUEUE, body_bytes=200_000)
    with server(acting, acting.engine.script, limits) as client:
        yield client


@pytest.fixture
def client(running):
    running.script.turns, running.service.acting.engine.delay = [ANSWER], 0.0
    yield running
    running.service.acting.engine.delay = 0.0
    running.free()


def count(client, name: str) -> int:
    status, text = client.get("/metrics")
    assert status == 200
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"pyvision_{name} ")))


# ---------------------------------------------------------------------------------------------------------- answers


def test_an_answer_with_a_tool_call(client):
    client.script.turns = [
        "Look.\n" + code("print(image_clue_0.size)\nimage_clue_0.crop((0, 0, 40, 30))"),
        "So.\n" + ANSWER,
    ]
    status, body = client.post(asked("Which digit?", picture_url()))
    assert status == 200, body
    (choice,) = body["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "stop" and choice["end_reason"] == "answered" and message["answer"] == "7"
    assert message["content"] == client.script.turns[0] + "\n" + client.script.turns[1].removesuffix("<end>")
    (step,) = message["steps"]
    assert (step["type"], step["turn"], step["status"]) == ("tool", 0, "ok") and "(96, 64)" in step["text"]
    (image,) = step["images"]
    assert image["name"] == "image_clue_1"
    shown = Image.open(io.BytesIO(base64.b64decode(image["url"].split(",")[1])))
    assert shown.size == (40, 30)
    used, tokens = body["usage"], tiny.tokenizer()
    said = [len(tokens.encode(turn.removesuffix("<end>"))) for turn in client.script.turns]
    assert used["completion_tokens"] == sum(said) + 1, "the end token counts"
    assert used["observation_tokens"] > 0
    total = used["prompt_tokens"] + used["completion_tokens"] + used["observation_tokens"]
    assert used["total_tokens"] == total and body["object"] == "chat.completion" and body["model"] == MODEL


def test_a_stream_says_the_same(client):
    client.script.turns = [LONG + code("image_clue_0"), "é🙂 " + ANSWER]
    body = asked("Which digit?", picture_url())
    _, whole = client.post(body)
    events = client.stream({**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    deltas = [event["choices"][0] for event in events[:-2]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    texts = [delta["delta"]["content"] for delta in deltas if "content" in delta["delta"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"] and "é🙂" in "".join(texts)
    assert len(texts) > 10, "text comes as it is decoded, not turn by turn"
    (step,) = [delta["delta"]["step"] for delta in deltas if "step" in delta["delta"]]
    expected = whole["choices"][0]["message"]["steps"][0]
    assert {**step, "seconds": 0} == {**expected, "seconds": 0}
    assert deltas[-1]["finish_reason"] == "stop" and deltas[-1]["delta"] == {"answer": "7"}
    assert all(delta["finish_reason"] is None for delta in deltas[:-1])
    assert {event["id"] for event in events[:-1]} == {events[0]["id"]}


def test_siblings_have_a_session_of_their_own(client):
    client.script.turns = [code("n = {sibling}\nprint('mine', n)"), code("print('still', n)"), ANSWER]
    status, body = client.post(asked("Which digit?", picture_url(), n=3))
    assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for choice in body["choices"]:
        assert [f"still {choice['index']}" in step["text"] for step in choice["message"]["steps"]] == [False, True]


def test_a_reply_in_plain_words_is_one(client):
    client.script.turns = ["Good morning.<end>"]
    _, body = client.post(asked("Hello"))
    choice = body["choices"][0]
    assert choice["message"]["content"] == "Good morning." and choice["end_reason"] == "replied"
    assert choice["message"]["answer"] is None and choice["finish_reason"] == "stop"


def test_a_malformed_call_is_told_and_the_policy_goes_on(client):
    client.script.turns = [code(""), ANSWER]
    _, body = client.post(asked())
    (step,) = body["choices"][0]["message"]["steps"]
    assert step["type"] == "notice" and "empty" in step["text"] and body["choices"][0]["end_reason"] == "answered"


def test_limits_of_turns_end_it(client):
    client.script.turns = [code("print(1)")]
    _, body = client.post(asked())
    choice = body["choices"][0]
    assert choice["end_reason"] == "over_turns" and choice["finish_reason"] == "length"
    assert len(choice["message"]["steps"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_counts_all_turns(client, stream):
    client.script.turns = ["a b c " + code("print(1)"), LONG + ANSWER]
    first = len(tiny.tokenizer().encode(client.script.turns[0]))
    body = asked(max_completion_tokens=first + 11)
    if stream:
        events = client.stream({**body, "stream_options": {"include_usage": True}})
        used, end = events[-2]["usage"], events[-3]["choices"][0]
    else:
        _, answer = client.post(body)
        used, end = answer["usage"], answer["choices"][0]
    assert used["completion_tokens"] == first + 11
    assert end["finish_reason"] == "length" and end["end_reason"] == "over_length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(client, stream):
    client.script.turns = ["one two STOP HERE three " + ANSWER]
    body = asked(stop=["STOP NOW", "STOP HERE"])
    if stream:
        events = client.stream(body)
        content = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        end = events[-2]["choices"][0]
    else:
        _, answer = client.post(body)
        content, end = answer["choices"][0]["message"]["content"], answer["choices"][0]
    assert content == "one two " and end["finish_reason"] == "stop" and end["end_reason"] == "stop"


def test_logprobs_cover_what_was_sampled(client):
    client.script.turns = ["hm " + code("print(1)"), ANSWER]
    _, body = client.post(asked(logprobs=True, max_tokens=400))
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert {entry["logprob"] for entry in entries} == {-0.5}
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]


def test_history_is_what_a_trace_says(client):
    history = [
        {"role": "system", "content": "Be brief."},
        *asked("One?", picture_url())["messages"],
        {"role": "assistant", "content": "Yes.", "steps": [], "answer": None},
        *asked("And this?", picture_url(80, 80))["messages"],
    ]
    client.script.turns = [code("print(image_clue_0.size, image_clue_1.size)"), ANSWER]
    seen = []
    submit = client.service.acting.engine.submit

    def spied(request):
        seen.append(list(request.ids))
        return submit(request)

    client.service.acting.engine.submit = spied
    try:
        status, body = client.post({"model": MODEL, "messages": history})
    finally:
        del client.service.acting.engine.submit
    assert status == 200, body
    assert "(96, 64) (80, 80)" in body["choices"][0]["message"]["steps"][0]["text"]
    text = tiny.tokenizer().decode(seen[0])
    assert text.count("<|image_pad|>") == 6 + 9, "56x84 and 84x84"
    assert text.index("One?") < text.index("Yes.<|im_end|>") < text.index("And this?")
    assert "<image_clue_1>" in text and text.endswith("<|im_start|>assistant\n")


def test_requests_join_while_others_decode(client):
    client.service.acting.engine.delay = 0.02
    client.script.turns = [LONG + LONG + ANSWER]
    connection, answer = client.open_stream(asked())
    for line in answer:
        if b"thinking" in line:
            break
    client.script.turns = [ANSWER]
    start = time.monotonic()
    status, _ = client.post(asked())
    assert status == 200 and time.monotonic() - start < 5
    assert client.service.open == 1, "the first one still decodes"
    rest = answer.read()
    assert b"[DONE]" in rest
    connection.close()


# ---------------------------------------------------------------------------------------------------------- refusals

BROKEN = "data:image/png;base64,@@@"
URL = "messages[0].content[0].image_url.url"
NO_PICTURE = "data:image/png;base64," + base64.b64encode(b"no picture at all").decode()


@pytest.mark.parametrize(
    "change, param, says",
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"best_of": 2}, "best_of", "unknown field"),
        ({"top_p": 0.5}, "top_p", "sampling.top_p"),
        ({"tools": [{}]}, "tools", "sandbox"),
        ({"presence_penalty": 1}, "presence_penalty", "not offered"),
        ({"temperature": -1}, "temperature", "0 to 2"),
        ({"temperature": "hot"}, "temperature", "0 to 2"),
        ({"n": 0}, "n", "1 to 16"),
        ({"n": 99}, "n", "1 to 16"),
        ({"n": True}, "n", "whole number"),
        ({"n": 9}, "n", "exceeds the 6 dialogues"),
        ({"seed": -1}, "seed", "not in 0"),
        ({"max_tokens": 0}, "max_tokens", "not in 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differs"),
        ({"max_tokens": 5000}, "max_tokens", "at most"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream": True, "logprobs": True}, "logprobs", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "at least one"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls", "unknown"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type", "video"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role", "must be a user's"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]},
            "messages[1].role",
            "take turns",
        ),
        ({"messages": asked("x" * 2000)["messages"]}, "messages", "at most 899 fit"),
        ({"messages": asked("x", BROKEN)["messages"]}, URL, "broken base64"),
        ({"messages": asked("x", NO_PICTURE)["messages"]}, URL, "not a picture"),
        (
            {"messages": asked("x", picture_url(200, 60))["messages"]},
            URL,
            "200x60 = 12,000 pixels; at most 10,000",
        ),
        ({"messages": asked("x", picture_url(100, 4))["messages"]}, "messages", "aspect ratio"),
        ({"messages": asked("x", *[picture_url()] * 4)["messages"]}, "messages[0].content[3]", "at most 3"),
        ({"messages": asked("x", "http://example.com/a.png")["messages"]}, URL, "http"),
        ({"messages": asked("x", "file:///etc/passwd")["messages"]}, URL, "--allow-local"),
        ({"messages": asked("x", "/etc/passwd")["messages"]}, URL, "not fetched"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(client, change, param, says):
    status, body = client.post({**asked(), **change})
    assert status == 400, body
    error = body["error"]
    assert error["param"] == param and says in error["message"] and error["type"] == "invalid_request_error"


def test_bodies_that_are_no_request(client):
    assert client.post(b"{")[1]["error"]["code"] == "invalid_body"
    assert client.post(b"[1]")[0] == 400
    assert client.post(b"[" * 100_000)[0] == 400
    assert client.post({"model": "other", "messages": []})[0] == 404
    assert client.post(asked("x" * 300_000))[0] == 413
    assert client.post(asked(), {"content-type": "text/plain"})[0] == 415
    assert client.get("/v1/nothing")[0] == 404 and "error" in json.loads(client.get("/v1/nothing")[1])
    assert client.get("/v1/chat/completions")[0] == 405


def test_a_full_queue_is_429(client):
    client.service.acting.engine.delay = 0.05
    client.script.turns = [LONG + ANSWER]
    refused = count(client, "requests_refused_total")
    streams = [client.open_stream(asked(n=3)), client.open_stream(asked(n=3))]
    assert all(answer.status == 200 for _, answer in streams)
    status, body = client.post(asked())
    assert status == 429 and "6 of 6" in body["error"]["message"] and body["error"]["code"] == "queue_full"
    assert count(client, "requests_refused_total") == refused + 1
    for connection, _ in streams:
        connection.close()
    client.free()
    client.service.acting.engine.delay = 0.0
    assert client.post(asked())[0] == 200


# ---------------------------------------------------------------------------------------------------- clients that go


@pytest.mark.parametrize("where", ["decode", "tool", "queue"])
def test_a_client_gone_in_mid_stream_frees_all(client, where):
    client.free()
    gone = count(client, "clients_gone_total")
    client.service.acting.engine.delay = 0.02
    slow = code("import time\nprint('x')\ntime.sleep(30)")
    client.script.turns = {"decode": [code("print(1)"), LONG * 3], "tool": [slow], "queue": [LONG * 3]}[where]
    connection, answer = client.open_stream(asked("Which digit?", picture_url(), n=6 if where == "queue" else 2))
    if where == "tool":
        while client.held()[2] < 2 or client.service.acting.engine._done:
            time.sleep(0.02)
        time.sleep(0.2)  # the cells run
    else:
        for line in answer:
            if b"thinking" in line:
                break
    dialogues, rows, sessions, _ = client.held()
    assert dialogues == rows == (6 if where == "queue" else 2) and (sessions == 2 or where == "queue")
    start = time.monotonic()
    answer.close()
    connection.close()
    client.free()
    assert time.monotonic() - start < 10, "the cell of 30 seconds was cut off"
    assert count(client, "clients_gone_total") == gone + 1


def test_a_client_gone_before_a_whole_answer_frees_all(client):
    client.free()
    gone = count(client, "clients_gone_total")
    client.service.acting.engine.delay = 0.02
    client.script.turns = [LONG * 3]
    connection = client.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(asked()), {"content-type": "application/json"})
    while not client.held()[1]:
        time.sleep(0.02)
    connection.close()
    client.free()
    assert count(client, "clients_gone_total") == gone + 1


def test_many_at_once_leave_nothing(client):
    client.script.turns = [code("print({sibling})"), ANSWER]
    found = []

    def ask(number):
        found.append(client.post(asked(f"number {number}", n=1))[0])

    for _ in range(3):
        threads = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(found) == 18 and set(found) <= {200, 429} and found.count(200) >= 6
    client.free()


# ---------------------------------------------------------------------------------------------------- the other routes


def test_health_and_models(client):
    status, text = client.get("/health")
    assert status == 200 and json.loads(text)["status"] == "ok" and json.loads(text)["slots"] == 4
    (model,) = json.loads(client.get("/v1/models")[1])["data"]
    assert model["id"] == MODEL and model["max_model_len"] == 900


def test_counters_count(client):
    before = {name: count(client, f"{name}_total") for name in ("requests_ok", "tool_calls", "sampled_tokens")}
    client.script.turns = [code("print(1)"), code("1/0"), ANSWER]
    _, body = client.post(asked())
    assert count(client, "requests_ok_total") == before["requests_ok"] + 1
    assert count(client, "tool_calls_total") == before["tool_calls"] + 2
    assert count(client, "sampled_tokens_total") == before["sampled_tokens"] + body["usage"]["completion_tokens"]


def test_a_key_and_local_pictures(acting, tmp_path):
    Image.new("RGB", (60, 60)).save(tmp_path / "a b.png")
    (tmp_path / "out.png").symlink_to("/etc/passwd")
    with server(acting, acting.engine.script, Limits(local=tmp_path), key="sesam") as client:
        client.script.turns = [ANSWER]
        key = {"authorization": "Bearer sesam"}
        url = f"file://{tmp_path}/a%20b.png"
        assert client.post(asked("x", url))[0] == 401
        assert client.post(asked("x", url), {"authorization": "Bearer wrong"})[0] == 401
        assert client.get("/v1/models")[0] == client.get("/metrics")[0] == 401 and client.get("/health")[0] == 200
        assert client.post(asked("x", url), key)[0] == 200 and client.get("/v1/models", key)[0] == 200
        for bad in (
            "/etc/passwd",
            f"{tmp_path}/../x.png",
            f"{tmp_path}/out.png",
            f"{tmp_path}/none.png",
            str(tmp_path),
        ):
            status, body = client.post(asked("x", f"file://{bad}"), key)
            assert status == 400 and body["error"]["param"] == URL


def test_an_engine_that_breaks_says_so(acting):
    acting = scripted(acting.pool, Script())
    hook, threading.excepthook = threading.excepthook, lambda *_: None
    try:
        with server(acting, acting.engine.script) as client:
            client.script.turns = [code("print(1)"), LONG + ANSWER]
            assert client.post(asked())[0] == 200
            acting.engine.fault = RuntimeError("out of memory")
            status, body = client.post(asked())
            assert status == 503 and "by an error" in body["error"]["message"]
            assert client.post(asked())[0] == 503 and client.get("/health")[0] == 503
    finally:
        threading.excepthook = hook


def test_the_prompt_of_history_has_the_ids_of_its_trace(acting):
    """A later turn that a chat appends is the tail of what the whole conversation renders to."""
    host, image = acting.host, acting.config.image
    media = tuple(Media("image", data=base64.b64decode(picture_url(90 + k, 90).split(",")[1])) for k in range(3))
    first = Message("user", (Part("image", index=0), Part("text", "One?")))
    later = Message("user", (Part("image", index=0), Part("text", "and"), Part("image", index=1)))
    reindexed = Message("user", (Part("image", index=1), Part("text", "and"), Part("image", index=2)))
    said = Message("assistant", (Part("text", "Yes."),))
    whole = conversation(
        host.protocol, Record("r", (first, said, reindexed), media, Answer(""), "", ""), image, host.tokenizer
    )
    begun = conversation(host.protocol, Record("r", (first,), media[:1], Answer(""), "", ""), image, host.tokenizer)
    sampled = host.tokenizer.encode("Yes.")
    for closed in (True, False):
        more = follow_up(host.protocol, later, media[1:], host.tokenizer, closed=closed, shown=1)
        end = [host.tokenizer.im_end] if closed else []
        assert [*begun.ids, *sampled, *end, *more.ids] == whole.ids
        assert [i.hash for i in more.images] == [i.hash for i in whole.images[1:]]
    assert list(whole.session_images) == ["image_clue_0", "image_clue_1", "image_clue_2"]


def test_the_command_says_how_to_get_what_it_lacks(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "--weights", str(tmp_path)])
    assert result.exit_code == 2 and "pip install 'pyvision-jax[serve]'" in result.stderr
