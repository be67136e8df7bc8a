"""The protocol between a pool and its sessions.

A message is `PVS1`, a little-endian uint32 length, a msgpack map of that length, then raw pixel blobs whose sizes
follow from the map. A request carries a random nonce that its answer must repeat. What comes from a session is
untrusted: the length is checked before a byte is read, every key and type is checked, nothing is unpickled, one
deadline covers it all.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np

from .policy import Policy

MAGIC = b"PVS1"
HEAD = struct.Struct("<4sI")
STATUS = struct.Struct("<ci")  # what the server writes on a session's status pipe: P pid | X exit status | E errno


class ProtocolError(Exception):
    """The session sent something that is not an answer to the request."""


class Silent(Exception):
    """The deadline passed before the answer was complete."""


class Gone(Exception):
    """The session's end of the socket is closed, or its process has ended."""


def pack(header: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(header, use_bin_type=True)  # pyright: ignore[reportAssignmentType]
    return HEAD.pack(MAGIC, len(packed)) + packed


def _poll(sock: socket.socket, status_fd: int, events: int, deadline: float) -> tuple[bool, bool]:
    """(the socket is ready, the status pipe spoke). Both False: the deadline has passed."""
    poll = select.poll()
    poll.register(sock, events)
    if status_fd >= 0:
        poll.register(status_fd, select.POLLIN)
    ready = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
    return any(fd == sock.fileno() for fd, _ in ready), any(fd == status_fd for fd, _ in ready)


def send(sock: socket.socket, status_fd: int, parts: Iterable[bytes | memoryview], deadline: float) -> None:
    """Send all parts over a non-blocking socket. Raises Silent or Gone."""
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                writable, ended = _poll(sock, status_fd, select.POLLOUT, deadline)
                if ended:
                    raise Gone("the session ended while it was sent a request") from None
                if not writable:
                    raise Silent from None
            except OSError as e:
                raise Gone(str(e)) from e


class Reader:
    """Reads one answer under a soft and a hard deadline (time.monotonic).

    `on_soft` runs when the soft one passes and three times more until the hard one: a session that was too starved of
    CPU to have begun the cell ignores the first. The runner heeds only one for each cell.
    """

    def __init__(self, sock: socket.socket, status_fd: int, soft: float, hard: float, on_soft: Callable[[], None]):
        self.sock, self.status_fd, self.soft, self.hard, self.on_soft = sock, status_fd, soft, hard, on_soft
        self.soft_passed = False
        self._next, self._step = soft, max((hard - soft) / 4, 1e-3)

    def fill(self, view: memoryview) -> None:
        while view:
            try:
                n = self.sock.recv_into(view)
            except BlockingIOError:
                self._wait()
                continue
            except OSError as e:
                raise Gone(str(e)) from e
            if n == 0:
                raise Gone("the session closed its end")
            view = view[n:]

    def _wait(self) -> None:
        readable, ended = _poll(self.sock, self.status_fd, select.POLLIN, min(self._next, self.hard))
        if readable:
            return
        if ended:
            # It may have answered between the read and the poll, and died then: look once more, nothing can follow now.
            if _poll(self.sock, -1, select.POLLIN, 0.0)[0]:
                return
            raise Gone("the session ended")
        if self._next >= self.hard:
            raise Silent
        self.soft_passed = True
        self._next += self._step
        self.on_soft()

    def message(self, max_header: int) -> dict[str, Any]:
        head = bytearray(HEAD.size)
        self.fill(memoryview(head))
        magic, length = HEAD.unpack(head)
        if magic != MAGIC:
            raise ProtocolError(f"bytes that are no message: {bytes(head[:8])!r}")
        if length > max_header:
            raise ProtocolError(f"a header of {length} bytes, {max_header} are allowed")
        body = bytearray(length)
        self.fill(memoryview(body))
        try:
            header = msgpack.unpackb(
                body, raw=False, strict_map_key=True, max_map_len=32, max_array_len=4096, max_ext_len=0, max_str_len=256
            )
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as e:
            raise ProtocolError(f"a header that is not msgpack: {type(e).__name__}") from e
        if type(header) is not dict:
            raise ProtocolError("a header that is not a map")
        return header

    def pictures(self, sizes: list[tuple[int, int]]) -> list[np.ndarray]:
        images = []
        for h, w in sizes:
            image = np.empty((h, w, 3), np.uint8)
            self.fill(image.data.cast("B"))
            images.append(image)
        return images


def new_nonce() -> bytes:
    return os.urandom(16)


# ------------------------------------------------------------------------------------------------ checks of an answer
_ANSWER = {
    "nonce": bytes, "status": str, "stdout": bytes, "stderr": bytes, "repr": bytes | None, "error": dict | None,
    "images": list, "dropped": dict, "bound": list, "cpu": float, "rss": int, "interrupted": bool,
}  # fmt: skip
_ERROR = {"name": bytes, "message": bytes, "traceback": bytes, "line": int | None}
_DROPPED = {"stdout": int, "stderr": int, "repr": int, "images": int, "reasons": list}


def _fields(what: str, value: dict[str, Any], types: dict[str, Any]) -> None:
    if value.keys() != types.keys():
        raise ProtocolError(f"{what} with the keys {sorted(map(repr, value))[:20]}")
    for key, kind in types.items():
        # bool is an int to isinstance; an exact look keeps the two apart.
        if not isinstance(value[key], kind) or (type(value[key]) is bool and kind is not bool):
            raise ProtocolError(f"{what} whose {key} is a {type(value[key]).__name__}")


def _at_most(what: str, n: int, limit: int) -> None:
    if not 0 <= n <= limit:
        raise ProtocolError(f"{what}: {n}, at most {limit} is allowed")


def check_nonce(header: dict[str, Any], nonce: bytes) -> None:
    if header.get("nonce") != nonce:
        raise ProtocolError("an answer to another request")


def check_answer(header: dict[str, Any], nonce: bytes, policy: Policy, bind: list[str]) -> list[tuple[int, int]]:
    """Check every key, type and bound of a cell's answer; returns (height, width) of the pictures that follow it."""
    check_nonce(header, nonce)
    _fields("an answer", header, _ANSWER)
    _fields("a drop count", header["dropped"], _DROPPED)
    if header["status"] not in ("ok", "error", "memory"):
        raise ProtocolError("an answer of no known status")
    if (header["status"] == "ok") != (header["error"] is None):
        raise ProtocolError("an answer whose status does not fit its error")
    text = policy.max_text + 256  # the note of what was cut lies in the text
    for key in ("stdout", "stderr", "repr"):
        _at_most(key, len(header[key] or b""), text)
        _at_most(f"dropped {key}", header["dropped"][key], 1 << 62)
    if header["error"] is not None:
        _fields("an error", header["error"], _ERROR)
        _at_most("error line", header["error"]["line"] or 0, 1 << 31)
    _at_most("dropped images", header["dropped"]["images"], 1 << 31)
    if not all(type(r) is bytes for r in header["dropped"]["reasons"]):
        raise ProtocolError("a reason that is not text")
    _at_most("cpu", int(min(max(header["cpu"], -1), 1e12)) if header["cpu"] == header["cpu"] else -1, 10**11)
    _at_most("rss", header["rss"], 1 << 50)
    if header["bound"] != bind[: len(header["images"])]:
        raise ProtocolError("names that were not asked for")
    sizes = []
    _at_most("pictures", len(header["images"]), policy.max_images)
    for size in header["images"]:
        if type(size) is not list or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
            raise ProtocolError("a picture without a size")
        _at_most("pixels", size[0] * size[1], policy.max_pixels)
        sizes.append((size[0], size[1]))
    _at_most("pixels in all", sum(h * w for h, w in sizes), policy.max_total_pixels)
    return sizes
