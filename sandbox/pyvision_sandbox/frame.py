"""The outer form of every message between pool, server and sessions: `PVS1`, uint32 length, a msgpack map."""

import struct
from typing import Any

import msgpack

MAGIC = b"PVS1"
HEAD = struct.Struct("<4sI")
CHANNEL_FD = 200  # a session's end of its socket: above what code opens by itself
_packb = msgpack.packb  # code in a session may rebind what modules offer


def pack(header: dict[str, Any]) -> bytes:
    packed: bytes = _packb(header, use_bin_type=True)  # pyright: ignore[reportAssignmentType]
    return HEAD.pack(MAGIC, len(packed)) + packed
