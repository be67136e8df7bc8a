"""What a cell prints: kept at its head and its tail, counted between."""

import io
import os
from typing import Any

# Code may rebind what modules offer.
_open, _dup2, _close = os.open, os.dup2, os.close
_lseek, _pread, _ftruncate = os.lseek, os.pread, os.ftruncate


def clip(data: bytes, limit: int) -> tuple[bytes, int]:
    """Head and tail of `data` with a note between, and the number of bytes cut."""
    if len(data) <= limit:
        return data, 0
    return _join(data[: limit // 2], data[len(data) - (limit - limit // 2) :], cut := len(data) - limit), cut


def _join(head: bytes, tail: bytes, cut: int) -> bytes:
    # A cut may fall inside a character: what is left of it goes.
    head_text, tail_text = head.decode("utf-8", "ignore"), tail.decode("utf-8", "ignore")
    return f"{head_text}\n... [{cut} bytes cut] ...\n{tail_text}".encode()


def encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # lone surrogates become their escapes


class Capture(io.RawIOBase):
    """The bytes of sys.stdout or sys.stderr: the first and the last are kept, what lies between is counted.

    What children and C code write to the descriptor goes to a memory file and is appended at the end of the cell.
    """

    def __init__(self, fd: int, limit: int):
        self.fd, self.limit = fd, limit
        self.reset()

    def reset(self) -> None:
        self.head, self.tail, self.cut = bytearray(), bytearray(), 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        half = self.limit // 2
        room = max(half - len(self.head), 0)
        self.head += view[:room]
        rest = view[room:]
        if len(rest) > half:
            self.cut += len(self.tail) + len(rest) - half
            self.tail[:] = rest[len(rest) - half :]
        elif len(rest):
            self.tail += rest
            if len(self.tail) > 8 * half:  # trimmed seldom: each trim copies what is kept
                self._trim(half)
        return len(view)

    def _trim(self, half: int) -> None:
        excess = len(self.tail) - half
        if excess > 0:
            self.cut += excess
            del self.tail[:excess]

    def size(self) -> int | None:
        """Bytes that were written to the descriptor; None where the code has closed it or put no file there."""
        try:
            return _lseek(self.fd, 0, os.SEEK_END)
        except OSError:
            return None

    def take(self) -> tuple[bytes, int]:
        """The text of the cell and the number of bytes cut from it; the capture is empty then."""
        size = self.size() or 0
        if not size and not self.head:
            return b"", 0
        if size:
            if len(self.head) + len(self.tail) and (self.tail or self.head)[-1:] != b"\n":
                self.write(b"\n")
            half = self.limit // 2
            self.write(_pread(self.fd, min(size, self.limit), 0))
            if size > self.limit:
                self._trim(half)
                self.cut += size - self.limit - min(half, size - self.limit)
                self.write(_pread(self.fd, min(half, size - self.limit), size - min(half, size - self.limit)))
            _ftruncate(self.fd, 0)
        self._trim(self.limit // 2)
        if self.cut:
            answer = _join(bytes(self.head), bytes(self.tail), self.cut), self.cut
        else:
            answer = (bytes(self.head) + bytes(self.tail)).decode("utf-8", "replace").encode()[: self.limit + 200], 0
        self.reset()
        return answer


def nameless(folder: str) -> int:
    """A new file without a name that lies in `folder`, to be appended to. Raises OSError."""
    return _open(folder, os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)


def reopen(fd: int, home: str) -> None:
    """The code has closed descriptor 1 or 2: a new file without a name, or nothing, in its place."""
    try:
        new = nameless(home)
    except OSError:
        new = _open("/dev/null", os.O_RDWR)
    if new != fd:
        _dup2(new, fd)
        _close(new)


def usable(stream: io.TextIOWrapper | None) -> bool:
    try:
        return stream is not None and not stream.closed
    except ValueError:  # a stream below it was detached
        return False
