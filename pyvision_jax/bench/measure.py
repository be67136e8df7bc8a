"""Timing that is fair to both sides: percentiles, interleaved steps, and what a tree of processes uses."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pyvision_sandbox.metrics import memory


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value, and the same of a peer. `bar`: what it must show, in words; `met`: whether it does."""

    name: str
    value: float
    unit: str
    n: int
    low: float | None = None  # 95 % interval
    high: float | None = None
    peer_name: str = ""
    peer: float | None = None
    ratio: float | None = None  # how many times better than the peer (less time or memory, more throughput)
    bar: str = ""
    met: bool | None = None  # None: there is no bar, or it cannot be judged here


@dataclasses.dataclass
class Task:
    """Something measured `n` times. step: does it once and returns the seconds that count.

    block: so many in a row at each turn, where a turn of the others leaves nothing of it in the processor's caches.
    """

    name: str
    n: int
    step: Callable[[], float]
    block: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def p50(self) -> float:
        return float(np.median(self.seconds)) if self.seconds else math.nan

    @property
    def p99(self) -> float:
        return float(np.quantile(self.seconds, 0.99)) if self.seconds else math.nan


def interleave(tasks: Sequence[Task], done: Callable[[Task], None] = lambda task: None) -> None:
    """Runs all steps, those of each task spread evenly over the whole time, so that a busy spell meets all of them."""
    turns = [math.ceil(task.n / task.block) for task in tasks]
    order = sorted(((k + 0.5) / n, place) for place, n in enumerate(turns) for k in range(n))
    for _, place in order:
        task = tasks[place]
        for _ in range(min(task.block, task.n - len(task.seconds))):
            task.seconds.append(task.step())
            done(task)


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def median_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of the median by order statistics, which assume nothing about the distribution; needs 6 values."""
    n = len(values)
    if n < 6:
        return None, None
    ranked = sorted(values)
    half = 0.98 * math.sqrt(n)
    return ranked[max(0, math.floor(n / 2 - half) - 1)], ranked[min(n - 1, math.ceil(n / 2 + half))]


# ----------------------------------------------------------------------------------------------------------- processes


@dataclasses.dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    ticks: int  # of CPU: its own, and of its children that have been waited for


def below(root: int | None = None) -> dict[int, Process]:
    """Every process that comes from `root` [this one], which is not among them."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := read(f"/proc/{entry}/stat")):
            fields = stat.rpartition(")")[2].split()
            process = Process(int(entry), int(fields[1]), sum(int(t) for t in fields[11:15]))
            children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    todo = [root or os.getpid()]
    while todo:
        for process in children.get(todo.pop(), []):
            found[process.pid] = process
            todo.append(process.pid)
    return found


def cpu_seconds() -> float:
    """CPU of this process and of all below it, since they began."""
    ticks = sum(process.ticks for process in below().values())
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def pss_mb(pid: int) -> float | None:
    """Proportional set size: its own memory and its share of what it shares. None where the host does not tell."""
    amount, kind = memory([pid])
    return amount if kind == "pss" else None


def available_mb() -> float:
    """Memory that the system can still give, caches counted in."""
    lines = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines())
    return int(lines["MemAvailable"].split()[0]) / 1024


def read(path: str) -> str:
    """A file of /proc; "" where the process has gone, or does not let itself be read."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def chunks(total: int, parts: int) -> Iterator[int]:
    """`total` split into `parts` whole numbers that differ by one at most."""
    for k in range(parts):
        yield total // parts + (k < total % parts)
