"""`SandboxPool` and `Session`: what callers use. Thread-safe; every outcome of code is a typed `Result`."""

import keyword
import logging
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from . import wire
from .policy import Policy, Report, SandboxError, probe
from .process import Process, Zygote
from .result import Result, Usage

log = logging.getLogger(__name__)
_INPUT_LIMIT = 60.0  # seconds to hand over the input pictures
_EXIT_WAIT = 1.0  # seconds between the end of a session's socket and the news of its end


def _pixels(name: str, image: Any) -> np.ndarray:
    """A picture as uint8 [h, w, c] with c in 1, 3, 4. Raises ValueError naming it."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"the picture name {name!r} is no Python variable name")
    if isinstance(image, Image.Image):
        image = np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        raise ValueError(f"the picture {name!r} is neither a PIL image nor a uint8 array: {type(image).__name__}")
    shaped = image[..., None] if image.ndim == 2 else image
    if shaped.ndim != 3 or shaped.shape[2] not in (1, 3, 4) or not shaped.size:
        raise ValueError(f"the picture {name!r} has shape {image.shape}; [h, w], [h, w, 3] or [h, w, 4] is needed")
    return np.ascontiguousarray(shaped)


class SandboxPool:
    """Starts sessions from one preloaded server process.

    policy: limits of each session. min_level: weakest isolation to accept, one of `policy.LEVELS`; below it
    SandboxUnavailable is raised. workers: cells that may run at the same time; others wait, and their wait does not
    count against their own limit. `report` says what confines the sessions.
    """

    def __init__(self, policy: Policy | None = None, min_level: str = "none", workers: int = 8):
        if workers < 1:
            raise ValueError(f"a pool needs at least one worker, not {workers}")
        self.policy = policy or Policy()
        self.report: Report = probe(self.policy, min_level)
        if self.report.level == "none":
            log.warning("sandbox %s: run only code that you would run yourself", self.report.summary)
        self._lanes = threading.Semaphore(workers)
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._count = 0
        self._closed = False
        self._zygote = Zygote(self.policy)
        self._finalizer = weakref.finalize(self, Zygote.close, self._zygote)  # also at interpreter exit

    def session(self, seed: int | None = None, images: Mapping[str, Any] | None = None) -> "Session":
        """Start a session whose variables hold `images` as PIL images.

        seed: of `random` and `numpy.random`; None draws from the operating system. images: name -> PIL image, or uint8
        array [h, w], [h, w, 3] or [h, w, 4]. Raises ValueError for a bad name or picture, SandboxError if no process
        can be started.
        """
        inputs = {name: _pixels(name, image) for name, image in (images or {}).items()}
        session = Session(self, seed, inputs)
        with self._lock:
            if not self._closed:
                self._sessions.add(session)
                return session
        session.close()
        raise SandboxError("the pool is closed")

    def close(self) -> None:
        """End every session and the server. Cells that still run end as `cancelled`. May be repeated."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        with self._lock:
            zygote = self._zygote
        self._finalizer.detach()
        zygote.close()

    def __enter__(self) -> "SandboxPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> Process:
        """A fresh process, from a fresh server if the last one has died."""
        with self._lock:
            if self._closed:
                raise SandboxError("the pool is closed")
            if not self._zygote.alive:
                log.warning("the sandbox server had ended (%s); a new one is started", self._zygote.last_words())
                self._finalizer.detach()
                self._zygote.close()  # its sessions died with it; its files go now
                self._zygote = Zygote(self.policy)
                self._finalizer = weakref.finalize(self, Zygote.close, self._zygote)
            zygote = self._zygote
            self._count += 1
            n = self._count
        zygote.wait_ready()
        return Process(zygote, n)


class Session:
    """One Python process whose variables live until `close`. Made by `SandboxPool.session`; one cell runs at a time."""

    def __init__(self, pool: SandboxPool, seed: int | None, inputs: dict[str, np.ndarray]):
        self._pool, self._seed, self._inputs = pool, seed, inputs
        self._lock = threading.Lock()
        self._closed = False
        self._infrastructure: str | None = None  # why the session is lost for good
        self._death = ""
        self._process: Process | None = None
        self._begin()

    @property
    def alive(self) -> bool:
        return self._process is not None

    def run(self, code: str, timeout: float | None = None, bind: Sequence[str] = ()) -> Result:
        """Run one cell. Never raises for what the code did; SandboxError if the sandbox itself failed.

        timeout: seconds instead of the policy's. bind: names under which returned pictures become variables, in order.
        """
        for name in bind:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"the name {name!r} is no Python variable name")
        start = time.monotonic()
        with self._lock, self._pool._lanes:
            queued = time.monotonic() - start
            result = self._run(code, self._pool.policy.cell_timeout if timeout is None else timeout, list(bind))
            result.usage.queue_s = queued
            result.level = self._pool.report.level
            return result

    def close(self) -> None:
        """End the session's process, all that it started, and its files. A cell that still runs ends as `cancelled`."""
        self._closed = True
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGKILL)
        with self._lock:
            self._end("closed")
        with self._pool._lock:
            self._pool._sessions.discard(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the process
    def _begin(self) -> None:
        process = self._pool._start()
        nonce = wire.new_nonce()
        shapes = [{"name": name, "shape": list(a.shape)} for name, a in self._inputs.items()]
        header = {"op": "inputs", "nonce": nonce, "images": shapes, "seed": self._seed}
        deadline = time.monotonic() + _INPUT_LIMIT
        try:
            parts = (wire.pack(header), *(a.data for a in self._inputs.values()))
            wire.send(process.sock, process.status_fd, parts, deadline)
            reader = wire.Reader(process.sock, process.status_fd, deadline, deadline, lambda: None)
            wire.check_nonce(reader.message(self._pool.policy.max_header), nonce)
        except (wire.Silent, wire.Gone, wire.ProtocolError) as e:
            process.close()
            raise SandboxError(
                f"a session could not be started: {e or 'it does not answer'}, {process.describe_exit()}"
            ) from e
        except BaseException:
            process.close()
            raise
        self._process = process

    def _end(self, why: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._death = why
            process.close()

    def _run(self, code: str, timeout: float, bind: list[str]) -> Result:
        if self._closed or self._pool._closed:
            return Result("cancelled", session_alive=False)
        if self._infrastructure is not None:
            raise SandboxError(self._infrastructure)
        encoded = code.encode(
            "utf-8", "replace"
        )  # a lone surrogate cannot be in source; Python then names the character
        if len(encoded) > self._pool.policy.max_code:
            note = f"the code has {len(encoded)} bytes, at most {self._pool.policy.max_code} are run"
            return Result("error", error=_error("CodeTooLong", note), session_alive=self.alive)
        restarted = self._process is None
        if restarted:
            if not self._pool.policy.restart:
                return Result(
                    "crashed",
                    error=_error("SessionDead", f"the session ended before: {self._death}"),
                    session_alive=False,
                )
            self._begin()
            if self._closed:  # closed while it was started: nobody else ends it
                return Result("cancelled", session_alive=False)
        result = self._exchange(encoded.decode(), timeout, bind)
        result.restarted = restarted
        return result

    def _exchange(self, code: str, timeout: float, bind: list[str]) -> Result:
        policy, process, nonce = self._pool.policy, self._process, wire.new_nonce()
        assert process is not None
        freeze = policy.freeze
        start = time.monotonic()
        soft = start + timeout
        reader = wire.Reader(
            process.sock,
            process.status_fd,
            soft,
            soft + policy.grace,
            lambda: process.send_signal(signal.SIGINT, group=False),
        )
        try:
            if freeze:
                process.send_signal(signal.SIGCONT)
            request = wire.pack({"op": "cell", "nonce": nonce, "code": code, "bind": bind})
            wire.send(process.sock, process.status_fd, [request], soft + policy.grace)
            header = reader.message(policy.max_header)
            images = reader.pictures(wire.check_answer(header, nonce, policy, bind))
        except wire.Silent:
            limit = f"{timeout:g} s and {policy.grace:g} s of grace"
            return self._dead("hard_timeout", "HardTimeout", f"killed after {limit}; its variables are lost", start)
        except wire.ProtocolError as e:
            return self._dead(
                "protocol_error", "ProtocolError", f"killed because it sent {e}; its variables are lost", start
            )
        except wire.Gone:
            return self._gone(process, start)
        except BaseException:
            self._end("the caller was interrupted")  # an answer may still come: the session is out of step
            raise
        if freeze:
            process.send_signal(signal.SIGSTOP)
        status = "soft_timeout" if reader.soft_passed and header["interrupted"] else header["status"]
        dropped: dict[str, Any] = {key: n for key, n in header["dropped"].items() if key != "reasons" and n}
        if header["dropped"]["reasons"]:
            dropped["reasons"] = [_text(reason) for reason in header["dropped"]["reasons"]]
        error = header["error"]
        if error is not None:
            error = {key: _text(v) if isinstance(v, bytes) else v for key, v in error.items()}
        return Result(
            status=status,
            stdout=_text(header["stdout"]),
            stderr=_text(header["stderr"]),
            repr=None if header["repr"] is None else _text(header["repr"]),
            error=error,
            images=images,
            dropped=dropped,
            usage=Usage(wall_s=time.monotonic() - start, cpu_s=header["cpu"], peak_rss=header["rss"]),
            bound=header["bound"],
        )

    def _gone(self, process: Process, start: float) -> Result:
        """The socket or the process has ended: by itself, by the caller, or because the server is dead."""
        try:
            status = process.wait(_EXIT_WAIT)
        except SandboxError as e:
            self._infrastructure = f"the session is lost: {e}"
            self._end("the server died")
            raise SandboxError(self._infrastructure) from e
        if self._closed:
            self._end("closed")
            return Result("cancelled", session_alive=False)
        if status is None:
            return self._dead(
                "protocol_error", "ProtocolError", "killed because it closed its channel, variables lost", start
            )
        if status == -signal.SIGXCPU:
            return self._dead(
                "hard_timeout", "HardTimeout", f"killed after {self._pool.policy.session_cpu} s of CPU", start
            )
        return self._dead("crashed", "SessionCrashed", f"{process.describe_exit()}; its variables are lost", start)

    def _dead(self, status: str, name: str, why: str, start: float) -> Result:
        wall = time.monotonic() - start
        self._end(why)
        if self._closed:
            return Result("cancelled", session_alive=False)
        return Result(status, error=_error(name, why), usage=Usage(wall_s=wall), session_alive=False)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _error(name: str, message: str) -> dict[str, Any]:
    return {"name": name, "message": message, "traceback": f"{name}: {message}", "line": None}
