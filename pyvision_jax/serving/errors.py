"""What a server takes, and how it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn


class ApiError(Exception):
    """A request that is refused: status of HTTP, and the error object of the answer."""

    def __init__(self, status: int, param: str | None, message: str, code: str = "invalid_value"):
        super().__init__(message)
        self.status, self.param, self.message, self.code = status, param, message, code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes. `local`: folder below which `file:` pictures are read; None refuses them."""

    body_bytes: int = 64 << 20
    picture_pixels: int = 50_000_000  # of one picture as it is sent
    pictures: int = 32  # of one request
    choices: int = 16  # n
    queue: int = 64  # dialogues that wait beyond the engine's slots
    local: Path | None = None


def refuse(param: str, why: str) -> NoReturn:
    raise ApiError(400, param, f"{param}: {why}")


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
