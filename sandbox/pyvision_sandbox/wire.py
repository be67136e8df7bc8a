"""The protocol between a pool and its sessions.

A message is `PVS1`, a little-endian uint32 length, a msgpack map of that length, then raw blobs whose sizes follow from
the map. A request carries a random nonce that its answer must repeat. What comes from a session is untrusted: the
length is checked before a byte is read, every key and type is checked, nothing is unpickled, one deadline covers all.

    request                                                  blobs              answer
    {op: inputs, nonce, images: [{name, shape}],             pixels, then the   {nonce}
     videos: [{name, suffix, size, problem}], seed}          videos' files
    {op: cell, nonce, code, bind}                            -                  `_ANSWER`, pixels
    {op: branch, nonce, private}                             -                  {nonce, pid}: pid < 0 is minus the errno
"""

import dataclasses
import keyword
import operator
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from .frame import HEAD, MAGIC, pack
from .policy import Policy

_TICK = 0.1  # seconds between two looks of `watch`


class ProtocolError(Exception):
    """The session sent something that is not an answer to the request."""


class Silent(Exception):
    """The deadline passed before the answer was complete."""


class Gone(Exception):
    """The session's end of the socket is closed, or its process has ended."""


def _poll(sock: socket.socket, pidfd: int, events: int, deadline: float) -> tuple[bool, bool]:
    """(the socket is ready, the process has ended). Both False: the deadline has passed."""
    poll = select.poll()
    poll.register(sock, events)
    if pidfd >= 0:
        poll.register(pidfd, select.POLLIN)
    ready = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
    return any(fd == sock.fileno() for fd, _ in ready), any(fd == pidfd for fd, _ in ready)


def send(sock: socket.socket, pidfd: int, parts: Iterable[bytes | memoryview], deadline: float) -> None:
    """Send all parts over a non-blocking socket. Raises Silent or Gone."""
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                writable, ended = _poll(sock, pidfd, select.POLLOUT, deadline)
                if ended:
                    raise Gone("the session ended while it was sent a request") from None
                if not writable:
                    raise Silent from None
            except OSError as e:
                raise Gone(str(e)) from e


class Reader:
    """Reads one answer under a soft and a hard deadline (time.monotonic).

    `on_soft` runs when the soft one passes and three times more until the hard one: a session that was too starved of
    CPU to have begun the cell ignores the first. The runner heeds only one for each cell. `watch` is asked every 0.1 s
    while the answer is waited for; a reason that it gives moves the soft deadline to now, is kept in `reason`, and asks
    no more. What it raises ends the wait.
    """

    def __init__(
        self,
        sock: socket.socket,
        pidfd: int,
        soft: float,
        hard: float,
        on_soft: Callable[[], None],
        watch: Callable[[], str | None] | None = None,
    ):
        self.sock, self.pidfd, self.hard, self.on_soft, self.watch = sock, pidfd, hard, on_soft, watch
        self.soft_passed = False
        self.reason: str | None = None
        self._grace = hard - soft
        self._next, self._step = soft, max(self._grace / 4, 1e-3)
        self._look = time.monotonic() + _TICK

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
        """What is due by now, then until something can be read or the next thing is due. Raises Gone, Silent."""
        now = time.monotonic()
        if self.watch is not None and now >= self._look:
            self._look = now + _TICK
            self.reason = self.watch()
            if self.reason is not None:
                self.watch = None
                self._next = min(self._next, now)
                self.hard = min(self.hard, self._next + self._grace)
        if now >= self.hard:  # before the poll: a session that sends byte after byte has no more time than others
            raise Silent
        if now >= self._next:
            self.soft_passed = True
            self._next += self._step
            self.on_soft()
        until = min(self._next, self.hard) if self.watch is None else min(self._next, self.hard, self._look)
        readable, ended = _poll(self.sock, self.pidfd, select.POLLIN, until)
        # It may have answered between the read and the poll, and died then: look once more, nothing can follow now.
        if ended and not readable and not _poll(self.sock, -1, select.POLLIN, 0.0)[0]:
            raise Gone("the session ended")

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
        """The pixels that follow an answer, uint8 [h, w, 3] each; `sizes` have been checked."""
        images = []
        for h, w in sizes:
            image = np.empty((h, w, 3), np.uint8)
            self.fill(image.data.cast("B"))
            images.append(image)
        return images


def new_nonce() -> bytes:
    return os.urandom(16)


# ------------------------------------------------------------------------------------------------ inputs
def check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"the name {name!r} is no Python variable name")


def _pixels(name: str, image: Any) -> np.ndarray:
    """A picture as uint8 [h, w, c] with c in 1, 3, 4. Raises ValueError naming it."""
    check_name(name)
    if isinstance(image, Image.Image):
        image = np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        raise ValueError(f"the picture {name!r} is neither a PIL image nor a uint8 array: {type(image).__name__}")
    shaped = image[..., None] if image.ndim == 2 else image
    if shaped.ndim != 3 or shaped.shape[2] not in (1, 3, 4) or not shaped.size:
        raise ValueError(f"the picture {name!r} has shape {image.shape}; [h, w], [h, w, 3] or [h, w, 4] is needed")
    return np.ascontiguousarray(shaped)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a session starts with. Kept for restarts and replays; a video given by its path is read each time."""

    seed: int
    images: dict[str, np.ndarray]
    videos: dict[str, bytes | str]  # a whole file, or the path of one

    @classmethod
    def make(
        cls,
        seed: int | None = None,
        images: Mapping[str, Any] | None = None,
        videos: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
    ) -> "Inputs":
        """Raises ValueError for a bad name, picture or seed. A video that cannot be read is told where it is used."""
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else operator.index(seed)
        if not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"the seed {seed} has more than 64 bits")
        films: dict[str, bytes | str] = {}
        for name, video in (videos or {}).items():
            check_name(name)
            films[name] = bytes(video) if isinstance(video, bytes | bytearray | memoryview) else os.fspath(video)
        return cls(seed, {name: _pixels(name, image) for name, image in (images or {}).items()}, films)

    def message(self, nonce: bytes, max_video: int) -> list[bytes | memoryview]:
        """The request and its blobs; of a video with more than `max_video` bytes only the news of that."""
        films, blobs = [], []
        for name, video in self.videos.items():
            suffix = ".mp4" if isinstance(video, bytes) else os.path.splitext(video)[1]
            data, problem = _film(video, max_video)
            films.append({"name": name, "suffix": suffix, "size": len(data), "problem": problem})
            blobs.append(data)
        shapes = [{"name": name, "shape": list(a.shape)} for name, a in self.images.items()]
        header = {"op": "inputs", "nonce": nonce, "images": shapes, "videos": films, "seed": self.seed}
        return [pack(header), *(a.data for a in self.images.values()), *blobs]


def _film(video: bytes | str, limit: int) -> tuple[bytes, str | None]:
    """(the file, why it is not sent)"""
    try:
        size = len(video) if isinstance(video, bytes) else os.stat(video).st_size
        if size > limit:
            return b"", f"its {size} bytes do not fit into the files of a session"
        if isinstance(video, bytes):
            return video, None
        with open(video, "rb") as f:
            return f.read(limit), None
    except OSError as e:
        return b"", f"its file cannot be opened ({e.strerror})"


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
