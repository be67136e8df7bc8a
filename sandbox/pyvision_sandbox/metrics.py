"""Figures of a pool (`SandboxPool.metrics`), and what sessions take of the host: memory and files."""

import collections
import contextlib
import dataclasses
import os
import resource
import stat
import threading
from collections.abc import Sequence
from typing import Any

_KEPT = 4096  # latest samples of which percentiles are made
_SAMPLED = 16  # processes of which the memory is read; the rest is taken to be like them
_MAX_ENTRIES = 4096  # files and folders of one session, as many as the level `namespaces` gives it
_MAX_DEPTH = 64  # of its folders


@dataclasses.dataclass(frozen=True)
class Spread:
    """Durations: `count` and `total` over the pool's life, percentiles of the latest 4,096. Seconds."""

    count: int = 0
    total: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Figures of a pool since it was made; `sessions`, `waiting`, `warm` and the memory are those of the moment."""

    starts: Spread  # from a free place to a session that holds its inputs; restarts and replays too
    queue: Spread  # waits of cells for a lane
    run: Spread  # cells, without that wait
    statuses: dict[str, int]  # results by status
    warm_hits: int  # starts that took a warm process
    restarts: int  # cells that ran in a fresh session because the one before had died
    branches: int  # live clones
    replays: int  # sessions rebuilt by replay: branches that could not be cloned, and recoveries
    infrastructure: int  # failures of the sandbox itself
    sessions: int  # open
    waiting: int  # callers that wait for a place
    warm: int  # processes started ahead
    memory_mb: float  # of all processes of sessions and servers; estimated from 16 of them
    memory_is: str  # "pss", or "rss" where the host does not show more; that counts shared pages again and again
    forks_asked: int  # by code of sessions, and by the pool for branches
    forks_refused: int

    def flat(self, prefix: str = "sandbox/") -> dict[str, float]:
        """For a run's metrics log: `sandbox/starts_p50`, `sandbox/status_ok`, ..."""
        out: dict[str, float] = {}
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, Spread):
                out |= {f"{prefix}{field.name}_{key}": float(n) for key, n in dataclasses.asdict(value).items()}
            elif isinstance(value, dict):
                out |= {f"{prefix}status_{key}": float(n) for key, n in sorted(value.items())}
            elif not isinstance(value, str):
                out[prefix + field.name] = float(value)
        return out


class Recorder:
    """Counts what happens in a pool. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._statuses: collections.Counter[str] = collections.Counter()
        self._totals = {name: 0.0 for name in ("starts", "queue", "run")}
        self._latest = {name: collections.deque[float](maxlen=_KEPT) for name in self._totals}

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def took(self, name: str, seconds: float) -> None:
        with self._lock:
            self._counts[name] += 1
            self._totals[name] += seconds
            self._latest[name].append(seconds)

    def cell(self, status: str, run_s: float, queue_s: float) -> None:
        self.took("run", run_s)
        self.took("queue", queue_s)
        with self._lock:
            self._statuses[status] += 1

    def metrics(self, **of_the_moment: Any) -> Metrics:
        with self._lock:
            spreads = {
                name: Spread(self._counts[name], self._totals[name], *_percentiles(list(latest)))
                for name, latest in self._latest.items()
            }
            counts = {
                name: self._counts[name] for name in ("warm_hits", "restarts", "branches", "replays", "infrastructure")
            }
            return Metrics(**spreads, statuses=dict(self._statuses), **counts, **of_the_moment)


def _percentiles(samples: list[float]) -> tuple[float, float]:
    if not samples:
        return 0.0, 0.0
    samples.sort()
    last = len(samples) - 1
    return samples[last // 2], samples[last * 99 // 100]


# ------------------------------------------------------------------------------------------------ what sessions take
def memory(pids: Sequence[int]) -> tuple[float, str]:
    """(MiB of these processes together, "pss" or "rss"), from an even sample of them. Ended ones count nothing."""
    if not pids:
        return 0.0, "pss"
    sample = [pids[i * len(pids) // _SAMPLED] for i in range(_SAMPLED)] if len(pids) > _SAMPLED else list(pids)
    kind, total = "pss", 0.0
    for pid in sample:
        amount = _pss(pid)
        if amount is None:
            kind, amount = "rss", _rss(pid)
        total += amount
    return total * len(pids) / len(sample) / (1 << 20), kind


def _pss(pid: int) -> int | None:
    """Bytes, shared pages in parts; None if the process is gone or the host does not show it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            return next((int(line.split()[1]) << 10 for line in f if line.startswith("Pss:")), None)
    except OSError:
        return None


def _rss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


class Uncountable(Exception):
    """There are too many files, or a folder is closed to us."""


def files_size(folder: str, pid: int) -> int:
    """Bytes on disk of a session's files. Raises Uncountable.

    Works by descriptors and follows no link, for the session may change the tree meanwhile. Files without a name count
    if the host shows the session's descriptors.
    """
    return _Walk().size(folder, None, 0) + _nameless(pid)


class _Walk:
    def __init__(self) -> None:
        self.entries = 0

    def size(self, name: str, parent: int | None, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise Uncountable("folders are nested too deeply")
        total = 0
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                for entry in os.listdir(fd):
                    self.entries += 1
                    if self.entries > _MAX_ENTRIES:
                        raise Uncountable(f"there are more than {_MAX_ENTRIES} of them")
                    with contextlib.suppress(FileNotFoundError):
                        info = os.stat(entry, dir_fd=fd, follow_symlinks=False)
                        total += info.st_blocks * 512
                        if stat.S_ISDIR(info.st_mode):
                            total += self.size(entry, fd, depth + 1)
            finally:
                os.close(fd)
        except FileNotFoundError:  # removed meanwhile
            return total
        except OSError as e:
            raise Uncountable(f"a folder cannot be read: {e.strerror}") from e
        return total


def _nameless(pid: int) -> int:
    """Bytes of the open files of a process that no folder lists."""
    total, seen = 0, set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # the host does not show them, or the process has ended
        return 0
    for number in descriptors:
        try:
            info = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and (info.st_dev, info.st_ino) not in seen:
            seen.add((info.st_dev, info.st_ino))
            total += info.st_blocks * 512
    return total
