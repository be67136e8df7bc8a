"""Runs one case: fixtures of its own, its steps, its verdict, and what must hold after every case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyvision_sandbox import Policy, Result, SandboxError, SandboxPool, Session
from pyvision_sandbox.process import Process

from .case import BROKEN, PRELUDE, VERDICTS, Case, Step

MAX_GROWTH = 200 << 20  # bytes that a case may add to the pool's own memory
GONE_WITHIN = 2.0  # seconds after `close` until no process of a session exists
_HOST_FOLDERS = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/dev",
    "/etc",
    "/usr",
    "/usr/lib",
    "/usr/bin",
    "/run",
    "/root",
    "/home",
)
_ACCELERATORS = ("nvidia*", "dri/*", "accel*", "vfio/*", "infiniband/*")
_ATTEMPT = re.compile(r"^@(worked|blocked) (.*?): (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Places:
    """Folders made by the launcher, all below one that is removed in the end."""

    base: str
    home: str  # HOME of the pool's process: keys and tokens lie there
    public: str  # anyone may write here
    scratch: str  # TMPDIR of the pool's process: empty but for what the pool makes
    repo: str  # the trainer's checkout
    canary: str  # the token in the pool's environment


class Listeners:
    """Sockets on the host that nobody may reach; what did is counted."""

    def __init__(self, public: str, tag: str):
        self.path, self.abstract = f"{public}/{tag}.sock", tag
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.sockets = [self.tcp, self.udp]
        for address in (f"\0{tag}", self.path):
            for kind, end in ((socket.SOCK_STREAM, ""), (socket.SOCK_DGRAM, ".dgram")):
                unix = socket.socket(socket.AF_UNIX, kind)
                unix.bind(address + end)
                if kind == socket.SOCK_STREAM:
                    unix.listen()
                self.sockets.append(unix)
        for path in (self.path, f"{self.path}.dgram"):
            os.chmod(path, 0o777)

    def count(self) -> int:
        reached = 0
        for s in self.sockets:
            s.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    if s.type == socket.SOCK_STREAM:
                        s.accept()[0].close()
                    else:
                        s.recv(100)
                    reached += 1
        return reached

    def close(self) -> None:
        for s in self.sockets:
            s.close()


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent's pid, state) of every process of the machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found[int(name)] = int(fields[1]), fields[0]
    return found


def descendants(root: int, but: int = 0) -> set[int]:
    """The living processes below `root`. What loses its parent comes to the worker, which is a subreaper."""
    table = processes()
    below: set[int] = set()
    grown = {root}
    while grown:
        grown = {pid for pid, (parent, _) in table.items() if parent in grown and pid != but}
        below |= grown
    return {pid for pid in below if table[pid][1] != "Z"}


def files_below(path: str) -> set[str]:
    return {os.path.join(folder, name) for folder, names, files in os.walk(path) for name in (*names, *files)}


def wait_until(holds: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def package_folders() -> list[str]:
    """Where packages are installed: for this process, for the interpreter that it builds on, and for the system's."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    others = (f"{sys.base_prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages")
    return list(dict.fromkeys(p for p in (*sys.path, *others) if p.endswith("-packages") and os.path.isdir(p)))


def host_process(session: Session) -> Process:
    """The pool's end of the session's process."""
    if session.process is None:
        raise SandboxError("the session has no process")
    return session.process


class Trial:
    """One case on one pool. `complaints` holds what was wrong; empty: the verdict held."""

    def __init__(self, case: Case, level: str, pool: SandboxPool, policy: Policy, places: Places, open_pool: Callable):
        self.case, self.level, self.pool, self.policy, self.places = case, level, pool, policy, places
        self.open_pool = open_pool
        self.complaints: list[str] = []
        self.results: list[Result] = []  # of the steps
        self.seen: list[Result] = []  # everything that came out of any session
        self.tag = f"corpus-{secrets.token_hex(6)}"  # part of the name of each file that the code makes outside
        self.token = f"CANARY-{secrets.token_hex(16)}"
        self.names: dict[str, Any] = {}
        self.core_limit = ""

    def expect(self, holds: bool, complaint: str) -> None:
        if not holds:
            self.complaints.append(complaint[:600])

    @property
    def result(self) -> Result:
        return self.results[-1]

    # ------------------------------------------------------------------------------------------------ sessions
    def session(self, pool: SandboxPool | None = None) -> Session:
        # Below `landlock` a pool runs only what its caller calls trusted.
        return (pool or self.pool).session(seed=0, trusted=self.level in ("seccomp", "none"))

    def start(self, more: str = "") -> Session:
        session = self.session()
        names = "\n".join(f"{name} = {value!r}" for name, value in self.names.items())
        self._prelude = f"{PRELUDE}\n{names}\n"
        result = session.run(self._prelude + more, timeout=20)
        self.expect(result.ok, f"a session cannot begin: {result.status} {result.error}")
        return session

    def run(self, code: str, timeout: float = 10.0) -> Result:
        result = self.main.run(code, timeout=timeout)
        self.seen.append(result)
        return result

    def host_status(self) -> dict[str, str]:
        lines = Path(f"/proc/{host_process(self.main).pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def cpu_ticks(self) -> int:
        """CPU of the session's process and its children, in clock ticks."""
        stat = Path(f"/proc/{host_process(self.main).pid}/stat").read_text()
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))

    # ------------------------------------------------------------------------------------------------ the case
    def go(self) -> None:
        """Run it. Fills `complaints`."""
        before = descendants(os.getpid())
        kept_files, memory = files_below(self.places.scratch), resident_bytes()
        victim = subprocess.Popen(["sleep", "300"], stdin=subprocess.DEVNULL)
        listeners = Listeners(self.places.public, self.tag)
        self.secret = f"{self.places.public}/{self.tag}.secret"
        try:
            self._plant(self.secret)
            self._name_things(victim.pid, listeners, before)
            self.sibling = self.start("keep = 41\nopen('diary.txt', 'w').write('dear diary')")
            self.names |= {
                "SIBLING": host_process(self.sibling).pid,
                "SIBLING_HOME": host_process(self.sibling).home or "/none",
            }
            self.main = self.start()
            with contextlib.closing(self.sibling), contextlib.closing(self.main):
                self._steps()
                self._judge()
                if self.case.check is not None:
                    self.case.check(self)
                self._others(victim, listeners)
            self._left_behind(before, kept_files, victim.pid)
            self.expect(resident_bytes() - memory < MAX_GROWTH, "the pool's own memory grew")
            with self.session() as session:
                result = session.run("1 + 1", timeout=20)
                self.expect(result.repr == "2", f"the pool is not usable: {result.status} {result.error}")
        finally:
            victim.kill()
            victim.wait()
            listeners.close()
            for path in Path(self.places.public).iterdir():
                path.unlink()

    def _plant(self, secret: str) -> None:
        paths = [
            Path(secret),
            *(Path(self.places.home, n) for n in (".ssh/id_ed25519", ".netrc", ".cache/huggingface/token")),
        ]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.token)
            path.chmod(0o644)

    def _name_things(self, victim: int, listeners: Listeners, before: set[int]) -> None:
        server = next(
            (pid for pid, (parent, _) in processes().items() if parent == os.getpid() and pid in before), os.getpid()
        )
        try:
            real_home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a uid made for this test
            real_home = self.places.home
        self.names |= {
            "PORT": listeners.port, "ABSTRACT": listeners.abstract, "SOCKET": listeners.path, "SECRET": self.secret,
            "VICTIM": victim, "POOL": os.getpid(), "SERVER": server, "SIBLING": victim, "SIBLING_HOME": "/none",
            "HOST_HOME": self.places.home, "REAL_HOME": real_home, "REPO": self.places.repo,
            "PUBLIC": self.places.public,
            "SCRATCH": next((str(p) for p in Path(self.places.scratch).iterdir()), self.places.scratch),
            "SITE": package_folders(), "TAG": self.tag, "MARK": f"4{victim}.25",
            "PREFIXES": list(dict.fromkeys([sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)])),
            "DEVICES": [str(path) for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern)],
        }  # fmt: skip

    def _steps(self) -> None:
        steps = [step if isinstance(step, Step) else Step(step) for step in self.case.steps]
        limits = Path(f"/proc/{host_process(self.main).pid}/limits").read_text().splitlines()
        self.core_limit = next(line.split()[4] for line in limits if line.startswith("Max core file"))
        for i, step in enumerate(steps):
            if step.who == "new":
                with self.start() as session:
                    result = session.run(step.code, timeout=step.timeout)
            else:
                session = self.sibling if step.who == "sibling" else self.main
                result = session.run(step.code, timeout=step.timeout)
            self.results.append(result)
            self.seen.append(result)
            if i < len(steps) - 1:
                self.expect(result.status in step.status, f"step {i} ends as {result.status}: {result.error}")

    def _judge(self) -> None:
        statuses, lives = VERDICTS[self.case.verdict_at(self.level)]
        steps = [step if isinstance(step, Step) else Step(step) for step in self.case.steps]
        self.expect(
            self.result.status in statuses or self.result.status in steps[-1].status,
            f"ends as {self.result.status}, not {' or '.join(statuses)}: {self.result.error}",
        )
        made = 0
        for result in self.results:
            for word, name, what in _ATTEMPT.findall(result.stdout):
                made += 1
                broken = word == "blocked" and what.split(":")[0] in BROKEN
                self.expect(not broken, f"the snippet is broken: {name}: {what}")
                self.expect(word == "blocked" or name.startswith("own "), f"worked: {name}: {what}")
            self.expect(
                not result.dropped.get("stdout"), "the list of attempts was cut"
            ) if self.case.attempts else None
        self.expect(made >= self.case.attempts, f"{made} attempts were made, {self.case.attempts} are right")
        if lives and all(step.who == "main" for step in steps):
            self.expect(self.result.session_alive, "the session is lost")
        if lives:
            self.expect(not any(result.restarted for result in self.results), "the session was lost in between")
            self.expect(self.run("kept + 1").repr == "42", "the variables are lost")
        elif lives is not None:
            self.expect(not self.result.session_alive, "the session lives on")
            after = self.run("'kept' in globals()")
            self.expect(
                after.restarted and after.repr == "False", f"the next call does not say that it starts anew: {after}"
            )
            # The case's own check may need the helpers again.
            self.main.run(self._prelude, timeout=20)

    # ------------------------------------------------------------------------------------------------ after each
    def _others(self, victim: subprocess.Popen, listeners: Listeners) -> None:
        answer = self.sibling.run("keep + 1", timeout=10)
        self.seen.append(answer)
        self.expect(answer.repr == "42" and not answer.restarted, f"the sibling answers {answer.repr}, {answer.error}")
        self.expect(victim.poll() is None, "the victim is dead")
        reached = listeners.count()
        self.expect(reached == 0, f"{reached} connections reached the host")
        for result in self.seen:
            text = json.dumps(result.to_dict(), default=repr)
            self.expect(self.token not in text and self.places.canary not in text, "CANARY is in the output")

    def _left_behind(self, before: set[int], kept_files: set[str], victim: int) -> None:
        def gone() -> bool:
            self._left = descendants(os.getpid(), but=victim) - before
            return not self._left

        def clean() -> bool:
            self._files = {path for path in files_below(self.places.scratch) - kept_files if not path.endswith(".log")}
            return not self._files

        self.expect(wait_until(gone, GONE_WITHIN), f"processes are left: {self._left}")
        self.expect(wait_until(clean, GONE_WITHIN), f"files are left: {sorted(self._files)[:5]}")
        for folder in (*_HOST_FOLDERS, *self.names["SITE"], *self.names["PREFIXES"]):
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if self.tag in name:
                        self.complaints.append(f"left on the host: {folder}/{name}")
                        os.unlink(f"{folder}/{name}")
