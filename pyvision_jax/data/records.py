"""The one canonical record that every data source is read into."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
AnswerKind = Literal["text", "choice", "number"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One piece of a message: text, or a reference to `Record.media[index]`.

    `weight` scales the SFT loss of the piece's tokens (1 for ordinary text); it is ignored outside assistant messages.
    """

    kind: Literal["text", "image", "video"]
    text: str = ""
    index: int = -1
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Media:
    """A lazy handle of a picture or a video: exactly one of `path`, `data` (encoded bytes) and `make` is set.

    `make` names a generator of `pyvision_jax.worlds` with its arguments, for pictures that are drawn and not stored.
    """

    kind: Literal["image", "video"]
    path: str | None = None
    data: bytes | None = None
    make: tuple[str, dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The reference answer. `tolerance` is relative and only read for kind `number`."""

    value: str
    kind: AnswerKind = "text"
    choices: tuple[str, ...] = ()
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Record:
    """A task (messages end with a user turn) or a trace (messages go on with assistant and tool turns)."""

    id: str
    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    answer: Answer
    protocol: str
    source: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
