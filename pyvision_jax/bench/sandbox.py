"""`pyvision bench sandbox`: what a session costs, beside a fresh Python, bubblewrap and a Jupyter kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pyvision_jax.bench import measure, peers
from pyvision_jax.bench.measure import Figure, Task
from pyvision_jax.recipes import results
from pyvision_jax.recipes.run_dir import git_commit
from pyvision_sandbox import Policy, SandboxPool, Session
from pyvision_sandbox.profiles import PROFILES

COMMAND = "pyvision bench sandbox --record"
FRESH, BWRAP, JUPYTER = "fresh Python, same imports", "bubblewrap + Python", "Jupyter kernel"
IDLE = 60  # sessions alive while the memory of one is measured
_TIMEOUT, _GRACE = 0.1, 0.1  # of the cells that overstep it
_SPIN = "while True: pass"
_DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
_HOG = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


@dataclasses.dataclass(frozen=True)
class Options:
    """n: measurements of each kind. sessions: alive at once at the end, 0 to leave that out."""

    n: int = 200
    profile: str = "vision"
    level: str = "namespaces"
    sessions: int = 1000
    with_peers: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]  # peers that could not be run, and what was measured


class _Bench:
    def __init__(self, options: Options, progress: Progress):
        self.options, self.progress = options, progress
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def pool(
        self, warm: int = 0, workers: int | None = None, max_sessions: int | None = None, grace: float = 1.0
    ) -> SandboxPool:
        options = self.options
        return SandboxPool(
            Policy(profile=options.profile, grace=grace), min_level=options.level, max_level=options.level,
            workers=workers, warm=warm, max_sessions=max_sessions, unsafe=options.level == "none",
        )  # fmt: skip

    def measure(self, title: str, tasks: Sequence[Task]) -> None:
        bar = self.progress.add_task(title, total=sum(task.n for task in tasks))
        measure.interleave(tasks, lambda task: self.progress.advance(bar))

    def time(self, name: str, task: Task, **more: object) -> None:
        """The median of a task in milliseconds."""
        low, high = measure.median_interval(task.seconds)
        interval = (low * 1e3, high * 1e3) if low is not None and high is not None else (None, None)
        self.figures.append(Figure(name, task.p50 * 1e3, "ms", task.n, *interval, **more))  # type: ignore[arg-type]

    def peer(self, make: Callable[[], object], name: str) -> bool:
        """Whether a peer can be run here; a note says why not."""
        if not self.options.with_peers:
            return False
        try:
            make()
        except peers.Unavailable as error:
            self.notes.append(f"{name}: {error}")
            return False
        return True

    # ------------------------------------------------------------------------------------------------- the parts
    def starts_and_cells(self, env: dict[str, str]) -> None:
        n, few = self.options.n, max(1, self.options.n // 10)
        modules = peers.importable(PROFILES[self.options.profile].preload)
        others: dict[str, peers.Starter] = {}
        self.peer(lambda: others.update({FRESH: peers.FreshPython(modules, env)}), FRESH)
        self.peer(lambda: others.update({BWRAP: peers.bubblewrap(modules, env)}), BWRAP)
        jupyter: list[peers.Jupyter] = []
        if self.peer(lambda: jupyter.append(peers.Jupyter(modules, env)), JUPYTER):
            others[JUPYTER] = jupyter[0]
        with contextlib.ExitStack() as stack:
            for kernel in jupyter:
                stack.callback(kernel.close)
            pool = stack.enter_context(self.pool())
            cold = Task("cold", n, lambda: _start(pool))
            slow = {name: Task(name, few, other.start) for name, other in others.items()}
            origin = stack.enter_context(pool.session(trusted=True))
            origin.run("x = 1")
            same = Task("branch, same files", n, lambda: _branch(origin, False))
            private = Task("branch, private files", n, lambda: _branch(origin, True))
            self.measure("starts and branches", [cold, same, private, *slow.values()])
            self.start_figures(cold, same, private, slow)

            theirs_mb = measure.pss_mb(jupyter[0].pid) if jupyter else None  # idle, with the same imports

            session = stack.enter_context(pool.session(images={"image": peers.picture()}, trusted=True))
            trivial = Task("trivial", n, lambda: _cell(session, "1 + 1"), block=10)
            crop = Task("crop", n, lambda: _crop(session), block=5)
            tasks = [trivial, crop]
            if jupyter:
                kernel = jupyter[0]
                kernel.run(peers.PICTURE)
                their_trivial = Task("1 + 1", n, lambda: measure.timed(lambda: kernel.run("1 + 1")), block=10)
                their_crop = Task("crop", n, lambda: measure.timed(kernel.crop), block=5)
                tasks += [their_trivial, their_crop]
            self.measure("cells", tasks)
            theirs = {task.name: task for task in tasks[2:]}
            self.time("trivial cell", trivial, **_against(JUPYTER, theirs.get("1 + 1"), trivial, 40))
            self.time("1024x1024 crop to the host", crop, **_against(JUPYTER, theirs.get("crop"), crop, 50))
        self.memory(theirs_mb)

    def start_figures(self, cold: Task, same: Task, private: Task, slow: dict[str, Task]) -> None:
        self.time("cold start", cold, **_against(FRESH, slow.get(FRESH), cold, 80))
        self.figures.append(Figure("cold start p99", cold.p99 * 1e3, "ms", cold.n))
        for name in (BWRAP, JUPYTER):
            if name in slow:
                self.time(f"cold start beside {name}", cold, **_against(name, slow[name], cold))
        for task, most in ((same, 1.5), (private, 3.0)):
            met = task.p50 <= most * cold.p50
            self.time(task.name, task, bar=f"at most {most:g} cold starts", met=met)

    def memory(self, theirs_mb: float | None) -> None:
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(self.pool(max_sessions=IDLE))
            with pool.session(trusted=True):
                pass
            others = measure.below()
            sessions = [stack.enter_context(pool.session(trusted=True)) for _ in range(IDLE)]
            for session in sessions:
                session.run("1 + 1")
            found = [pss for pid in measure.below().keys() - others.keys() if (pss := measure.pss_mb(pid)) is not None]
        if len(found) < IDLE:
            self.notes.append("PSS per idle session: this host does not let it be read")
            return
        value = float(np.median(found))
        ratio = theirs_mb / value if theirs_mb is not None else None
        peer = {"peer_name": JUPYTER, "peer": theirs_mb, "ratio": ratio} if theirs_mb is not None else {}
        self.figures.append(
            Figure("PSS per idle session", value, "MB", IDLE, bar="at most 6 MB", met=value <= 6, **peer)  # type: ignore[arg-type]
        )

    def warm(self) -> None:
        with self.pool(warm=8) as pool:
            task = Task("warm acquire and first cell", self.options.n, lambda: _warm(pool))
            self.measure(task.name, [task])
        self.time(task.name, task)

    def throughput(self) -> None:
        """Sessions that start, run a cell and end, as fast as the host lets them; and the CPU that one takes."""
        n, lanes = self.options.n, 4 * len(os.sched_getaffinity(0))
        with self.pool(workers=lanes) as pool:
            bar = self.progress.add_task("start, cell and end, in parallel", total=n)

            def lane(count: int) -> None:
                for _ in range(count):
                    with pool.session(trusted=True) as session:
                        assert session.run("1 + 1").repr == "2"
                    self.progress.advance(bar)

            threads = [threading.Thread(target=lane, args=(count,)) for count in measure.chunks(n, lanes)]
            cpu, start = measure.cpu_seconds(), time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds, cpu = time.perf_counter() - start, measure.cpu_seconds() - cpu
        self.figures.append(Figure("start + cell + end", n / seconds, "sessions/s", n))
        self.figures.append(Figure("CPU per session, all processes", cpu / n * 1e3, "ms", n))

    def overshoot(self) -> None:
        """How far a cell gets beyond its limit while every core is taken."""
        hogs = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in os.sched_getaffinity(0)]
        try:
            with (
                self.pool(grace=_GRACE) as pool,
                pool.session(trusted=True) as lively,
                pool.session(trusted=True) as deaf,
            ):
                limit = _TIMEOUT + _GRACE
                soft = Task("soft", self.options.n, lambda: _overstep(lively, _SPIN, "soft_timeout", _TIMEOUT))
                hard = Task("hard", self.options.n, lambda: _overstep(deaf, _DEAF, "hard_timeout", limit))
                self.measure("timeouts beside CPU hogs", [soft, hard])
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        for task in (soft, hard):
            name = f"overshoot of a {task.name} timeout, cores taken"
            self.time(name, task, bar="at most 50 ms", met=task.p50 <= 0.05)
            self.figures.append(Figure(f"{name}, p99", task.p99 * 1e3, "ms", task.n))

    def many(self) -> None:
        n = self.options.sessions
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(self.pool(max_sessions=n))
            before = measure.available_mb()
            bar = self.progress.add_task(f"{n:,} sessions at once", total=2 * n)
            sessions = []
            for k in range(n):
                session = stack.enter_context(pool.session(trusted=True))
                session.run(f"k = {k}")
                sessions.append(session)
                self.progress.advance(bar)
            answers = 0
            for k, session in enumerate(sessions):
                answers += session.run("k").repr == str(k)
                self.progress.advance(bar)
            used = before - measure.available_mb()
        bar_text = f"all {n:,} answer, within {6 * n / 1000:g} GB"
        met = answers == n and used <= 6.0 * n
        self.figures.append(Figure(f"memory of {n:,} live sessions", used / 1000, "GB", answers, bar=bar_text, met=met))


def _start(pool: SandboxPool) -> float:
    start = time.perf_counter()
    session = pool.session(trusted=True)
    seconds = time.perf_counter() - start
    session.close()
    return seconds


def _branch(origin: Session, private: bool) -> float:
    start = time.perf_counter()
    branch = origin.branch(private=private)
    seconds = time.perf_counter() - start
    result = branch.run("x += 1\nx")
    assert result.repr == "2", result
    branch.close()
    return seconds


def _cell(session: Session, code: str) -> float:
    start = time.perf_counter()
    result = session.run(code)
    seconds = time.perf_counter() - start
    assert result.repr == "2", result
    return seconds


def _crop(session: Session) -> float:
    start = time.perf_counter()
    result = session.run(peers.CROP)
    seconds = time.perf_counter() - start
    assert result.images[0].shape == (1024, 1024, 3), result
    return seconds


def _warm(pool: SandboxPool) -> float:
    until = time.monotonic() + 10
    while pool.metrics().warm < 1 and time.monotonic() < until:
        time.sleep(0.002)
    start = time.perf_counter()
    session = pool.session(trusted=True)
    session.run("a = 1\na + 1")
    seconds = time.perf_counter() - start
    session.close()
    return seconds


def _overstep(session: Session, code: str, status: str, limit: float) -> float:
    if not session.alive:
        session.run("1")  # starts it anew
    start = time.perf_counter()
    result = session.run(code, timeout=_TIMEOUT)
    seconds = time.perf_counter() - start - limit
    assert result.status == status, result
    return seconds


def _against(name: str, theirs: Task | None, ours: Task, least: float | None = None) -> dict[str, object]:
    bar = f"{least:g}x less than {name}" if least is not None else ""
    if theirs is None:
        return {"bar": bar}
    ratio = theirs.p50 / ours.p50
    met = None if least is None else ratio >= least
    return {"peer_name": name, "peer": theirs.p50 * 1e3, "ratio": ratio, "bar": bar, "met": met}


# ----------------------------------------------------------------------------------------------------------- the whole


def run(options: Options, console: Console) -> Outcome:
    """All parts, one after another; within a part ours and theirs alternate. Raises SandboxUnavailable."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, peers.environment() as env:
        bench = _Bench(options, progress)
        bench.starts_and_cells(env)
        bench.warm()
        bench.throughput()
        bench.overshoot()
        if options.sessions:
            bench.many()
    bench.notes.append(
        f"profile {options.profile}, level {options.level}, load average {os.getloadavg()[0]:.1f} at the end; "
        f"a peer that takes seconds is started once for 10 of ours"
    )
    return Outcome(tuple(bench.figures), tuple(bench.notes))


def print_table(outcome: Outcome, console: Console) -> None:
    table = Table(title="pyvision bench sandbox: medians")
    for column in ("", "sandbox", "95 % interval", "n", "peer", "", "times better", "bar", "met"):
        table.add_column(column, justify="left" if column in ("", "bar") else "right")
    for f in outcome.figures:
        interval = f"{f.low:.2f} - {f.high:.2f}" if f.low is not None and f.high is not None else ""
        peer = f"{results.figure(f.peer)} {f.unit}" if f.peer is not None else ""
        ratio = f"{f.ratio:.0f}x" if f.ratio is not None else ""
        met = "[green]yes[/]" if f.met else "[red]no[/]" if f.met is not None else "not measured" if f.bar else ""
        value = f"{results.figure(f.value)} {f.unit}"
        table.add_row(f.name, value, interval, f"{f.n:,}", peer, f.peer_name, ratio, f.bar, met)
    console.print(table)
    for note in outcome.notes:
        console.print(note, highlight=False)


def record(outcome: Outcome, path: Path, command: str = COMMAND) -> results.Results:
    """Writes docs/results/sandbox.json; `ratio` says how many times less (or more per second) than the peer."""
    rows = []
    for f in outcome.figures:
        if not math.isfinite(f.value):
            continue
        name = f"{f.name} (peer: {f.peer_name})" if f.peer_name else f.name
        rows.append(results.Row(name, f.value, f.unit, f.low, f.high, f.n, f.peer, f.ratio))
    return results.record(path, command, rows, commit=git_commit(), keep=False)
