"""The body of `/v1/chat/completions`, strictly read: a refusal names its field, and the number that would fit."""

from __future__ import annotations

import dataclasses
import difflib
import secrets
from collections.abc import Mapping
from typing import Any

from pyvision_jax.data.records import Record
from pyvision_jax.serving.errors import ApiError, Limits, kind_of, refuse
from pyvision_jax.serving.messages import read_record


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    record: Record
    n: int
    seed: int
    max_tokens: int | None
    temperature: float | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool


FIELDS = (
    *("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "n", "stop"),
    *("stream", "stream_options", "logprobs", "user"),
)
# Fields of OpenAI's that mean nothing here; clients send them at their defaults, and that is all that is taken.
NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "top_p": (1, "is fixed when the server starts: sampling.top_p"),
    "presence_penalty": (0, "is not offered"),
    "frequency_penalty": (0, "is not offered; sampling.repetition_penalty is fixed when the server starts"),
    "top_logprobs": (0, "only the log-prob of the sampled token is recorded"),
    "logit_bias": ({}, "is not offered"),
    "response_format": ({"type": "text"}, "only text is given back"),
    "tools": ([], "the tool is the server's own sandbox; its steps are in choices[].message.steps"),
    "tool_choice": ("auto", "the tool is the server's own sandbox"),
    "store": (False, "nothing is stored"),
}


def parse(body: Any, model: str, protocol: str, limits: Limits) -> ChatRequest:
    """A request from the JSON of its body. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, None, f"the body must be a JSON object, not {kind_of(body)}", "invalid_body")
    for name, value in body.items():
        if name in NEUTRAL:
            if value is not None and value != NEUTRAL[name][0]:
                raise ApiError(400, name, f"{name}: {NEUTRAL[name][1]}", "unsupported_value")
        elif name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(FIELDS)}"
            raise ApiError(400, name, f"unknown field {name!r}{hint}", "unknown_field")
    if "model" not in body:
        refuse("model", f"is missing; this server has {model!r}")
    if body["model"] != model:
        message = f"model: {body['model']!r} is not here; this server has {model!r}"
        raise ApiError(404, "model", message, "model_not_found")
    stream = _flag(body, "stream")
    logprobs = _flag(body, "logprobs")
    if stream and logprobs:
        raise ApiError(400, "logprobs", "logprobs: not offered together with stream", "unsupported_value")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        refuse("stream_options", "takes include_usage only")
    if options and not stream:
        refuse("stream_options", "only allowed with stream=true")
    seed = _whole(body, "seed", 0, 2**63 - 1)
    return ChatRequest(
        record=read_record(body, protocol, limits),
        n=_whole(body, "n", 1, limits.choices) or 1,
        seed=secrets.randbits(62) if seed is None else seed,
        max_tokens=_max_tokens(body),
        temperature=_temperature(body),
        stops=_stops(body),
        stream=stream,
        include_usage=_flag(options, "include_usage", "stream_options.include_usage"),
        logprobs=logprobs,
    )


def _flag(body: dict[str, Any], name: str, param: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(param or name, f"must be true or false, not {value!r:.40}")
    return bool(value)


def _whole(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, f"must be a whole number, not {value!r:.40}")
    if not least <= value <= most:
        refuse(name, f"{value} is not in {least} to {most}")
    return value


def _max_tokens(body: dict[str, Any]) -> int | None:
    old, new = _whole(body, "max_tokens", 1, 1 << 31), _whole(body, "max_completion_tokens", 1, 1 << 31)
    if old is not None and new is not None and old != new:
        refuse("max_completion_tokens", f"{new} differs from max_tokens {old}; give one of them")
    return old if new is None else new


def _temperature(body: dict[str, Any]) -> float | None:
    value = body.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        refuse("temperature", f"must be a number from 0 to 2, not {value!r:.40}")
    return float(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        refuse("stop", "must be a text, or a list of at most 4 texts, none of them empty")
    return tuple(stops)
