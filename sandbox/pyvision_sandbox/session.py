"""`Session`: a Python process whose variables live from cell to cell. Every outcome of code is a typed `Result`.

Thread-safe. A session knows its `Host` (the pool), its `Life` (the process) and, for a replay, the cells it has run.
"""

import dataclasses
import functools
import logging
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

from . import wire
from .frame import pack
from .metrics import Recorder, Uncountable, files_size
from .policy import BranchUnsafe, Policy, SandboxError, SandboxUnavailable
from .process import Process
from .result import Result, Usage, error_of
from .text import outcome
from .wire import Inputs, check_name

log = logging.getLogger(__name__)
_INPUT_LIMIT = 60.0  # seconds to hand over pictures and videos
_BRANCH_LIMIT = 20.0  # seconds for a live clone
_EXIT_WAIT = 1.0  # seconds between the end of a session's socket and the end of its process
_FAMILY_WAIT = 0.05  # seconds between the end of a branch and the news that its origin has ended
_WAITING = 32 << 10  # bytes of a request that surely fit into the socket of a stopped process
_CANCELLED = "cancelled by the caller"
_MARGIN = 64 << 20  # bytes beyond the limit of files at which a session is killed, if the limit itself is not more


def hand_over(process: Process, inputs: Inputs, policy: Policy) -> None:
    """Give a new process its inputs and wait until it has them; it is closed if it fails. Raises SandboxError."""
    nonce, deadline = wire.new_nonce(), time.monotonic() + _INPUT_LIMIT
    try:
        wire.send(process.sock, process.pidfd, inputs.message(nonce, policy.tmp_mb << 20), deadline)
        reader = wire.Reader(process.sock, process.pidfd, deadline, deadline, lambda: None)
        wire.check_nonce(reader.message(policy.max_header), nonce)
    except (wire.Silent, wire.Gone, wire.ProtocolError) as e:
        process.close()
        why = f"{e or 'it does not answer'}, {process.describe_exit()}"
        raise SandboxError(f"a session could not be started: {why}") from e
    except BaseException:
        process.close()
        raise


# ------------------------------------------------------------------------------------------------ what a session is in
class Host:
    """What sessions need of whoever starts them: limits, lanes, places and processes. A pool is one."""

    def __init__(self, policy: Policy, level: str, workers: int):
        self.policy, self.level = policy, level
        self.lanes = threading.Semaphore(workers)
        self.recorder = Recorder()
        self.closed = False

    def start(self, fresh: bool = False) -> Process:
        """A process that waits for its inputs, `fresh`: not one that was started ahead. Raises SandboxError."""
        raise NotImplementedError

    def enter(self) -> None:
        """Take a place for one more session; waits until one is free. Raises SandboxError."""

    def leave(self) -> None:
        """A place is free again."""

    def register(self, session: "Session", known: bool) -> None:
        """A session has begun, or was closed. Raises SandboxError if the host was closed meanwhile."""

    def stop(self) -> threading.Event | None:
        """What cancels the cells of the calling thread."""
        return None


class Life:
    """A process in its family: branches are children of the process that they came from and end with it.

    So one that is released while branches of it live is stopped for good and ended after the last of them.
    """

    _tree = threading.Lock()  # guards the counts of all families

    def __init__(self, process: Process, parent: "Life | None" = None):
        self.process, self.parent = process, parent
        self._branches, self._released = 0, False
        self._then: Callable[[], None] = lambda: None
        if parent is not None:
            with self._tree:
                parent._branches += 1

    def halt(self) -> None:
        """It runs no more from here on; from any thread."""
        with self._tree:
            self.process.send_signal(signal.SIGSTOP if self._branches else signal.SIGKILL)

    def release(self, then: Callable[[], None] = lambda: None) -> None:
        """Nobody uses it any more. `then` is called when it has ended."""
        self.halt()
        with self._tree:
            self._released, self._then = True, then
            life: Life | None = None if self._branches else self
        while life is not None:
            life.process.close()
            life._then()
            parent = life.parent
            if parent is None:
                return
            with self._tree:
                parent._branches -= 1
                life = parent if parent._released and not parent._branches else None

    @property
    def orphaned(self) -> bool:
        """It has ended because one that it came from has."""
        poll, above = select.poll(), self.parent
        if above is None:
            return False
        while above is not None:
            poll.register(above.process.pidfd, select.POLLIN)
            above = above.parent
        return bool(poll.poll(_FAMILY_WAIT * 1000))


@dataclasses.dataclass
class Cell:
    """One that runs, and is kept for a replay."""

    code: str
    bind: list[str]
    timeout: float
    outcome: bytes = b""  # digest of what it came to


class _Overfull(Exception):
    """The files of a session are far beyond their limit."""


class _Watch:
    """Asked while a cell runs: is it still wanted, and have its files room?"""

    def __init__(self, session: "Session", process: Process, stop: threading.Event | None):
        self.session, self.process, self.stop = session, process, stop
        self.limit_mb = session.host.policy.tmp_mb
        self.size = session.files

    def __call__(self) -> str | None:
        if self.session.closed:
            raise wire.Gone("closed by the caller")
        if self.stop is not None and self.stop.is_set():
            return _CANCELLED
        return self.files(self.session.files)

    def files(self, allowed: int) -> str | None:
        """Why the files are too many: beyond the limit, and beyond `allowed` bytes that were there before.

        Where the files lie in a file system of the session's own that is for the kernel to see to.
        """
        if self.process.home is None:
            return None
        try:
            size = files_size(self.process.home, self.process.pid)
        except Uncountable as e:
            return f"No space left: the session's files cannot be counted: {e}"
        self.size = size
        why = f"No space left: the session's files exceed {self.limit_mb} MiB"
        limit = max(self.limit_mb << 20, allowed)
        if size > limit + max(limit, _MARGIN):
            raise _Overfull(why)
        return why if size > limit else None


# ------------------------------------------------------------------------------------------------ the session
class Session:
    """Made by `SandboxPool.session` and `Session.branch`; one cell runs at a time, a second caller waits.

    replayed: its state was made by running the earlier cells again, not by the process in which they ran first.
    diverged: what a replay did otherwise than the first run; empty if nothing.
    """

    def __init__(self, host: Host, inputs: Inputs):
        self.host, self.inputs = host, inputs
        self.closed = False
        self.replayed, self.diverged = False, ""
        self.files = 0  # bytes on disk after the last cell
        self._lock = threading.Lock()
        self._left = False
        self._life: Life | None = None
        self._lost = ""  # why the sandbox failed it: `recover` may help
        self._death = ""  # why its process ended, until a result has told that a fresh one was started
        self._cells: list[Cell] | None = []  # since the process began; None: too many bytes for a replay
        self._kept = 0  # characters of their code

    @property
    def alive(self) -> bool:
        return self._life is not None

    @property
    def process(self) -> Process | None:
        """Its process, for looks from outside; None after it has ended."""
        return self._life.process if self._life is not None else None

    def run(
        self,
        code: str,
        timeout: float | None = None,
        bind: Sequence[str] = (),
        cancel: threading.Event | None = None,
        since: float | None = None,
    ) -> Result:
        """Run one cell. Never raises for what the code did; SandboxError if the sandbox itself failed (see `recover`).

        timeout: seconds instead of the policy's. bind: names under which returned pictures become variables, in order.
        cancel: setting it interrupts the cell, as the time limit does; the result is `cancelled`. since: when the wait
        for a lane began (time.monotonic), if before this call.
        """
        for name in bind:
            check_name(name)
        cell = Cell(code, list(bind), self.host.policy.cell_timeout if timeout is None else timeout)
        stop = self.host.stop() if cancel is None else cancel
        since = time.monotonic() if since is None else since
        with self._lock, self.host.lanes:
            queued = time.monotonic() - since
            try:
                result = self._run(cell, stop)
            except SandboxError:
                self.host.recorder.count("infrastructure")
                raise
        result.usage.queue_s = queued
        result.level = self.host.level
        self.host.recorder.cell(result.status, result.usage.wall_s, queued)
        return result

    def branch(self, private: bool = True) -> "Session":
        """A second session that goes on from here: the same variables, from now on each its own.

        private: with a copy of the files, else in the same files. Where the process cannot be cloned (it has threads,
        or the level has no way) a private branch is a new session in which the cells so far are run again: `replayed`.
        Raises BranchUnsafe if a branch in the same files cannot be had, SandboxError if no session can be started.
        """
        self.host.enter()
        try:
            with self._lock:
                child = self._branch(private)
            child._join()
            return child
        except BaseException:
            self.host.leave()
            raise

    def recover(self) -> None:
        """After a SandboxError: a fresh process in which the cells so far are run again. Raises SandboxError.

        Does nothing if the session is not lost.
        """
        with self._lock, self.host.lanes:
            if self._lost and not self.closed:
                self._end()
                self._rebuild(self._cells)

    def close(self) -> None:
        """End the session's process, all that it started, and its files. A cell that still runs ends as `cancelled`.

        Branches live on; the process that they came from then stays, stopped, until the last of them is closed.
        """
        self.closed = True
        life = self._life
        if life is not None:
            life.halt()
        with self._lock:
            if self._left:
                return
            self._left = True
            life, self._life = self._life, None
        self.host.register(self, False)
        if life is None:
            self.host.leave()
        else:
            life.release(self.host.leave)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ begin and end
    def begin(self) -> "Session":
        """Start it. Raises SandboxError; the caller's place is then still taken."""
        self._begin()
        self._join()
        return self

    def _begin(self) -> None:
        start = time.monotonic()
        try:
            process = self.host.start()
            hand_over(process, self.inputs, self.host.policy)
        except SandboxError as e:
            if self.host.closed or isinstance(e, SandboxUnavailable):
                raise
            log.warning("a session is started once more: %s", e)
            process = self.host.start(fresh=True)
            hand_over(process, self.inputs, self.host.policy)
        self._life, self._lost, self._cells, self._kept, self.files = Life(process), "", [], 0, 0
        self.host.recorder.took("starts", time.monotonic() - start)

    def _join(self) -> None:
        try:
            self.host.register(self, True)
        except SandboxError:
            self._end()
            raise

    def _end(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.release()

    def _lose(self, why: str) -> SandboxError:
        self._end()
        self._lost = why
        return SandboxError(why)

    def _rebuild(self, cells: list[Cell] | None) -> None:
        """A fresh process with the state that these cells make. Raises SandboxError; the session is then lost."""
        if cells is None:
            raise SandboxError(f"the cells of this session have more than {self.host.policy.max_code} bytes: no replay")
        death = self._death
        try:
            self._begin()
            self.host.recorder.count("replays")
            self.replayed = True
            for number, cell in enumerate(cells, 1):
                again = dataclasses.replace(cell)
                result = self._exchange(again, None)
                if not result.session_alive:
                    raise SandboxError(f"the replay ended at cell {number} of {len(cells)}: {result.status}")
                if again.outcome != cell.outcome and not self.diverged:
                    self.diverged = f"cell {number} of {len(cells)} did not end as it had before"
                    log.warning("a replay differs from the first run: %s", self.diverged)
        except SandboxError as e:
            error = self._lose(f"the session could not be rebuilt: {e}")
            self._cells, self._death = cells, death
            self._kept = sum(len(cell.code) for cell in cells)
            raise error from e

    def _branch(self, private: bool) -> "Session":
        if self.closed or self.host.closed:
            raise SandboxError("the session is closed")
        if self._lost:
            raise SandboxError(self._lost)
        child = Session(self.host, self.inputs)
        child._death, child.replayed, child.diverged, child.files = (
            self._death,
            self.replayed,
            self.diverged,
            self.files,
        )
        cells = None if self._cells is None else list(self._cells)
        if self._life is None:  # the branch of a session that has died is one too
            return child
        try:
            process = self._life.process.branch(private, time.monotonic() + _BRANCH_LIMIT)
            child._life, child._cells, child._kept = Life(process, self._life), cells, self._kept
            self.host.recorder.count("branches")
            return child
        except BranchUnsafe as e:
            why: SandboxError = e
        except SandboxError as e:  # in the middle: no telling where its process stands
            why = self._lose(f"the session is lost: {e}")
            if self.closed:
                raise why from e
        if not private:
            raise why
        log.info("a branch is made by replay: %s", why)
        with self.host.lanes:
            child._rebuild(cells)
        return child

    # ------------------------------------------------------------------------------------------------ one cell
    def _run(self, cell: Cell, stop: threading.Event | None) -> Result:
        if self.closed or self.host.closed or (stop is not None and stop.is_set()):
            return Result("cancelled", session_alive=self.alive and not self.closed)
        if self._lost:
            raise SandboxError(self._lost)
        encoded = cell.code.encode("utf-8", "replace")  # a lone surrogate cannot be source; Python names what it sees
        limit = self.host.policy.max_code
        if len(encoded) > limit:
            error = error_of("CodeTooLong", f"the code has {len(encoded)} bytes, at most {limit} are run")
            return Result("error", error=error, session_alive=self.alive)
        cell.code = encoded.decode()
        if self._life is None:
            if not self.host.policy.restart:
                error = error_of("SessionDead", f"the session ended before: {self._death}")
                return Result("crashed", error=error, session_alive=False)
            try:
                self._begin()
            except SandboxError as e:
                self._lose(str(e))
                raise
            self.host.recorder.count("restarts")
        restarted, self._death = self._death != "", ""
        result = self._exchange(cell, stop)
        result.restarted = restarted
        return result

    def _exchange(self, cell: Cell, stop: threading.Event | None) -> Result:
        assert self._life is not None
        policy, process, nonce = self.host.policy, self._life.process, wire.new_nonce()
        start = time.monotonic()
        hard = start + cell.timeout + policy.grace
        watch = _Watch(self, process, stop)
        interrupt = functools.partial(process.send_signal, signal.SIGINT, group=False)
        reader = wire.Reader(process.sock, process.pidfd, start + cell.timeout, hard, interrupt, watch)
        try:
            request = pack({"op": "cell", "nonce": nonce, "code": cell.code, "bind": cell.bind})
            if policy.freeze and len(request) > _WAITING:
                process.send_signal(signal.SIGCONT)
            wire.send(process.sock, process.pidfd, [request], hard)
            if policy.freeze and len(request) <= _WAITING:
                process.send_signal(signal.SIGCONT)  # it wakes up once, to a request that is there
            header = reader.message(policy.max_header)
            images = reader.pictures(wire.check_answer(header, nonce, policy, cell.bind))
            if policy.freeze:
                process.send_signal(signal.SIGSTOP)
            full = watch.files(self.files)
        except wire.Silent:
            return self._unheard(cell, reader.reason, start)
        except _Overfull as e:
            return self._dead("memory", "OSError", f"{e}; killed", start)
        except wire.ProtocolError as e:
            return self._dead("protocol_error", "ProtocolError", f"killed because it sent {e}", start)
        except wire.Gone:
            return self._gone(process, start)
        except BaseException:
            self._death = "the caller was interrupted"  # an answer may still come: the session is out of step
            self._end()
            raise
        result = Result.told(header, images, time.monotonic() - start)
        why = reader.reason if header["interrupted"] else full
        if why == _CANCELLED:
            result.status = "cancelled"
        elif why is not None:
            result.status, result.error = "error", error_of("OSError", why)
        elif reader.soft_passed and header["interrupted"]:
            result.status = "soft_timeout"
        self.files = watch.size
        self._remember(cell, result)
        return result

    def _remember(self, cell: Cell, result: Result) -> None:
        if self._cells is not None:
            cell.outcome = outcome(result)
            self._cells.append(cell)
            self._kept += len(cell.code)
            if self._kept > self.host.policy.max_code:
                self._cells = None

    def _unheard(self, cell: Cell, reason: str | None, start: float) -> Result:
        """It did not heed an interrupt in time."""
        if reason == _CANCELLED:
            return self._dead("cancelled", "Cancelled", f"{reason} and killed", start)
        if reason is not None:
            return self._dead("memory", "OSError", f"{reason}; killed", start)
        limit = f"{cell.timeout:g} s and {self.host.policy.grace:g} s of grace"
        return self._dead("hard_timeout", "HardTimeout", f"killed after {limit}", start)

    def _gone(self, process: Process, start: float) -> Result:
        """The socket or the process has ended: by itself, by the caller, or because the server or an origin is dead."""
        if self.closed:
            return self._dead("cancelled", "Cancelled", _CANCELLED, start)
        assert self._life is not None
        try:
            status = process.wait(_EXIT_WAIT)
        except SandboxError as e:
            raise self._lose(f"the session is lost: {e}") from e
        if self.closed:
            return self._dead("cancelled", "Cancelled", _CANCELLED, start)
        if status is None:
            return self._dead("protocol_error", "ProtocolError", "killed because it closed its channel", start)
        if self._life.orphaned:
            raise self._lose("the session is lost: the session that it branched from has ended")
        if process.out_of_memory:
            return self._dead("memory", "MemoryError", "killed at its memory limit", start)
        if status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            return self._dead(
                "hard_timeout", "HardTimeout", f"killed after {self.host.policy.session_cpu} s of CPU", start
            )
        return self._dead("crashed", "SessionCrashed", process.describe_exit(), start)

    def _dead(self, status: str, name: str, why: str, start: float) -> Result:
        wall = time.monotonic() - start
        self._end()
        self._death, self._cells, self._kept = why, [], 0
        if self.closed:
            return Result("cancelled", session_alive=False)
        error = error_of(name, f"{why}; its variables are lost")
        return Result(status, error=error, usage=Usage(wall_s=wall), session_alive=False)
