"""`SandboxPool`: what callers use. Starts sessions, some ahead of their use, and bounds what runs and what lives.

A host is sized by three numbers. `workers`: lanes, cells that run at a time, by default the cores of this process;
others wait, outside their own time limit. `max_sessions`: sessions alive, by default as many as fit into three quarters
of the free memory at 16 MiB each and into the descriptors of this process at 4 each; `session` waits for a place.
`warm`: processes started ahead, beyond those.
"""

import collections
import contextlib
import itertools
import logging
import os
import resource
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from . import levels
from .metrics import Metrics, memory
from .policy import TRUSTED_ONLY, Policy, SandboxError, SandboxUnavailable
from .process import Process, Zygote
from .session import Host, Session, hand_over
from .wire import Inputs

log = logging.getLogger(__name__)
Task = TypeVar("Task")
Done = TypeVar("Done")

_SESSION_BYTES = 16 << 20  # of an idle session with some pictures and arrays
_SESSION_FDS = 4  # socket, pidfd, notification, one more while it branches
_OWN_FDS = 256  # left to the rest of this process
_DYING = 0.2  # seconds for a server that does not answer to be gone
_RETRY = 1.0  # seconds until another warm process is tried, and between two looks whether they live


class SandboxPool(Host):
    """Starts sessions at the strongest level of isolation that this machine offers; `report` says which and why.

    policy: limits of each session. min_level, max_level: weakest level to accept and strongest to try, of
    `policy.LEVELS`; below `min_level` SandboxUnavailable is raised. zygotes: server processes; more than one start
    sessions faster on a host with many cores. unsafe: allows the level `none`, for tests. The rest: see the module.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        min_level: str = "landlock",
        workers: int | None = None,
        *,
        max_level: str = "namespaces",
        warm: int = 0,
        zygotes: int = 1,
        max_sessions: int | None = None,
        unsafe: bool = False,
    ):
        policy = policy or Policy()
        workers = cores() if workers is None else workers
        for name, n, least in (("worker", workers, 1), ("zygote", zygotes, 1), ("warm", warm, 0)):
            if n < least:
                raise ValueError(f"a pool needs {name} >= {least}, not {n}")
        self.max_sessions = _room(workers, warm) if max_sessions is None else max_sessions
        if self.max_sessions < 1:
            raise ValueError(f"a pool needs max_sessions >= 1, not {self.max_sessions}")
        self.workers, self.unsafe = workers, unsafe
        _allow_descriptors(self.max_sessions + warm)
        zygote, self.report = levels.open_level(policy, min_level, max_level, unsafe)
        super().__init__(policy, self.report.level, workers)
        self._zygotes = [zygote, *(Zygote(policy, self.level) for _ in range(zygotes - 1))]
        self._finalizer = weakref.finalize(self, _close_servers, self._zygotes)  # also at interpreter exit
        self._numbers, self._turns = itertools.count(1), itertools.count()
        self._servers = threading.Lock()  # guards the two lines above
        self._changed = threading.Condition()  # guards what follows
        self._sessions: set[Session] = set()
        self._places, self._waiting = self.max_sessions, 0
        self._warm: collections.deque[Process] = collections.deque()
        self._forks = [0, 0]  # asked and refused at servers that have ended
        self._scope = threading.local()
        self._want_warm = warm
        self._filler = threading.Thread(target=self._fill, name="sandbox-warm", daemon=True)
        if warm:
            self._filler.start()

    def session(
        self,
        seed: int | None = None,
        images: Mapping[str, Any] | None = None,
        videos: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
        trusted: bool = False,
    ) -> Session:
        """Start a session whose variables hold `images` as PIL images and `videos` as readers. Waits for a place.

        seed: of `random` and `numpy.random`; None draws one. images: name -> PIL image, or uint8 array [h, w],
        [h, w, 3] or [h, w, 4]. videos: name -> path or bytes of a video file; one that cannot be read is told where it
        is used. trusted: the code was not sampled from a policy; below level `landlock` only such code runs. Raises
        ValueError for a bad name or picture, SandboxUnavailable, SandboxError if no process can be started.
        """
        if self.level in TRUSTED_ONLY and not trusted and not self.unsafe:
            raise SandboxUnavailable(
                f"at level {self.level!r} the code can read this user's files: sampled code does not run; for trusted "
                "replay there is session(trusted=True)"
            )
        inputs = Inputs.make(seed, images, videos)
        self.enter()
        try:
            return Session(self, inputs).begin()
        except BaseException:
            self.leave()
            raise

    def map(self, fn: Callable[[Task], Done], tasks: Iterable[Task], lanes: int | None = None) -> list[Done]:
        """`[fn(task) for task in tasks]` in that order, `lanes` at a time (default: `workers`) in threads.

        A task is taken from `tasks` only when a lane is free for it. At the first exception no further task begins,
        cells that others of this call still run are cancelled, and the exception is raised when all have returned.
        """
        lanes = self.workers if lanes is None else lanes
        stop = threading.Event()
        done: list[Future[Done]] = []
        with ThreadPoolExecutor(lanes, "sandbox-map", self._enter_scope, (stop,)) as threads:
            try:
                running: set[Future[Done]] = set()
                for task in tasks:
                    done.append(threads.submit(fn, task))
                    running.add(done[-1])
                    if len(running) >= lanes:
                        running = _first_of(running)
                wait(running, return_when=FIRST_EXCEPTION)
                for future in running:
                    if future.done():
                        future.result()
            except BaseException:
                stop.set()
                threads.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in done]

    def metrics(self) -> Metrics:
        """Figures since the pool was made; `.flat()` for a metrics log."""
        with self._changed:
            sessions, waiting, warm = list(self._sessions), self._waiting, list(self._warm)
        processes = [p for p in (*(s.process for s in sessions), *warm) if p is not None]
        with self._servers:
            gates = [zygote.gate for zygote in self._zygotes]
            servers = [zygote.process.pid for zygote in self._zygotes]
            asked, refused = self._forks
        asked += sum(gate.asked for gate in gates)
        refused += sum(gate.asked - gate.allowed for gate in gates)
        (own, own_kind), (theirs, kind) = memory(servers), memory([p.pid for p in processes])
        return self.recorder.metrics(
            sessions=len(sessions), waiting=waiting, warm=len(warm), memory_mb=own + theirs,
            memory_is="pss" if own_kind == kind == "pss" else "rss", forks_asked=asked, forks_refused=refused,
        )  # fmt: skip

    def close(self) -> None:
        """End every session and the servers. Cells that still run end as `cancelled`. May be repeated."""
        with self._changed:
            self.closed = True
            sessions = list(self._sessions)
            self._changed.notify_all()
        if self._filler.is_alive():
            self._filler.join()
        for process in self._warm:
            process.close()
        self._warm.clear()
        for session in sessions:
            session.close()
        self._finalizer()

    def __enter__(self) -> "SandboxPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ as a host
    def enter(self) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._places > 0 or self.closed)
            finally:
                self._waiting -= 1
            self._check_open()
            self._places -= 1

    def leave(self) -> None:
        with self._changed:
            self._places += 1
            self._changed.notify_all()

    def register(self, session: Session, known: bool) -> None:
        with self._changed:
            if not known:
                self._sessions.discard(session)
                return
            self._check_open()
            self._sessions.add(session)

    def stop(self) -> threading.Event | None:
        return vars(self._scope).get("stop")

    def start(self, fresh: bool = False) -> Process:
        with self._changed:
            self._check_open()
            process = None if fresh else self._take_warm()
            self._changed.notify_all()
        if process is not None:
            self.recorder.count("warm_hits")
            return process
        return self._start_cold()

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxError("the pool is closed")

    def _enter_scope(self, stop: threading.Event) -> None:
        self._scope.stop = stop

    # ------------------------------------------------------------------------------------------------ processes
    def _start_cold(self) -> Process:
        """From a fresh server if its own has died."""
        zygote, n = self._server()
        try:
            zygote.wait_ready()
            return Process(zygote, n)
        except OSError as e:  # no descriptors, no memory
            raise SandboxError(f"a session could not be started: {e}") from e
        except SandboxError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its socket may close a moment before it is dead
                zygote.process.wait(_DYING)
            raise

    def _server(self) -> tuple[Zygote, int]:
        """The server whose turn it is and a number for its next session."""
        with self._servers:
            self._check_open()
            place = next(self._turns) % len(self._zygotes)
            zygote = self._zygotes[place]
            if not zygote.alive:
                log.warning("a sandbox server had ended (%s); a new one is started", zygote.last_words())
                self._forks[0] += zygote.gate.asked
                self._forks[1] += zygote.gate.asked - zygote.gate.allowed
                zygote.close()  # its sessions died with it; its files go now
                self._zygotes[place] = zygote = Zygote(self.policy, self.level)
            return zygote, next(self._numbers)

    def _take_warm(self) -> Process | None:
        while self._warm:
            process = self._warm.popleft()
            if not process.ended:
                return process
            process.close()
        return None

    def _fill(self) -> None:
        """The filler thread: keeps the warm processes at their number, one start at a time."""
        while True:
            with self._changed:
                while not self.closed and len(self._warm) >= self._want_warm:
                    self._changed.wait(_RETRY)
                    for process in [p for p in self._warm if p.ended]:
                        self._warm.remove(process)
                        process.close()
                if self.closed:
                    return
            try:
                process = self._start_cold()
                hand_over(process, Inputs(0, {}, {}), self.policy)  # it serves, and has touched its pages
            except SandboxError as e:
                if not self.closed:
                    log.warning("no warm sandbox process could be started: %s", e)
                    with self._changed:
                        self._changed.wait_for(lambda: self.closed, _RETRY)
                continue
            with self._changed:
                self._warm.append(process)


def _first_of(running: set[Future[Done]]) -> set[Future[Done]]:
    """The futures that run on after at least one has ended; raises what it raised."""
    done, rest = wait(running, return_when="FIRST_COMPLETED")
    for future in done:
        future.result()
    return rest


def _close_servers(zygotes: list[Zygote]) -> None:
    for zygote in zygotes:
        zygote.close()


# ------------------------------------------------------------------------------------------------ the size of this host
def cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group where that is smaller."""
    n = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as f:
        quota, period = f.read().split()
        n = min(n, max(int(quota) // int(period), 1))
    return n


def _room(workers: int, warm: int) -> int:
    """Sessions that this host has memory and descriptors for, at least one for each worker."""
    by_memory = _free_memory() * 3 // 4 // _SESSION_BYTES
    by_descriptors = (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _OWN_FDS) // _SESSION_FDS
    return max(min(by_memory, by_descriptors) - warm, workers)


def _free_memory() -> int:
    """Bytes: what the kernel calls available, or what is left to this control group if that is less."""
    with open("/proc/meminfo") as f:
        free = next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable:"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, max(_number(limit) - _number(used), 0))
    return free


def _number(name: str) -> int:
    with open(f"/sys/fs/cgroup/{name}") as f:
        return int(f.read())


def _allow_descriptors(sessions: int) -> None:
    """Raise the soft limit on descriptors as far as needed. Raises ValueError if the hard one is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sessions * _SESSION_FDS + _OWN_FDS
    if needed > hard:
        raise ValueError(f"{sessions} sessions need {needed} descriptors, this process may have {hard} (ulimit -Hn)")
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
