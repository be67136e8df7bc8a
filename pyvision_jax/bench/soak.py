"""A soak of the sandbox: thousands of sessions with ordinary and hostile cells, then a look at what is left of them.

    python -m pyvision_jax.bench.soak                      10,000 sessions, at most 10 minutes
    python -m pyvision_jax.bench.soak --sessions 300 --seed 7

Ends with exit code 1 if a process, file, descriptor or memory was leaked, or if an answer was of no known type, not of
a type that its cell may have, or carried the token of another cell.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import os
import random
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

import numpy as np

from pyvision_jax.bench import measure
from pyvision_jax.bench.soak_cells import AFTER_HARM, HOSTILE, ORDINARY, Kind, source
from pyvision_sandbox import STATUSES, Policy, Result, SandboxError, SandboxPool, Session

SOFT, GRACE = 0.3, 0.2  # seconds
_HOSTILE_SHARE = 0.1
_BRANCHES = 0.03  # of the sessions, at the levels that can
_PATIENCE = 2.0  # seconds for the last processes to go
_WARM_UP = 0.2  # of the sessions, before memory and descriptors are compared
_GROWTH = 1.1
_SLACK_MB = 4.0  # what an allocator may keep, beside the share above
_TOKEN = re.compile(r"tok-[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Usage:
    """Of the pool's process and of its servers. MB of memory of their own; None where the host does not tell."""

    pool_mb: float
    pool_files: int
    servers_mb: float | None
    servers_files: int


@dataclasses.dataclass
class Report:
    level: str
    sessions: int = 0
    cells: int = 0
    seconds: float = 0.0
    statuses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)  # what must not be; empty if the soak has passed
    before: Usage | None = None  # after the first fifth of the sessions
    after: Usage | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {n:,}" for name, n in self.statuses.most_common())
        lines = [
            f"{self.sessions:,} sessions, {self.cells:,} cells in {self.seconds:.0f} s at level {self.level}: {counts}",
            f"after a fifth: {self.before}",
            f"at the end:    {self.after}",
        ]
        shown = [f"FAULT: {fault}" for fault in self.faults[:20]]
        rest = [f"... and {len(self.faults) - 20} more"] if len(self.faults) > 20 else []
        return "\n".join([*lines, *shown, *rest, "failed" if self.faults else "passed"])


class _Soak:
    def __init__(self, pool: SandboxPool, sessions: int, seed: int, deadline: float):
        self.pool, self.sessions, self.seed, self.deadline = pool, sessions, seed, deadline
        self.report = Report(pool.report.level)
        self.lock = threading.Lock()
        self.next = 0
        self.image = np.random.default_rng(seed).integers(0, 256, (96, 128, 3), np.uint8)
        self.can_branch = pool.report.level in ("namespaces", "landlock")

    def lanes(self, count: int, until: int) -> None:
        """Sessions up to number `until`, on so many threads."""
        threads = [threading.Thread(target=self.lane, args=(until,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def lane(self, until: int) -> None:
        while True:
            with self.lock:
                number = self.next
                if number >= until or time.monotonic() > self.deadline:
                    return
                self.next += 1
            try:
                self.session(random.Random(f"{self.seed} {number}"))
            except SandboxError as error:
                self.fault(f"session {number}: the sandbox failed: {error}")

    def session(self, rng: random.Random) -> None:
        hostile = rng.random() < _HOSTILE_SHARE
        with self.pool.session(seed=rng.randrange(1 << 30), images={"image": self.image}, trusted=True) as session:
            kinds = [_choose(rng, ORDINARY) for _ in range(rng.randint(1, 3))]
            if hostile:
                kinds.insert(rng.randrange(len(kinds) + 1), _choose(rng, HOSTILE))
            disturbed = False
            for kind in kinds:
                self.cell(session, kind, disturbed)
                disturbed |= kind in HOSTILE
            if not hostile and self.can_branch and rng.random() < _BRANCHES:
                with session.branch(private=rng.random() < 0.5) as branch:
                    self.cell(branch, _choose(rng, ORDINARY))
                self.cell(session, _choose(rng, ORDINARY))
        with self.lock:
            self.report.sessions += 1

    def cell(self, session: Session, kind: Kind, disturbed: bool = False) -> None:
        """disturbed: an earlier cell may have left the session short of time, memory or streams."""
        token = f"tok-{secrets.token_hex(8)}"
        result = session.run(source(kind, token))
        with self.lock:
            self.report.cells += 1
            self.report.statuses[result.status] += 1
        for fault in faults_of(result, kind, token, disturbed and not result.restarted):
            self.fault(f"{kind.name}: {fault}")

    def fault(self, text: str) -> None:
        with self.lock:
            self.report.faults.append(text)


def _choose(rng: random.Random, kinds: Sequence[Kind]) -> Kind:
    return rng.choices(kinds, [kind.weight for kind in kinds])[0]


def faults_of(result: Result, kind: Kind, token: str, disturbed: bool = False) -> list[str]:
    """What is wrong with the answer to a cell of this kind."""
    faults = []
    if result.status not in STATUSES:
        return [f"the status {result.status!r} does not exist"]
    if result.status not in kind.statuses and not (disturbed and result.status in AFTER_HARM):
        faults.append(f"ended as {result.status}: {result.error}")
    # A cell that catches the interrupt may come to its end: out of time, without an error.
    untold = result.error is None and result.status not in ("ok", "soft_timeout", "cancelled")
    if untold or (result.error is not None and result.status == "ok"):
        faults.append(f"status {result.status} with error {result.error}")
    error = result.error or {}
    text = "\n".join(
        [result.stdout, result.stderr, result.repr or "", str(error.get("traceback")), str(error.get("message"))]
    )
    foreign = set(_TOKEN.findall(text)) - {token}
    if foreign:
        faults.append(f"carries the token of another cell: {foreign}")
    if result.status == "ok" and kind in ORDINARY and token not in result.stdout and not disturbed:
        faults.append("its own token is missing")
    return faults


# -------------------------------------------------------------------------------------------------------- what is left


def _own_mb(pid: int | str) -> float:
    """Anonymous memory that is resident."""
    for line in measure.read(f"/proc/{pid}/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _files(pid: int | str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, PermissionError):
        return 0


def usage(servers: Sequence[int]) -> Usage:
    gc.collect()
    memory = [_own_mb(pid) for pid in servers]
    return Usage(_own_mb("self"), _files("self"), sum(memory) or None, sum(_files(pid) for pid in servers))


def _command_line(pid: int) -> str:
    return measure.read(f"/proc/{pid}/cmdline")


def run(
    sessions: int = 10_000,
    seed: int = 0,
    minutes: float = 10.0,
    lanes: int | None = None,
    min_level: str = "none",
    max_level: str = "namespaces",
) -> Report:
    """The soak at the strongest level between these two that this machine offers."""
    lanes = lanes or 4 * len(os.sched_getaffinity(0))
    start = time.monotonic()
    files_before, scratch_before = _files("self"), _scratch()
    policy = Policy(cell_timeout=SOFT, grace=GRACE)
    pool = SandboxPool(
        policy, min_level, lanes, max_level=max_level, warm=2, max_sessions=2 * lanes, unsafe=min_level == "none"
    )
    try:
        soak = _Soak(pool, sessions, seed, start + 60 * minutes)
        report = soak.report
        ours = measure.below()
        # A session is a clone of its server and shows the same command line, which names the pool's own folder.
        lines = {line for pid in ours if (line := _command_line(pid))}
        soak.lanes(lanes, int(_WARM_UP * sessions))
        servers = _servers(lines)
        report.before = usage(servers)
        soak.lanes(lanes, sessions)
        report.after = usage(servers)
        if not set(servers) <= measure.below().keys():
            report.faults.append("a server has ended")
    finally:
        pool.close()
    del pool
    report.seconds = time.monotonic() - start
    report.faults += _left(lines, files_before, scratch_before)
    report.faults += _growth(report.before, report.after)
    if report.sessions < sessions and not report.faults:
        report.faults.append(f"only {report.sessions:,} of {sessions:,} sessions in {minutes:g} minutes")
    return report


def _servers(lines: set[str]) -> list[int]:
    """The processes below this one that have children or wait for work, and are no sessions: those that start them."""
    found = {pid: process for pid, process in measure.below().items() if _command_line(pid) in lines}
    parents = {process.parent for process in found.values()}
    return [pid for pid in found if pid in parents or found[pid].parent == os.getpid()]


def _scratch() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("pyvision-sandbox-")}


def _left(lines: set[str], files: int, scratch: set[str]) -> list[str]:
    """Processes, folders and descriptors that outlive the pool."""
    until = time.monotonic() + _PATIENCE
    while True:
        pids = [int(e) for e in os.listdir("/proc") if e.isdigit() and _command_line(int(e)) in lines]
        if not pids or time.monotonic() > until:
            break
        time.sleep(0.05)
    faults = [f"{len(pids)} processes are left"] if pids else []
    own = {name for name in _scratch() - scratch if any(name in line for line in lines)}
    faults += [f"folders are left: {sorted(own)}"] if own else []
    gc.collect()
    now = _files("self")
    return [*faults, *([f"{now - files} descriptors are left"] if now > files else [])]


def _growth(before: Usage | None, after: Usage | None) -> list[str]:
    if before is None or after is None:
        return []
    faults = []
    for field in dataclasses.fields(Usage):
        old, new = vars(before)[field.name], vars(after)[field.name]
        slack = _SLACK_MB if field.name.endswith("_mb") else 8
        if old is not None and new is not None and new > _GROWTH * old + slack:
            faults.append(f"{field.name} grew from {old:.1f} to {new:.1f}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Runs thousands of sandbox sessions and looks for what is left of them."
    )
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="end after so long, which is a fault")
    parser.add_argument("--lanes", type=int, default=None, help="sessions at a time [4 for each core]")
    parser.add_argument("--min-level", default="landlock", help="weakest isolation to accept")
    parser.add_argument("--max-level", default="namespaces", help="try this level first")
    args = parser.parse_args()
    report = run(args.sessions, args.seed, args.minutes, args.lanes, args.min_level, args.max_level)
    print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
