"""Inside a session: read a request, run the cell, answer. Runs only in a process forked by the server (zygote.py)."""

import ast
import base64
import builtins
import contextlib
import io
import linecache
import os
import random
import resource
import signal
import sys
import time
import traceback
import types
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from . import show
from .wire import HEAD, MAGIC, pack

CHANNEL_FD = 200  # the protocol's descriptor: above what code opens by itself
_MAX_ERROR = 8_192
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Code may rebind what modules offer; the runner keeps its own references to what it needs to answer.
_write, _readv, _getpid, _exit, _perf = os.write, os.readv, os.getpid, os._exit, time.perf_counter
_fstat, _pread, _ftruncate = os.fstat, os.pread, os.ftruncate


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

    def take(self) -> tuple[bytes, int]:
        """The text of the cell and the number of bytes cut from it; the capture is empty then."""
        size = _fstat(self.fd).st_size
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


class Runner:
    def __init__(self, limits: dict[str, Any]):
        self.limits = limits
        self.pid = _getpid()
        self.cells = 0
        self.interruptible = self.interrupted = False
        self.gallery = show.current = show.Gallery(limits)
        self.streams = {name: Capture(fd, limits["max_text"]) for name, fd in (("stdout", 1), ("stderr", 2))}
        self.wrappers: dict[str, io.TextIOWrapper] = {}
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.names = main.__dict__
        self.names.update(__builtins__=builtins, display=self.gallery.display, np=np, Image=Image, io=io, base64=base64)
        if "matplotlib.pyplot" in sys.modules:
            self.names["plt"] = sys.modules["matplotlib.pyplot"]
        builtins.exit = builtins.quit = sys.exit  # the `site` module, which makes these, is not loaded
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A child of the code: it must not answer in our place, and what it prints is captured by descriptor."""
        os.close(CHANNEL_FD)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115

    # ------------------------------------------------------------------------------------------------ messages
    def _read(self, n: int) -> bytearray:
        buffer = bytearray(n)
        view = memoryview(buffer)
        while view:
            k = _readv(CHANNEL_FD, [view])
            if not k:
                _exit(0)  # the pool is gone
            view = view[k:]
        return buffer

    def _send(self, *parts: Any) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[_write(CHANNEL_FD, view) :]

    def serve(self) -> None:
        while True:
            magic, length = HEAD.unpack(self._read(HEAD.size))
            if magic != MAGIC:
                _exit(96)  # the code has read part of a request: there is no way back into step
            message = msgpack.unpackb(self._read(length), raw=False)
            if message["op"] == "cell":
                self._answer(message, self._cell(message))
            else:
                self._inputs(message)

    def _inputs(self, message: dict[str, Any]) -> None:
        for picture in message["images"]:
            h, w, c = picture["shape"]
            self.names[picture["name"]] = Image.frombytes(_MODES[c], (w, h), bytes(self._read(h * w * c)))
        seed = message["seed"]
        random.seed(seed)  # a fork inherits the server's generators
        np.random.seed(None if seed is None else seed % (1 << 32))
        self._send(pack({"nonce": message["nonce"]}))

    def _answer(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        images = self.gallery.images
        try:
            blobs = [image.tobytes() for image in images]
        except MemoryError:
            self.gallery.drop("no memory was left to return pictures", len(images))
            images, blobs = [], []
        bound = message["bind"][: len(images)]
        self.names.update(zip(bound, images, strict=False))
        dropped = answer["dropped"]
        dropped |= {"images": self.gallery.dropped, "reasons": [encode(r) for r in self.gallery.reasons]}
        header = {
            "nonce": message["nonce"], **answer, "images": [(i.height, i.width) for i in images], "bound": bound,
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        self._send(pack(header), *blobs)
        self.gallery.clear()

    # ------------------------------------------------------------------------------------------------ a cell
    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interruptible:  # else it came too late: the answer is on its way
            self.interruptible, self.interrupted = False, True
            raise KeyboardInterrupt("the time limit of this call has passed")

    def _streams_in_place(self) -> None:
        """The code may have closed or replaced them. Kept over cells otherwise: logging handlers hold on to them."""
        for name, raw in self.streams.items():
            if name not in self.wrappers or self.wrappers[name].closed or raw.closed:
                raw = self.streams[name] = Capture(raw.fd, raw.limit)
                self.wrappers[name] = io.TextIOWrapper(
                    io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=False
                )
            setattr(sys, name, self.wrappers[name])
            setattr(sys, f"__{name}__", self.wrappers[name])
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8")  # input() raises EOFError

    def _cell(self, message: dict[str, Any]) -> dict[str, Any]:
        self.cells += 1
        filename, code = f"<cell {self.cells}>", message["code"]
        linecache.cache[filename] = (
            len(code),
            None,
            code.splitlines(True),
            filename,
        )  # tracebacks show the code's own lines
        self._streams_in_place()
        self.interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)
        cpu = time.process_time()
        value: bytes | None = None
        cut, error, status = 0, None, "ok"
        try:
            try:
                self.interruptible = True
                value, cut = self._execute(code, filename)
            finally:
                self.interruptible = False
        except BaseException as e:
            status, error = self._failure(e, filename)
        if _getpid() != self.pid:
            self._leave_child(error)
        error_late = self._finish_figures(filename)
        if error is None and error_late is not None:
            status, error = error_late
        texts, dropped = {}, {"repr": cut}
        for name, raw in self.streams.items():
            with contextlib.suppress(ValueError):  # closed by the code: what it wrote before is in `raw`
                self.wrappers[name].flush()
            texts[name], dropped[name] = raw.take()
        return {
            "status": status, **texts, "repr": value, "error": error, "dropped": dropped,
            "interrupted": self.interrupted, "cpu": time.process_time() - cpu,
        }  # fmt: skip

    def _execute(self, code: str, filename: str) -> tuple[bytes | None, int]:
        """Run the code; returns the repr of a last bare expression and the number of bytes cut from it."""
        tree = ast.parse(code, filename)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if last is not None:
            tree.body.pop()
        if tree.body:
            exec(compile(tree, filename, "exec", dont_inherit=True), self.names)
        if last is None:
            return None, 0
        value = eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), self.names)
        if value is None:
            return None, 0
        self.names["_"] = value
        if self.gallery.show(value):
            return None, 0
        return clip(encode(repr(value)), self.limits["max_text"])

    def _finish_figures(self, filename: str) -> tuple[str, dict[str, Any]] | None:
        """Show what is still open. Drawing takes its time too, so it can be interrupted."""
        try:
            try:
                self.interruptible = not self.interrupted
                self.gallery.open_figures(show=not self.interrupted)
            finally:
                self.interruptible = False
        except BaseException as e:
            return self._failure(e, filename)
        return None

    def _failure(self, e: BaseException, filename: str) -> tuple[str, dict[str, Any]]:
        """(status, error) of an exception. Formatting runs the exception's own methods, which may fail in turn."""
        tb = e.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename != filename:
            tb = tb.tb_next  # the runner's own frames
        try:
            report = traceback.TracebackException(type(e), e, tb, limit=-20)
            # The interrupt's own frame (it is raised by the runner's signal handler) says nothing about the code.
            report.stack = traceback.StackSummary.from_list([f for f in report.stack if f.filename != __file__])
            text, message = "".join(report.format()), str(e)
        except BaseException as inner:
            text = message = f"{type(e).__name__} (its message cannot be shown: {type(inner).__name__})"
        line = e.lineno if isinstance(e, SyntaxError) and e.filename == filename else None
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == filename:
                line = tb.tb_lineno
            tb = tb.tb_next
        if isinstance(e, SystemExit):
            message = f"exit({message}) was called; the session goes on and its variables are kept"
            text += f"[{message}]\n"
        error = {
            "name": clip(encode(type(e).__name__), 200)[0], "message": clip(encode(message), _MAX_ERROR)[0],
            "traceback": clip(encode(text), _MAX_ERROR)[0], "line": line,
        }  # fmt: skip
        e.__traceback__ = None  # the frames hold the arrays that may have filled the memory
        return ("memory" if isinstance(e, MemoryError) else "error"), error

    def _leave_child(self, error: dict[str, Any] | None) -> None:
        """The code forked and this child has come to the end of the cell: only the session itself answers."""
        try:
            if error is not None and error["name"] != b"SystemExit":
                _write(2, error["traceback"])
            sys.stdout.flush()
        finally:
            _exit(0 if error is None else 1)
