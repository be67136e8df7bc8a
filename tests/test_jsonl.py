"""Records to lines and back; every wrong line names file, line and key, and can be passed over."""

import base64
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pyvision_jax.data.jsonl import ReadReport, RecordError, read_records, to_dict, write_records
from pyvision_jax.data.media import open_image
from pyvision_jax.data.records import Answer, Media, Message, Part, Record

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return buffer.getvalue()


def sample(folder) -> Record:
    return Record(
        id="a-1",
        messages=(
            Message("system", (Part("text", "Be exact."),)),
            Message("user", (Part("image", index=1), Part("text", "Größe? \u2028 \ud800"), Part("image", index=0))),
            Message("assistant", (Part("text", "7", weight=3.0), Part("text", "!", weight=0.0))),
            Message("tool", (Part("video", index=2),)),
            Message("assistant", (Part("text", "\\boxed{7}"),)),
        ),
        media=(
            Media("image", path=str(folder / "pictures" / "a.png")),
            Media("image", data=png()),
            Media("video", path="/elsewhere/clip.mp4"),
            Media("image", make=("needle", {"seed": 3, "size": [4, 5]})),
        ),
        answer=Answer("7", "number", ("6", "7"), 0.01),
        protocol="pyvision_image",
        source="test",
        meta={"level": 2, "tags": ["x", None]},
    )


def lines(path, *values) -> None:
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values), encoding="utf-8")


def test_records_come_back_equal(tmp_path):
    plain = Record("b", (Message("user", (Part("text", "?"),)),), (), Answer("x"), "", "test")
    records = [sample(tmp_path), plain]
    assert write_records(tmp_path / "r.jsonl", iter(records)) == 2
    assert read_records(tmp_path / "r.jsonl") == records
    assert [file.name for file in tmp_path.iterdir()] == ["r.jsonl"]
    assert to_dict(records[0], tmp_path)["media"][0] == {"kind": "image", "path": "pictures/a.png"}
    assert "weight" not in json.dumps(to_dict(plain))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.jsonl"
    write_records(path, [sample(tmp_path)])
    bad = Record("c", (Message("user", ()),), (), Answer(""), "", "", {"x": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_records(path, [bad])
    assert read_records(path)[0].id == "a-1"
    assert len(list(tmp_path.iterdir())) == 1


def test_short_spellings(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    text = base64.b64encode(png()).decode()
    uri = f"data:image/png;base64,{text}"
    media = ["a.png", {"path": "a.png"}, uri, {"bytes": text, "path": "name.png"}, {"path": None, "bytes": text}]
    content = [{"type": "image"}] * 5 + [{"type": "text", "text": "?"}]
    lines(tmp_path / "r.jsonl", {"messages": [{"role": "user", "content": content}], "media": media, "answer": "7"})
    (record,) = read_records(tmp_path / "r.jsonl")
    assert (record.id, record.source, record.answer) == ("r:1", "r", Answer("7"))
    assert [part.index for part in record.messages[0].parts[:5]] == [0, 1, 2, 3, 4]
    for item in record.media:
        np.testing.assert_array_equal(np.asarray(open_image(item)), PIXELS)
    (moved,) = read_records(tmp_path / "r.jsonl", media_root="/data")
    assert moved.media[0].path == "/data/a.png"


ASK = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "line, key, reason",
    [
        ({"messages": [ASK], "anwser": "7"}, "anwser", "unknown key; did you mean 'answer'?"),
        ({"messages": [ASK], "zzz": 1}, "zzz", "known here: id, messages"),
        ({"messages": [{**ASK, "contents": 1}]}, r"messages\[0\].contents", "did you mean 'content'"),
        ({}, "messages", "expected a list, found null"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]", "'content' is missing"),
        ({"messages": [{"role": "users", "content": ""}]}, r"messages\[0\].role", "did you mean 'user'"),
        ({"messages": [ASK, {"role": "tool", "content": "x"}]}, r"messages\[1\].role", "a task ends with a user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"content\[0\].index",
            "0, but .* has 0 media",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "index": 1}]}], "media": ["a.png"]},
            r"messages\[0\].content\[0\].index",
            "1, but the record has 1 media",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}, r"\[0\].text", "unknown key"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\]", "'text' is missing"),
        ({"messages": [ASK], "media": {"bytes": "x"}}, "media", "expected a list, found an object"),
        (
            {"messages": [ASK], "media": [{"kind": "image"}]},
            r"media\[0\]",
            "exactly one of path, bytes and make, found none",
        ),
        ({"messages": [ASK], "media": [{"bytes": "*"}]}, r"media\[0\].bytes", "base64|padding|alphabet"),
        ({"messages": [ASK], "media": ["https://x.org/a.png"]}, r"media\[0\].path", "not fetched"),
        ({"messages": [ASK], "media": [{"make": ["x"]}]}, r"media\[0\].make", r"expected \[name, arguments\]"),
        ({"messages": [ASK], "answer": {"value": 7}}, "answer.value", "expected text, found a number"),
        ({"messages": [ASK], "answer": {"value": "\boxed{7}"}}, "answer.value", "backslash was lost"),
        ({"messages": [ASK], "answer": {"kind": "numbr"}}, "answer.kind", "did you mean 'number'"),
        ({"messages": [ASK], "answer": {"tolerance": -1}}, "answer.tolerance", "not negative"),
        ({"messages": [ASK], "id": 3}, "id", "expected text, found a number"),
        ([1], "", "expected an object, found a list"),
        ('{"messages": ', "", r"not JSON at column \d+"),
        ('{"messages": [], "meta": {"x": NaN}}', "", "line 2: NaN is not JSON$"),
        ('{"messages": [], "meta": {"x": 1' + 5000 * "0" + "}}", "", "not JSON that can be read"),
        ({"messages": [ASK], "answer": {"tolerance": 10**400}}, "answer.tolerance", "not negative, found 1000"),
        ("[" * 100_000, "", "nested too deeply|not JSON"),
    ],
)
def test_bad_lines_name_file_line_and_key(tmp_path, line, key, reason):
    path = tmp_path / "bad.jsonl"
    lines(path, {"messages": [ASK]}, line)
    with pytest.raises(RecordError, match=reason) as caught:
        read_records(path)
    assert f"{path}, line 2" in str(caught.value)
    if key:
        assert caught.value.key.endswith(key.replace("\\", ""))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_bad_lines_are_collected_and_the_rest_is_read(tmp_path):
    path = tmp_path / "mixed.jsonl"
    good = {"id": "g", "messages": [ASK]}
    lines(path, good, "{", "", {**good, "id": "h"}, good, {"messages": [ASK], "answr": ""})
    with path.open("ab") as file:
        file.write(b'{"id": "\xff"}\n')
    report = ReadReport()
    assert [record.id for record in read_records(path, report=report)] == ["g", "h"]
    assert report.read == 2
    assert [(row["row"], row["key"]) for row in report.rows()] == [(2, ""), (5, "id"), (6, "answr"), (7, "")]
    assert "'g' is the id of line 1 too" in report.rows()[1]["reason"]
    assert "not UTF-8 at byte 8" in report.rows()[3]["reason"]


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_records(tmp_path / "none.jsonl")


def test_the_examples_of_the_documentation_are_records(tmp_path):
    text = (Path(__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8")
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    lines(tmp_path / "docs.jsonl", *examples)
    task, trace = read_records(tmp_path / "docs.jsonl")
    assert task.answer == Answer("4.50", "number", (), 0.01)
    assert [part.weight for part in trace.messages[-1].parts] == [1.0, 3.0, 1.0]
