"""What `/v1/chat/completions` answers with: OpenAI's objects, and the tool's steps in `choices[].message.steps`."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.recipes.plain import plain
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.serving.events import Dialogue, Ended, Event, Ran, Text, Told

# OpenAI knows two ends: the policy came to one, or a limit did. `end_reason` beside it says which.
_LENGTH = (EndReason.OVER_LENGTH, EndReason.OVER_TURNS, EndReason.OVER_IMAGES)
BETWEEN = "\n"  # what stands in `content` between two turns of the policy


@dataclasses.dataclass
class Choice:
    """What one dialogue has come to, event by event."""

    index: int
    content: str = ""
    turn: int = 0  # of the last text
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: Ended | None = None

    def take(self, event: Event) -> dict[str, Any] | None:
        """Books an event. The `delta` that tells it to a client that streams; None for the end."""
        if isinstance(event, Text):
            text = event.text
            if event.turn != self.turn:
                self.turn, text = event.turn, BETWEEN + text
            self.content += text
            return {"content": text}
        if isinstance(event, Ended):
            self.ended = event
            return None
        step = _ran(event) if isinstance(event, Ran) else _told(event)
        self.steps.append(step)
        return {"step": step}

    @property
    def finish_reason(self) -> str:
        return "length" if self.ended is not None and self.ended.reason in _LENGTH else "stop"

    def end(self) -> dict[str, Any]:
        """Fields of a choice that its end decides."""
        ended = self.ended
        assert ended is not None
        return {"finish_reason": self.finish_reason, "end_reason": ended.reason}

    def whole(self, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        ended = self.ended
        assert ended is not None
        message = {"role": "assistant", "content": self.content, "answer": ended.answer, "steps": self.steps}
        return {"index": self.index, "message": message, "logprobs": logprobs, **self.end()}


def _ran(event: Ran) -> dict[str, Any]:
    result = event.call.result
    return {
        "type": "tool",
        "turn": event.turn,
        "code": event.call.code,
        "status": result["status"],
        "text": event.text,
        "seconds": round(event.call.seconds, 4),
        "images": [{"name": name, "url": data_url(pixels)} for name, pixels in event.images.items()],
    }


def _told(event: Told) -> dict[str, Any]:
    return {"type": "notice", "turn": event.turn, "text": event.text}


def data_url(pixels: np.ndarray) -> str:
    """uint8 [h, w, 3] as a PNG in a data URL."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def usage(prompt: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Ids: `completion_tokens` are the policy's own; what the tool told it is counted beside them."""
    ends = [choice.ended for choice in choices if choice.ended is not None]
    sampled, observed = sum(end.sampled for end in ends), sum(end.observed for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled + observed,
        "observation_tokens": observed,
    }


def logprobs_of(one: Dialogue, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the policy at temperature 1, for every id that it sampled, turn after turn, end tokens included."""
    content = []
    for ids, values in one.tokens:
        for token, value in zip(ids.tolist(), values.tolist(), strict=True):
            data = tokenizer.bytes_of(token)
            text = data.decode("utf-8", "replace")
            content.append({"token": text, "logprob": value, "bytes": list(data), "top_logprobs": []})
    return {"content": content}


def completion(name: str, model: str, choices: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, "usage": used}


def chunk(name: str, model: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
    """One event of a stream."""
    head = {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    return event({**head, "choices": choices, **more})


def delta(index: int, content: dict[str, Any], **end: Any) -> dict[str, Any]:
    return {"index": index, "delta": content, "logprobs": None, "finish_reason": None, **end}


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    # ASCII: a lone surrogate from a tool's output is no UTF-8, but escapes well.
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
