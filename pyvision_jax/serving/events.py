"""What a dialogue tells its listener, and what its request asked of it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from pyvision_jax.agents.loop import Live
from pyvision_jax.config import SamplingConfig
from pyvision_jax.rollout.requests import View
from pyvision_jax.rollout.trajectory import ToolCall
from pyvision_jax.serving.speech import Speech

# Ends beyond `EndReason`: a turn that the policy closed itself without code or an answer in the protocol's form is a
# reply to whoever talks to it (training feeds an error back); a stop string of the request; the listener's wish.
REPLIED, STOPPED, CANCELLED = "replied", "stop", "cancelled"


@dataclasses.dataclass(frozen=True)
class Text:
    """More of what the policy says in `turn` (from 0)."""

    turn: int
    text: str


@dataclasses.dataclass(frozen=True)
class Ran:
    """A tool call has been run. `text` is what the policy reads of it, `images` its pictures at full size by name."""

    turn: int
    call: ToolCall
    text: str
    images: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Told:
    """What the policy is told in place of a result: a hint, or a refusal."""

    turn: int
    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The last event of a dialogue. `reason`: an `EndReason`, or one of this module."""

    reason: str
    answer: str | None
    sampled: int  # ids of the policy
    observed: int  # ids of results and hints
    detail: str = ""


Event = Text | Ran | Told | Ended
Listen = Callable[["Dialogue", Event], None]


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a request asks of its dialogues beside the prompt.

    `budget`: ids that the policy may sample in all turns together. `stream`: text comes as it is decoded, not turn by
    turn. `keep`: the session and the context (`Dialogue.context`) stay when it ends, for a turn to follow.
    """

    sampling: SamplingConfig | None = None
    budget: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    keep: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class Dialogue(Live):
    """A trajectory with its listener."""

    listen: Listen
    wish: Wish
    speech: Speech
    texts: list[str] = dataclasses.field(default_factory=list)  # of finished turns
    sampled: int = 0  # ids in finished turns
    tokens: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)  # ids, log-probs, by turn
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    calling: bool = False
    ended: bool = False
    context: View | None = None

    @property
    def index(self) -> int:
        """Of the sibling in its request."""
        return self.place[1]

    @property
    def begin(self) -> int:
        """Where the turn that is being sampled begins in the ids."""
        return self.spans[-1].end

    @property
    def left(self) -> int:
        """Ids of the budget that this turn may take; a large number without one."""
        return (1 << 62) if self.wish.budget is None else self.wish.budget - self.sampled

    @property
    def watched(self) -> bool:
        """Whether to look at it between chunks: ids that end inside a chunk have no log-probs outside a segment."""
        return not self.wish.logprobs and (self.wish.stream or bool(self.wish.stops) or self.wish.budget is not None)
