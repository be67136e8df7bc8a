"""Records as JSON lines: one object a line, strictly read. docs/data.md describes the format."""

from __future__ import annotations

import base64
import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from pyvision_jax.data.media import MediaError, parse_image
from pyvision_jax.data.records import Answer, AnswerKind, Media, Message, Part, Record, Role

# JSON's own escapes: a backslash command written with one backslash too few, as in "\boxed" or "\frac".
_LOST_BACKSLASH = re.compile("[\b\f](?=[a-zA-Z])")


class RecordError(ValueError):
    """A line that is no record. `row` counts lines from 1; `key` is a path such as `messages[0].content[1].index`."""

    def __init__(self, file: str | Path, row: int, key: str, reason: str):
        super().__init__(f"{file}, line {row}, {key}: {reason}" if key else f"{file}, line {row}: {reason}")
        self.file, self.row, self.key, self.reason = str(file), row, key, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.row, self.key, self.reason)


@dataclasses.dataclass
class ReadReport:
    """What came of reading files: records read, and one error for each line that was left out."""

    read: int = 0
    bad: list[RecordError] = dataclasses.field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """The bad lines as plain data, for a report or a log."""
        return [{"file": e.file, "row": e.row, "key": e.key, "reason": e.reason} for e in self.bad]


def read_records(
    path: str | Path,
    media_root: str | Path | None = None,
    report: ReadReport | None = None,
) -> list[Record]:
    """Records of a JSONL file in file order; blank lines are passed over.

    Relative media paths start at `media_root`, by default the folder of the file. A bad line raises `RecordError`;
    with a `report` it is noted there instead and reading goes on. Raises `OSError` for a file that cannot be opened.
    """
    path = Path(path)
    reader = _Reader(path, Path(media_root) if media_root is not None else path.parent)
    records: list[Record] = []
    rows: dict[str, int] = {}
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = reader.record(line, row)
                if record.id in rows:
                    reader.fail("id", f"{record.id!r} is the id of line {rows[record.id]} too")
            except RecordError as error:
                if report is None:
                    raise
                report.bad.append(error)
                continue
            rows[record.id] = row
            records.append(record)
    if report is not None:
        report.read += len(records)
    return records


def write_records(path: str | Path, records: Iterable[Record], media_root: str | Path | None = None) -> int:
    """Writes records that `read_records` gives back equal; returns their number. The file appears whole or not at all.

    Media paths below `media_root` (by default the folder of the file) are written relative to it, others as they are.
    """
    path = Path(path)
    root = Path(media_root) if media_root is not None else path.parent
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with part.open("wb") as file:
            for record in records:
                file.write(_line(to_dict(record, root)))
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def parse_line(line: bytes, file: str | Path, row: int) -> Record:
    """One record from the JSON of its line; relative media paths stay as they are. Raises `RecordError`."""
    return _Reader(Path(file), Path()).record(line, row)


def to_dict(record: Record, media_root: str | Path | None = None) -> dict[str, Any]:
    """A record as the JSON object of its line; fields at their defaults are left out."""
    out: dict[str, Any] = {
        "id": record.id,
        "messages": [{"role": m.role, "content": [_part(part) for part in m.parts]} for m in record.messages],
        "media": [_media(media, media_root) for media in record.media],
        "answer": _without_defaults(record.answer),
        "protocol": record.protocol,
        "source": record.source,
    }
    return {**out, "meta": record.meta} if record.meta else out


def _line(value: dict[str, Any]) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but JSON can spell it
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def _part(part: Part) -> dict[str, Any]:
    if part.kind != "text":
        return {"type": part.kind, "index": part.index}
    out: dict[str, Any] = {"type": "text", "text": part.text}
    return out if part.weight == 1.0 else {**out, "weight": part.weight}


def _media(media: Media, root: str | Path | None) -> dict[str, Any]:
    if media.make is not None:
        return {"kind": media.kind, "make": list(media.make)}
    if media.data is not None:
        return {"kind": media.kind, "bytes": base64.b64encode(media.data).decode()}
    path = Path(media.path or "")
    if root is not None and path.is_relative_to(root):
        path = path.relative_to(root)
    return {"kind": media.kind, "path": path.as_posix()}


def _without_defaults(answer: Answer) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(Answer)}
    return {name: value for name, value in dataclasses.asdict(answer).items() if value != defaults[name]}


class _Reader:
    """Turns one line into a record; remembers where it is, for errors."""

    def __init__(self, path: Path, root: Path):
        self.path = path
        self.root = root
        self.row = 0

    def fail(self, key: str, reason: str) -> NoReturn:
        raise RecordError(self.path, self.row, key, reason)

    def record(self, line: bytes, row: int) -> Record:
        self.row = row
        try:
            value = json.loads(line.decode("utf-8-sig"), parse_constant=self._constant)
        except UnicodeDecodeError as error:
            self.fail("", f"not UTF-8 at byte {error.start}")
        except json.JSONDecodeError as error:
            self.fail("", f"not JSON at column {error.colno} ({error.msg})")
        except RecursionError:
            self.fail("", "JSON nested too deeply")
        except RecordError:
            raise
        except ValueError as error:  # Python refuses to read whole numbers of thousands of digits
            self.fail("", f"not JSON that can be read ({error})")
        self.mapping(value, "", ("id", "messages", "media", "answer", "protocol", "source", "meta"))
        media = self.array(value.get("media", []), "media")
        found = tuple(self.media(item, f"media[{index}]") for index, item in enumerate(media))
        return Record(
            id=self.text(value.get("id", f"{self.path.stem}:{row}"), "id"),
            messages=self.messages(value.get("messages"), len(found)),
            media=found,
            answer=self.answer(value.get("answer", {}), "answer"),
            protocol=self.text(value.get("protocol", ""), "protocol"),
            source=self.text(value.get("source", self.path.stem), "source"),
            meta=self.mapping(value.get("meta", {}), "meta"),
        )

    def messages(self, value: Any, media: int) -> tuple[Message, ...]:
        if not self.array(value, "messages"):
            self.fail("messages", "empty: a record needs at least one message")
        shown = [0]  # parts without an index take the media in order
        out = tuple(self.message(item, f"messages[{index}]", media, shown) for index, item in enumerate(value))
        if out[-1].role not in ("user", "assistant"):
            key = f"messages[{len(out) - 1}].role"
            self.fail(key, f"{out[-1].role}: a task ends with a user message, a trace with an assistant message")
        return out

    def message(self, value: Any, key: str, media: int, shown: list[int]) -> Message:
        self.mapping(value, key, ("role", "content"), required=("role", "content"))
        role = self.one_of(value["role"], f"{key}.role", get_args(Role))
        content = value["content"]
        if isinstance(content, str):
            return Message(role, (Part("text", self.text(content, f"{key}.content")),))
        parts = self.array(content, f"{key}.content")
        return Message(role, tuple(self.part(p, f"{key}.content[{i}]", media, shown) for i, p in enumerate(parts)))

    def part(self, value: Any, key: str, media: int, shown: list[int]) -> Part:
        self.mapping(value, key, ("type", "text", "index", "weight"), required=("type",))
        kind = self.one_of(value["type"], f"{key}.type", ("text", "image", "video"))
        if kind == "text":
            self.mapping(value, key, ("type", "text", "weight"), required=("text",))
            weight = self.number(value.get("weight", 1.0), f"{key}.weight")
            return Part("text", self.text(value["text"], f"{key}.text"), weight=weight)
        self.mapping(value, key, ("type", "index"))
        index = value.get("index", shown[0])
        if isinstance(index, bool) or not isinstance(index, int):
            self.fail(f"{key}.index", f"expected a whole number, found {_kind(index)}")
        if not 0 <= index < media:
            self.fail(f"{key}.index", f"{index}, but the record has {media} media")
        shown[0] = index + 1
        return Part(kind, index=index)

    def media(self, value: Any, key: str) -> Media:
        if isinstance(value, str):
            value = {"path": value}
        self.mapping(value, key, ("kind", "path", "bytes", "make"))
        kind = self.one_of(value.get("kind", "image"), f"{key}.kind", ("image", "video"))
        given = [name for name in ("path", "bytes", "make") if value.get(name) is not None]
        # {"bytes": ..., "path": ...} is how published data sets write a picture: the path is then its name only.
        if len(given) != 1 and given != ["path", "bytes"]:
            self.fail(key, f"needs exactly one of path, bytes and make, found {', '.join(given) or 'none'}")
        if "make" in given:
            make = self.array(value["make"], f"{key}.make")
            if len(make) != 2:
                self.fail(f"{key}.make", f"expected [name, arguments], found {len(make)} items")
            arguments = self.mapping(make[1], f"{key}.make[1]")
            return Media(kind, make=(self.text(make[0], f"{key}.make[0]"), arguments))
        name = given[-1]
        try:
            found = parse_image({name: self.text(value[name], f"{key}.{name}")}, self.root)
        except MediaError as error:
            self.fail(f"{key}.{name}", error.reason)
        return dataclasses.replace(found, kind=kind)

    def answer(self, value: Any, key: str) -> Answer:
        if isinstance(value, str):
            value = {"value": value}
        self.mapping(value, key, tuple(f.name for f in dataclasses.fields(Answer)))
        choices = self.array(value.get("choices", []), f"{key}.choices")
        return Answer(
            value=self.text(value.get("value", ""), f"{key}.value"),
            kind=self.one_of(value.get("kind", "text"), f"{key}.kind", get_args(AnswerKind)),
            choices=tuple(self.text(item, f"{key}.choices[{index}]") for index, item in enumerate(choices)),
            tolerance=self.number(value.get("tolerance", 0.0), f"{key}.tolerance"),
        )

    def mapping(
        self, value: Any, key: str, known: tuple[str, ...] | None = None, required: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(key, f"expected an object, found {_kind(value)}")
        for name in value if known is not None else ():
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
                self.fail(f"{key}.{name}" if key else name, f"unknown key{hint}")
        for name in required:
            if name not in value:
                self.fail(key, f"{name!r} is missing")
        return dict(value)

    def array(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(key, f"expected a list, found {_kind(value)}")
        return value

    def text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            self.fail(key, f"expected text, found {_kind(value)}")
        lost = _LOST_BACKSLASH.search(value)
        if lost is not None:
            escape = {"\b": "\\b", "\f": "\\f"}[lost.group()]
            near = value[lost.start() + 1 : lost.start() + 9]
            self.fail(key, f"control character {escape!r} before {near!r}: a backslash was lost, JSON needs two")
        return value

    def number(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            shown = repr(value)  # a float's infinity, or a whole number of hundreds of digits
            self.fail(key, f"expected a number that is not negative, found {shown[:40]}")
        return float(value)

    def one_of(self, value: Any, key: str, allowed: tuple[Any, ...]) -> Any:
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self.fail(key, f"{value!r} is none of {', '.join(allowed)}{hint}")
        return value

    def _constant(self, name: str) -> NoReturn:
        self.fail("", f"{name} is not JSON")


def _kind(value: Any) -> str:
    """How JSON calls a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
