"""What a rollout is: one growing id array, spans over it, and everything that was recorded while it grew."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal

import numpy as np

SpanKind = Literal["prompt", "prefix", "policy", "observation"]


class EndReason(enum.StrEnum):
    """Why a trajectory ended. `INFRASTRUCTURE` never enters group statistics."""

    ANSWERED = "answered"
    OVER_LENGTH = "over_length"
    OVER_TURNS = "over_turns"
    OVER_IMAGES = "over_images"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    REPETITION = "repetition"
    MALFORMED = "malformed"
    INFRASTRUCTURE = "infrastructure"


@dataclasses.dataclass(frozen=True)
class Span:
    """Half-open range `[start, end)` over `Trajectory.ids`; `learn` decides whether its tokens enter the loss."""

    kind: SpanKind
    start: int
    end: int
    turn: int
    learn: bool


@dataclasses.dataclass
class ToolCall:
    """One execution: the code, the sandbox's `Result` as plain data (`to_dict()`), wall seconds, and image hashes."""

    code: str
    result: dict[str, Any]
    seconds: float
    images: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.result.get("status") == "ok"


@dataclasses.dataclass
class Trajectory:
    """One rollout. Arrays run over all T ids; entries outside policy spans are 0 (states: the automaton's state there).

    `logprobs` are of the distribution sampled from (temperature, filters, penalty, forbidden ids); `policy_logprobs` of
    the same logits at temperature 1 without filters and penalty (forbidden ids masked all the same), and so are the
    entropies (nats; `top_entropies` are the parts that the most likely ids hold).
    """

    id: str
    record_id: str
    ids: np.ndarray  # int32 [T]
    spans: list[Span]
    logprobs: np.ndarray  # float32 [T]
    policy_logprobs: np.ndarray  # float32 [T]
    states: np.ndarray  # int32 [T]: automaton state before the token was sampled
    temperatures: np.ndarray  # float32 [T]: temperature the token was sampled at
    versions: np.ndarray  # int32 [T]: weight version that sampled the token
    positions: np.ndarray  # int32 [3, T]
    images: list[str] = dataclasses.field(default_factory=list)  # data.media.image_hash, in order of appearance
    image_grids: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # (t, h, w) patches
    videos: list[str] = dataclasses.field(default_factory=list)
    entropies: np.ndarray | None = None
    top_entropies: np.ndarray | None = None
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    end_reason: EndReason | None = None
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    answer: str | None = None
    group: str = ""
    parent: tuple[str, int] | None = None
    seed: int = 0

    @property
    def policy_mask(self) -> np.ndarray:
        """bool [T]: True on ids that the policy sampled and that are learned."""
        mask = np.zeros(len(self.ids), bool)
        for span in self.spans:
            if span.learn:
                mask[span.start : span.end] = True
        return mask

    @property
    def reward(self) -> float:
        return self.rewards.get("total", 0.0)

    @property
    def tool_calls(self) -> int:
        """Successful calls."""
        return sum(call.ok for call in self.calls)
