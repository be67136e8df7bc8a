"""What one cell gave back."""

import dataclasses
from typing import Any

import numpy as np

STATUSES = ("ok", "error", "soft_timeout", "hard_timeout", "memory", "crashed", "protocol_error", "cancelled")


@dataclasses.dataclass
class Usage:
    wall_s: float = 0.0  # from the request to the answer, without the wait for a lane
    queue_s: float = 0.0  # the wait for a lane
    cpu_s: float = 0.0  # of the session's process, as it says itself
    peak_rss: int = 0  # bytes, over the session's life, as it says itself


@dataclasses.dataclass
class Result:
    """One execution.

    status: `ok`; `error` (an exception, `sys.exit` included); `soft_timeout` (interrupted, state kept); `memory` (a
    MemoryError reached the top, state kept; or killed because its files outgrew their limit); `hard_timeout` (killed),
    `crashed` (the process ended by itself), `protocol_error` (it spoke out of turn and was killed); `cancelled` (by the
    caller while it ran). `session_alive` says whether the variables are kept.
    """

    status: str
    stdout: str = ""  # valid UTF-8; where it was cut a line says how much
    stderr: str = ""
    repr: str | None = None  # of the last bare expression, unless that was a picture
    error: dict[str, Any] | None = None  # {name, message, traceback, line}; line: of the model's code, or None
    images: list[np.ndarray] = dataclasses.field(default_factory=list)  # uint8 [h, w, 3] each, in the order shown
    dropped: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # {stdout, stderr, repr: bytes; images: count; reasons}
    usage: Usage = dataclasses.field(default_factory=Usage)
    bound: list[str] = dataclasses.field(default_factory=list)  # names under which returned pictures are variables now
    session_alive: bool = True
    restarted: bool = False  # this cell ran in a fresh session because the one before it had died
    level: str = "none"  # isolation under which it ran
    mends: list[Any] = dataclasses.field(default_factory=list)  # faults that were mended before; filled in by callers

    @classmethod
    def told(cls, header: dict[str, Any], images: list[np.ndarray], wall_s: float) -> "Result":
        """What a checked answer says, before the pool's own view of it."""
        dropped: dict[str, Any] = {key: n for key, n in header["dropped"].items() if key != "reasons" and n}
        if header["dropped"]["reasons"]:
            dropped["reasons"] = [_text(reason) for reason in header["dropped"]["reasons"]]
        error = header["error"]
        if error is not None:
            error = {key: _text(v) if isinstance(v, bytes) else v for key, v in error.items()}
        return cls(
            status=header["status"],
            stdout=_text(header["stdout"]),
            stderr=_text(header["stderr"]),
            repr=None if header["repr"] is None else _text(header["repr"]),
            error=error,
            images=images,
            dropped=dropped,
            usage=Usage(wall_s=wall_s, cpu_s=header["cpu"], peak_rss=header["rss"]),
            bound=header["bound"],
        )

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a trajectory's record: everything but the pixels; `images` holds (height, width) pairs."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("images", "usage")}
        data["images"] = [list(image.shape[:2]) for image in self.images]
        data["usage"] = dataclasses.asdict(self.usage)
        return data


def error_of(name: str, message: str) -> dict[str, Any]:
    """An error that the pool itself tells."""
    return {"name": name, "message": message, "traceback": f"{name}: {message}", "line": None}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
