"""What a tool protocol says: how a prompt is built, how a turn is read, how an execution looks to the policy."""

from __future__ import annotations

import dataclasses
from typing import Protocol as Interface

from PIL import Image

from pyvision_jax.data.image_processing import ProcessedImage
from pyvision_jax.data.packing import Example
from pyvision_jax.data.records import Record
from pyvision_jax.rollout.tags import Tag
from pyvision_sandbox import Result


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Ids of the first turn, its pictures as the model sees them, and full-size pictures for the session by name.

    The last `prefix` ids open the assistant's turn for it (a forced answer): in the context, never learned.
    """

    ids: list[int]
    images: list[ProcessedImage]
    session_images: dict[str, Image.Image]
    prefix: int = 0


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Final:
    """An answer. `well_formed` says whether the protocol's strict form was met."""

    value: str
    well_formed: bool


@dataclasses.dataclass(frozen=True)
class Malformed:
    """Neither code nor an answer; `hint` is what an error turn tells the policy."""

    hint: str


Action = Code | Final | Malformed


@dataclasses.dataclass(frozen=True)
class Observation:
    """Ids to append: the end of the policy's turn where it is still open, the result, and the head of its next turn."""

    ids: list[int]
    images: list[ProcessedImage]


class AgentProtocol(Interface):
    """One file per published protocol implements this; values where possible, code where not."""

    @property
    def tags(self) -> tuple[Tag, ...]: ...

    def build(self, record: Record) -> Prompt:
        """Raises `MediaError` or `ValueError` for a record that cannot be used."""
        ...

    def parse(self, text: str) -> Action:
        """Reads one policy turn, without its end token."""
        ...

    def observe(self, result: Result, closed: bool, shown: int) -> Observation:
        """`closed`: the turn ended with its end token. `shown`: pictures in context so far, the input ones included."""
        ...

    def notice(self, text: str, closed: bool) -> Observation:
        """An observation that no execution stands behind: a hint, or a refusal."""
        ...

    def example(self, record: Record) -> Example:
        """A trace as a training example: loss on what the assistant wrote, nowhere else."""
        ...
