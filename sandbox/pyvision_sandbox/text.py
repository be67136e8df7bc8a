"""The text of a `Result` as a policy reads it: pure functions. Picture placeholders and tags are the protocol's."""

import hashlib
import re

from .result import Result

# CSI and OSC sequences, then any other two-character escape.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[^\n])?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")
_STDERR_SHARE = 4  # stderr gets at most this part of the room: it holds warnings and progress bars
_ERROR_SHARE = 2


def clean(text: str) -> str:
    """Valid UTF-8 that shows what a terminal would: no escapes or control characters, of a progress bar its last state.

    Addresses of objects (` at 0x7f..`) go as well: they differ from run to run.
    """
    if text.isprintable() and " at 0x" not in text:
        return text
    text = _ESCAPES.sub("", _SURROGATES.sub("\ufffd", text)).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(next((p for p in reversed(line.split("\r")) if p), "") for line in text.split("\n"))
    return _ADDRESS.sub("", _CONTROL.sub("", text))


def shorten(text: str, limit: int, tail: float = 0.5) -> str:
    """At most `limit` characters: head and tail with the number of characters cut between them."""
    if len(text) <= limit:
        return text
    note = f"\n... [{len(text)} characters cut] ...\n"
    if limit <= len(note):
        return text[len(text) - limit :] if limit > 0 else ""
    room = limit - len(note)
    last = int(room * tail)
    note = f"\n... [{len(text) - room} characters cut] ...\n"
    return text[: room - last] + note + text[len(text) - last :]


def _notes(result: Result) -> list[str]:
    notes = []
    if result.restarted:
        notes.append("[the session had ended and was started again: earlier variables are gone]")
    if result.status == "soft_timeout":
        notes.append("[stopped by the time limit; variables are kept]")
    elif result.status == "memory" and result.session_alive:
        notes.append("[the memory limit was reached; variables are kept]")
    elif result.status == "cancelled":
        notes.append("[cancelled]")
    dropped = result.dropped.get("images", 0)
    if dropped:
        reasons = "; ".join(dict.fromkeys(result.dropped.get("reasons", ())))
        notes.append(f"[{dropped} picture{'s' if dropped > 1 else ''} not shown: {reasons}]")
    return notes


def _error(result: Result) -> str:
    """The traceback's end. A session that died has no traceback; its error says what happened."""
    if result.error is None:
        return ""
    if result.status == "soft_timeout":
        line = result.error["line"]
        return f"TimeoutError: the time limit of this call has passed{f' at line {line}' if line else ''}"
    return clean(result.error["traceback"]).strip("\n")


def observation_text(result: Result, max_text: int = 8_000) -> str:
    """stdout, the value of the last expression, stderr, the error's last lines, notes: at most `max_text` characters.

    Valid UTF-8 without control characters. Empty if the code printed nothing and nothing went wrong. When room is short
    the end of the error (its message and line) and the notes are kept first, then head and tail of the output.
    """
    notes = shorten("\n".join(_notes(result)), max_text // 2)
    room = max_text - len(notes) - 4  # the line ends between the parts
    error = shorten(_error(result), max(room // _ERROR_SHARE, 0), tail=0.9)
    room -= len(error)
    stderr = shorten(clean(result.stderr).strip("\n"), max(min(max_text // _STDERR_SHARE, room // 2), 0))
    room -= len(stderr)
    output = "\n".join(p for p in (clean(result.stdout).rstrip("\n"), clean(result.repr or "").rstrip("\n")) if p)
    parts = (shorten(output, max(room, 0)), stderr, error, notes)
    return "\n".join(p for p in parts if p)[: max(max_text, 0)]


def outcome(result: Result) -> bytes:
    """A digest of what a cell came to, without stderr and pixels: two runs of the same code agree in it."""
    error = None if result.error is None else result.error["name"]
    shapes = [image.shape for image in result.images]
    told = (result.status, error, clean(result.stdout), clean(result.repr or ""), shapes)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
