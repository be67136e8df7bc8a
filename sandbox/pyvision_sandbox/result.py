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
    MemoryError reached the top, state kept); `hard_timeout` (killed), `crashed` (the process ended by itself),
    `protocol_error` (it spoke out of turn and was killed); `cancelled` (closed by the caller while it ran).
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

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a trajectory's record: everything but the pixels; `images` holds (height, width) pairs."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("images", "usage")}
        data["images"] = [list(image.shape[:2]) for image in self.images]
        data["usage"] = dataclasses.asdict(self.usage)
        return data
