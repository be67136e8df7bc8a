"""Inside a session: read a request, run the cell, answer. Runs only in a process forked by the server (zygote.py)."""

import _signal as _signals  # pyright: ignore[reportMissingImports]
import ast
import base64
import bdb
import builtins
import contextlib
import inspect
import io
import linecache
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from . import show, video
from .capture import Capture, clip, encode, reopen, usable
from .frame import CHANNEL_FD, HEAD, MAGIC, pack
from .heap import give_back
from .profiles import Refused

_MAX_ERROR = 8_192
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_STRIP = 1 << 20  # pixels of a picture that are sent at a time
_BALLAST = 12 << 20  # bytes of address space that a cell cannot take: the answer needs some
_CHUNK = 1 << 20  # bytes of a video that are received at a time
_RECURSION = 1_000
_LONG = 0.005  # CPU seconds of a cell after which it is worth a look how much memory lies idle
_REAL_TIMER = int(signal.ITIMER_REAL)
_WARMING = ("x = 1\nx + 1", "print(1)", "1 / 0", "Image.new('RGB', (8, 8))")  # see Runner.warm
_SIGINT, _SETMASK, _SELF = int(signal.SIGINT), int(signal.SIG_SETMASK), resource.RUSAGE_SELF
_AWAIT, _ONLY_AST, _COROUTINE = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, ast.PyCF_ONLY_AST, inspect.CO_COROUTINE
# Code may rebind what modules offer; the runner keeps its own references to what it needs to answer.
_write, _readv = os.write, os.readv
_getpid, _exit, _getcwd, _chdir = os.getpid, os._exit, os.getcwd, os.chdir
_cpu_seconds, _getrusage, _mmap = time.process_time, resource.getrusage, mmap.mmap
_settrace, _setprofile = sys.settrace, sys.setprofile
_thread_trace, _thread_profile = threading.settrace, threading.setprofile
_set_recursion, _get_recursion = sys.setrecursionlimit, sys.getrecursionlimit
# Without the enums of the `signal` module, whose making costs more than the calls.
_signal, _getsignal, _setitimer = _signals.signal, _signals.getsignal, _signals.setitimer
_sigmask = _signals.pthread_sigmask
_Report, _StackSummary, _source_lines = traceback.TracebackException, traceback.StackSummary, linecache.cache
_TextIOWrapper, _BufferedWriter, _BytesIO, _StringIO = io.TextIOWrapper, io.BufferedWriter, io.BytesIO, io.StringIO
_Expr, _Expression, _BdbQuit = ast.Expr, ast.Expression, bdb.BdbQuit
_getstate, _setstate = random.getstate, random.setstate
_unpackb, _suppress = msgpack.unpackb, contextlib.suppress


def _strips(image: Image.Image) -> Iterator[bytes]:
    """The pixels, in parts that the ballast leaves room for."""
    w, h = image.size
    rows = max(_STRIP // w, 1)
    if h <= rows:
        yield image.tobytes()
        return
    for top in range(0, h, rows):
        yield image.crop((0, top, w, min(top + rows, h))).tobytes()


class Runner:
    """Made and warmed in the server, once for all: each session has a copy on write, and calls `begin`, then `serve`.

    limits: max_text, max_images, max_pixels, max_total_pixels, max_ratio of the policy.
    """

    def __init__(self, limits: dict[str, Any]):
        self.limits = limits
        self.pid, self.home = 0, "/"
        self.cells = 0
        self.branching = True  # while the server or branching.py forks: the child is a session then
        self.interruptible = self.interrupted = False
        self.loop: Any = None  # of top-level `await`
        self.ballast: mmap.mmap | None = None
        self.handler = self._interrupt
        self.stdin = _TextIOWrapper(_BytesIO(b""), encoding="utf-8")
        self.gallery = show.current = show.Gallery(limits)
        self.streams = {name: Capture(fd, limits["max_text"]) for name, fd in (("stdout", 1), ("stderr", 2))}
        self.wrappers: dict[str, io.TextIOWrapper] = {}
        self.main = types.ModuleType("__main__")
        self.names = self.main.__dict__
        self.names.update(display=show.display, np=np, Image=Image, io=io, base64=base64)
        if "matplotlib.pyplot" in sys.modules:
            self.names["plt"] = sys.modules["matplotlib.pyplot"]
        builtins.exit = builtins.quit = sys.exit  # the `site` module, which makes these, is not loaded
        self.builtins = dict(builtins.__dict__)
        self.meta_path, self.path = list(sys.meta_path), list(sys.path)
        os.register_at_fork(after_in_child=self._forked)

    def warm(self) -> None:
        """In the server: go through the paths of a cell, so that sessions share what that leaves behind.

        Descriptors 1, 2 and CHANNEL_FD must be such that writing to them does no harm.
        """
        names, streams, mask = dict(self.names), (sys.stdin, sys.stdout, sys.stderr), _sigmask(_SETMASK, ())
        handler, main = _getsignal(_SIGINT), sys.modules["__main__"]
        self.pid, self.home = _getpid(), _getcwd()
        for code in (*_WARMING, *_WARMING):
            for _ in range(8):  # the interpreter adapts code that has run that often
                message = {"code": code, "nonce": b"", "bind": []}
                self._answer(message, self._cell(message))
        _sigmask(_SETMASK, mask)
        _signal(_SIGINT, handler)
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.modules["__main__"] = main
        self.names.clear()
        self.names.update(names)
        for number in range(1, self.cells + 1):
            _source_lines.pop(f"<cell {number}>", None)
        self.cells = 0
        if self.ballast is not None:
            self.ballast.close()
            self.ballast = None

    def begin(self) -> None:
        """In a session, after its confinement. What is random is seeded with its inputs."""
        self.pid, self.home, self.branching = _getpid(), _getcwd(), False
        tempfile.tempdir = None  # else it remembers the server's folder
        # The first process of a pid namespace does not end by itself when its CPU seconds are used up.
        _signal(signal.SIGXCPU, lambda number, frame: _exit(128 + number))

    def _forked(self) -> None:
        """A child of the code: it must not answer in our place, and what it prints is captured by descriptor."""
        if self.branching:
            return
        os.close(CHANNEL_FD)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115

    def branched(self) -> None:
        """To be called in a child that is a session of its own from now on."""
        self.pid = _getpid()

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

    def send(self, *parts: Any) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[_write(CHANNEL_FD, view) :]

    def serve(self) -> None:
        while True:
            magic, length = HEAD.unpack(self._read(HEAD.size))
            if magic != MAGIC:
                _exit(96)  # the code has read part of a request: there is no way back into step
            message = _unpackb(self._read(length), raw=False)
            if message["op"] == "cell":
                self._answer(message, self._cell(message))
            elif message["op"] == "branch":
                self._branch(message)
            else:
                self._inputs(message)

    def _branch(self, message: dict[str, Any]) -> None:
        from .branching import serve  # which needs this module's Runner as a type

        state = _getstate()
        serve(self, message)
        _setstate(state)  # Python seeds `random` anew in every child of a fork; a branch goes on as its origin does

    def _inputs(self, message: dict[str, Any]) -> None:
        for picture in message["images"]:
            h, w, c = picture["shape"]
            self.names[picture["name"]] = Image.frombytes(_MODES[c], (w, h), self._read(h * w * c))
        videos = message.get("videos", ())
        for item in videos:
            path = os.path.join(self.home, item["name"] + item["suffix"])
            problem = self._receive_file(path, item["size"]) or item.get("problem")
            self.names[item["name"]] = video.Video(item["name"], path, problem)
        if videos and "decord" in sys.modules:  # names that policies for videos expect
            self.names.update(VideoReader=sys.modules["decord"].VideoReader, cpu=sys.modules["decord"].cpu)
        _seed(message["seed"])
        self.send(pack({"nonce": message["nonce"]}))

    def _receive_file(self, path: str, size: int) -> str | None:
        """Writes what follows on the channel, all of which must be read. Returns why it could not be kept."""
        problem, left = None, size
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "wb", buffering=0))
            except OSError as e:
                file, problem = None, f"its file could not be made ({e.strerror})"
            while left:
                data = memoryview(self._read(min(left, _CHUNK)))
                left -= len(data)
                while file is not None and problem is None and data:
                    try:
                        data = data[file.write(data) :]
                    except OSError as e:
                        problem = f"its {size} bytes do not fit into the files of a session ({e.strerror})"
                        file.truncate(0)
        return problem

    def _answer(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        images = self.gallery.images
        bound = message["bind"][: len(images)]
        self.names.update(zip(bound, images, strict=False))
        dropped = answer["dropped"]
        dropped |= {"images": self.gallery.dropped, "reasons": [encode(r) for r in self.gallery.reasons]}
        header = {
            "nonce": message["nonce"], **answer, "images": [(i.height, i.width) for i in images], "bound": bound,
            "rss": _getrusage(_SELF).ru_maxrss * 1024,
        }  # fmt: skip
        self.send(pack(header))
        for image in images:
            for strip in _strips(image):
                self.send(strip)
        self.gallery.clear()

    # ------------------------------------------------------------------------------------------------ around a cell
    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interruptible:  # else it came too late: the answer is on its way
            self.interruptible, self.interrupted = False, True
            raise KeyboardInterrupt("the time limit of this call has passed")

    def _prepare(self) -> None:
        """Undo what earlier cells did to the interpreter; their own choices (folder, locale, decimals) stay."""
        _thread_trace(None)  # pyright: ignore[reportArgumentType]
        _thread_profile(None)  # pyright: ignore[reportArgumentType]
        sys.modules["__main__"], self.names["__builtins__"] = self.main, builtins
        sys.meta_path = list(self.meta_path)
        if type(sys.path) is not list:
            sys.path = []
        sys.path += [p for p in self.path if p not in sys.path]
        try:
            _getcwd()
        except OSError:  # it was removed
            _chdir(self.home)
        if self.ballast is None:
            with _suppress(OSError):  # the memory is full: the cell may free some
                self.ballast = _mmap(-1, _BALLAST)
        self._streams_in_place()
        if _getsignal(_SIGINT) is not self.handler:
            _signal(_SIGINT, self.handler)
        _sigmask(_SETMASK, ())

    def _restore(self) -> None:
        """What the runner's own code needs."""
        builtins.__dict__.update(self.builtins)
        if _get_recursion() < _RECURSION:
            _set_recursion(_RECURSION)

    def _streams_in_place(self) -> None:
        """The code may have closed or replaced them. Kept over cells otherwise: logging handlers hold on to them."""
        for name, raw in self.streams.items():
            if raw.size() is None:
                reopen(raw.fd, self.home)
            if raw.closed or not usable(self.wrappers.get(name)):
                raw = self.streams[name] = Capture(raw.fd, raw.limit)
                self.wrappers[name] = _TextIOWrapper(
                    _BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=False
                )
            setattr(sys, name, self.wrappers[name])
            setattr(sys, f"__{name}__", self.wrappers[name])
        if not usable(self.stdin):
            self.stdin = _TextIOWrapper(_BytesIO(b""), encoding="utf-8")
        sys.stdin = sys.__stdin__ = self.stdin  # input() raises EOFError

    # ------------------------------------------------------------------------------------------------ a cell
    def _cell(self, message: dict[str, Any]) -> dict[str, Any]:
        self.cells += 1
        filename, code = f"<cell {self.cells}>", message["code"].removeprefix("\ufeff")
        self._prepare()
        # Tracebacks show the code's own lines.
        _source_lines[filename] = (len(code), None, list(_StringIO(code, newline=None)), filename)
        self.interrupted = False
        started = _cpu_seconds()
        value: bytes | None = None
        cut, error, status, caught = 0, None, "ok", None
        try:
            try:
                self.interruptible = True
                value, cut = self._execute(code, filename)
            finally:
                self.interruptible = False
                _settrace(None)  # else the runner would be traced
                _setprofile(None)
        except BaseException as e:
            caught = e
        self._restore()
        if self.ballast is not None and (caught is not None or self.gallery.images):
            self.ballast.close()
            self.ballast = None
        if caught is not None:
            status, error = self._failure(caught, filename)
            del caught
        if _getpid() != self.pid:
            self._leave_child(error)
        error_late = self._finish_figures(filename)
        if error is None and error_late is not None:
            status, error = error_late
        video.release()
        _setitimer(_REAL_TIMER, 0)  # its signal would end a session that rests between cells
        texts, dropped = {}, {"repr": cut}
        for name, raw in self.streams.items():
            with _suppress(ValueError):  # closed by the code: what it wrote before is in `raw`
                self.wrappers[name].flush()
            texts[name], dropped[name] = raw.take()
        used = _cpu_seconds() - started
        if used > _LONG:
            give_back()  # now: once it has answered, it may be stopped at any time
        return {
            "status": status, **texts, "repr": value, "error": error, "dropped": dropped,
            "interrupted": self.interrupted, "cpu": used,
        }  # fmt: skip

    def _execute(self, code: str, filename: str) -> tuple[bytes | None, int]:
        """Run the code; returns the repr of a last bare expression and the number of bytes cut from it."""
        if "\0" in code:
            line = code.count("\n", 0, code.index("\0")) + 1
            raise SyntaxError("source code cannot contain null bytes", (filename, line, None, None))
        tree = compile(code, filename, "exec", _AWAIT | _ONLY_AST, dont_inherit=True)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], _Expr) else None
        if last is not None:
            tree.body.pop()
        if tree.body:
            self._run(compile(tree, filename, "exec", _AWAIT, dont_inherit=True))
        if last is None:
            return None, 0
        value = self._run(compile(_Expression(last.value), filename, "eval", _AWAIT, dont_inherit=True))
        if value is None:
            return None, 0
        self.names["_"] = value
        if self.gallery.show(value):
            return None, 0
        return clip(encode(repr(value)), self.limits["max_text"])

    def _run(self, code: types.CodeType) -> Any:
        value = eval(code, self.names)
        return self._await(value) if code.co_flags & _COROUTINE else value

    def _await(self, coroutine: Any) -> Any:
        """Top-level `await`: on one event loop over all cells, as in a notebook."""
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: it must not go on in a later cell
                task.cancel()
                with _suppress(asyncio.CancelledError):
                    self.loop.run_until_complete(task)
            raise

    def _finish_figures(self, filename: str) -> tuple[str, dict[str, Any]] | None:
        """Show what is still open. Drawing takes its time too, so it can be interrupted."""
        try:
            try:
                self.interruptible = not self.interrupted
                self.gallery.open_figures(show=not self.interrupted, end=True)
            finally:
                self.interruptible = False
        except BaseException as e:
            return self._failure(e, filename)
        return None

    def _failure(self, e: BaseException, filename: str) -> tuple[str, dict[str, Any]]:
        """(status, error) of an exception. Formatting runs the exception's own methods, which may fail in turn."""
        tb, name = e.__traceback__, type(e).__name__
        while tb is not None and tb.tb_frame.f_code.co_filename != filename:
            tb = tb.tb_next  # the runner's own frames
        line = e.lineno if isinstance(e, SyntaxError) and e.filename == filename else None
        try:
            name, text, message = _describe(e, tb)
        except BaseException as inner:
            text = message = f"{name} (its message cannot be shown: {type(inner).__name__})"
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == filename:
                line = tb.tb_lineno
            tb = tb.tb_next
        if isinstance(e, SystemExit):
            message = f"exit({message}) was called; the session goes on and its variables are kept"
            text += f"[{message}]\n"
        error = {
            "name": clip(encode(name), 200)[0], "message": clip(encode(message), _MAX_ERROR)[0],
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


def _seed(seed: int | None) -> None:
    """A fork inherits the server's generators. None: from the operating system."""
    random.seed(seed)
    # Its own way to ask the operating system takes 20 times as long.
    np.random.seed(np.frombuffer(os.urandom(32), np.uint32) if seed is None else seed % (1 << 32))


def _describe(e: BaseException, tb: types.TracebackType | None) -> tuple[str, str, str]:
    """(name, traceback, message): the code's own frames and those of libraries, without the runner's."""
    report = _Report(type(e), e, tb, limit=-20)
    refused = _refused(e)
    plain = ("PermissionError", str(refused)) if refused is not None else None
    if isinstance(e, _BdbQuit):
        plain = ("EOFError", "there is nobody to answer: neither input() nor a debugger can be used")
    if plain is not None:
        # What a library did on the way says nothing: the code's own lines, and the fact.
        lines = _StackSummary.from_list([f for f in report.stack if f.filename.startswith("<cell ")]).format()
        return plain[0], "".join(["Traceback (most recent call last):\n", *lines, f"{': '.join(plain)}\n"]), plain[1]
    # The interrupt's own frame (it is raised by the runner's signal handler) says nothing about the code.
    report.stack = _StackSummary.from_list([f for f in report.stack if f.filename != __file__])
    return type(e).__name__, "".join(report.format()), str(e)


def _refused(e: BaseException) -> Refused | None:
    """What the confinement refused, if that is what `e` tells, also wrapped (urllib)."""
    if isinstance(e, Refused):
        return e
    if isinstance(e, OSError):
        return next((a for a in e.args if isinstance(a, Refused)), None)
    return None
