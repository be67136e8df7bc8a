"""What a level promises, tried inside a real session: cells over the real protocol, and looks from the host.

An attempt that a level promises to refuse and does not makes the level unusable; attempts beyond its promise are made
as well, so that the report tells what is open.
"""

import dataclasses
import os
import time
from collections.abc import Iterator

from .attempts import CELLS, CHILD, PROGRAM, SPIN, SPUN, START
from .bait import Bait, baited
from .policy import LEVELS, Policy, Probe
from .result import Result
from .session import Session

_LIMIT = 10.0  # seconds for one attempt on a busy machine; a few milliseconds are usual
_SOFT = 0.03  # seconds: the time limit of the cell that is interrupted
_LOOK = 0.02  # seconds during which a stopped session must use no CPU
_STOP = 1.0  # seconds until it must be stopped
# Fields of /proc/PID/status, and what is left of them without zeros. gVisor does not show all.
_STATUS = {"CapInh": "", "CapPrm": "", "CapEff": "", "CapAmb": "", "Seccomp": "2", "NoNewPrivs": "1"}


def run(session: Session, policy: Policy, level: str) -> tuple[Probe, ...]:
    """Every probe, in a fresh session at `level`. Raises SandboxError if the session cannot be used at all."""
    with baited() as bait:
        return tuple(_timed(session, policy, level, bait))


def _timed(session: Session, policy: Policy, level: str, bait: Bait) -> Iterator[Probe]:
    last = time.perf_counter()
    for probe, since in _attempts(session, policy, level, bait):
        promised = probe.required and LEVELS.index(level) >= LEVELS.index(since)
        now = time.perf_counter()
        yield dataclasses.replace(probe, required=promised, ms=round((now - last) * 1e3, 2))
        last = now


def _attempts(session: Session, policy: Policy, level: str, bait: Bait) -> Iterator[tuple[Probe, str]]:
    """(probe, the weakest level that promises it); `required` False: this policy or this kernel takes it out."""
    session.run(f"{START}bait = {bait.inside(policy)!r}", _LIMIT)
    allowed = {PROGRAM: policy.allow_exec, CHILD: policy.allow_fork}
    for name, since, code, judge in CELLS:
        result = session.run(code, _LIMIT)
        taken = bait.taken()
        held = judge(result) and not taken
        yield Probe(name, held, "; ".join([_told(result), *taken]), not allowed.get(code, False)), since
    if policy.max_images:
        yield _pictures(session), "none"
    yield _time_limit(session), "none"
    yield _identity(session, level), "seccomp"
    yield _freezing(session, policy), "none"


def _pictures(session: Session) -> Probe:
    images = session.run("Image.new('RGB', (3, 2), 'red')", _LIMIT).images
    held = len(images) == 1 and images[0].shape == (2, 3, 3) and images[0][0, 0].tolist() == [255, 0, 0]
    return Probe("pictures come back", held, "a red one of 3x2" if held else f"{len(images)} came back")


def _time_limit(session: Session) -> Probe:
    start = time.perf_counter()
    result = session.run("time.sleep(60)", _SOFT)
    late = (time.perf_counter() - start - _SOFT) * 1e3
    held = result.status == "soft_timeout" and session.run("probe", _LIMIT).repr == "41"
    what = f"{late:.1f} ms after its limit" if held else f"{result.status}, or the variables are gone"
    return Probe("a cell that hangs is interrupted, variables are kept", held, what)


def _identity(session: Session, level: str) -> Probe:
    """As the host's kernel sees the session's process."""
    name = "no capabilities, seccomp on, no new privileges"
    if session.process is None:
        return Probe(name, False, "the session has died")
    try:
        with open(f"/proc/{session.process.pid}/status") as f:
            status = {key: value.strip() for key, _, value in (line.partition(":") for line in f)}
    except OSError as e:  # /proc is mounted with hidepid
        return Probe(name, False, f"the host hides it: {e.strerror}", required=False)
    shown = {key: status[key] for key in _STATUS if key in status}
    wrong = [f"{key} is {value}" for key, value in shown.items() if value.strip("0") != _STATUS[key]]
    ids = status["Uid"].split()
    if level == "namespaces" and os.getuid() == 0 and "0" in ids:
        wrong.append("it is root of the host")
    held = not wrong and "Seccomp" in shown
    return Probe(name, held, ", ".join(wrong) or f"uid {ids[0]} of the host; {', '.join(shown)} as they must be")


def _freezing(session: Session, policy: Policy) -> Probe:
    """With a thread that spins: stopped, and no CPU from then on."""
    name = "a session that waits uses no CPU"
    session.run(SPIN, _LIMIT)
    if session.process is None:
        return Probe(name, False, "the session has died")
    pid = session.process.pid
    clock = (~pid << 3) | 2  # the CPU clock of another process: clock_getcpuclockid(3)
    state, spent, deadline = "", 1e3, time.monotonic() + _STOP
    try:
        # On a busy machine the stop reaches a thread a while after it was sent.
        while policy.freeze and (state != "T" or spent >= 1) and time.monotonic() < deadline:
            before = time.clock_gettime(clock)
            time.sleep(_LOOK)
            spent = (time.clock_gettime(clock) - before) * 1e3
            with open(f"/proc/{pid}/stat") as f:
                state = f.read().rpartition(")")[2].split()[0]
    except OSError as e:
        return Probe(name, False, f"this kernel does not tell: {e.strerror}", required=False)
    finally:
        session.run(SPUN, _LIMIT)
    what = f"{spent:.2f} ms in {_LOOK * 1e3:g} ms, state {state}" if policy.freeze else "switched off"
    return Probe(name, state == "T" and spent < 1, what, policy.freeze)


def _told(result: Result) -> str:
    """What became of a cell, in a few words."""
    if result.error is not None:
        return f"{result.error['name']}: {result.error['message']}"[:160]
    return {"[]": "refused", "-1": "refused"}.get(result.repr or "", result.repr or result.status)[:160]
