"""The pool's end of the server and of each session's process: start, signal, end. No message is interpreted here."""

import dataclasses
import errno
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import msgpack

from .policy import PROFILES, Policy, SandboxError
from .wire import HEAD, STATUS, pack

_START_LIMIT = 60.0  # seconds for the preload: matplotlib's font cache may have to be built on a slow disk
_FORK_LIMIT = 20.0


def _module_folders(profile: str) -> list[str]:
    """Where this interpreter finds the modules of the profile, in the order of its own path; nothing is imported."""
    folders = []
    for name in (*PROFILES[profile], "msgpack"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SandboxError(f"the sandbox profile {profile!r} needs the package {name!r}, which is not installed")
        folders.append(os.path.dirname(os.path.dirname(spec.origin)))
    folders += [p for p in sys.path if p.endswith("-packages")]
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = [p for p in sys.path if p in folders]
    return list(dict.fromkeys([*found, *folders, own]))


def remove_tree(path: str) -> None:
    """Remove a folder made by untrusted code: unreadable folders and trees deeper than Python can recurse included."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        null = subprocess.DEVNULL
        for command in (["chmod", "-R", "u+rwx", "--", path], ["rm", "-rf", "--", path]):
            subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False)


class Zygote:
    """One server process. Thread-safe: a datagram to it is one atomic write."""

    def __init__(self, policy: Policy):
        folders = _module_folders(policy.profile)
        self.scratch = tempfile.mkdtemp(prefix="pyvision-sandbox-")
        config = {"scratch": self.scratch, "limits": dataclasses.asdict(policy)}
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": self.scratch, "TMPDIR": self.scratch,
            "MPLBACKEND": "agg", "MPLCONFIGDIR": os.path.join(self.scratch, "matplotlib"),
            "PYTHONHASHSEED": "0",  # the order of a set of strings is the same in every run
            "PYTHONDONTWRITEBYTECODE": "1",
            # One thread before any fork, and one heap: an arena for each thread would count against the memory limit.
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
            "MALLOC_TOP_PAD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20),  # fewer page faults after a fork
        }  # fmt: skip
        # No `site`: neither .pth files nor a sitecustomize run in the server.
        code = f"import sys; sys.path += {folders!r}; from pyvision_sandbox.zygote import main; main()"
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.path.join(self.scratch, "server.log"), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", code, str(theirs.fileno()), json.dumps(config)],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=self.scratch,
            )  # fmt: skip
        self.versions: dict[str, str] | None = None
        self.lock = threading.Lock()
        self.control.settimeout(_START_LIMIT)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Until the preload is done. Raises SandboxError with the server's own last words."""
        with self.lock:
            if self.versions is not None:
                return
            try:
                hello = self.control.recv(4096)
            except OSError as e:
                raise SandboxError(f"the sandbox server did not start: {e}") from e
            if not hello:
                raise SandboxError(f"the sandbox server did not start: {self.last_words()}")
            self.versions = msgpack.unpackb(hello[HEAD.size :])
            self.control.settimeout(_FORK_LIMIT)

    def last_words(self) -> str:
        try:
            with open(os.path.join(self.scratch, "server.log"), "rb") as log:
                return log.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"
        except FileNotFoundError:
            return "its folder is gone"

    def request(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self.control, [pack(message)], list(fds))
        except OSError as e:
            raise SandboxError(f"the sandbox server has ended: {self.last_words()}") from e

    def close(self) -> None:
        """The server sees the end of its control socket, kills and reaps every session and exits."""
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove_tree(self.scratch)


class Process:
    """One session's process. `send_signal` may be called from any thread; the rest from one at a time."""

    def __init__(self, zygote: Zygote, n: int):
        self.zygote, self.n = zygote, n
        self.home = os.path.join(zygote.scratch, f"s{n}")
        self.lock = threading.Lock()
        self.reaped = False
        self.exit_status: int | None = None  # >= 0: exit code, < 0: minus the signal
        self.pid = 0
        self.sock, theirs = socket.socketpair()
        self.status_fd, status_theirs = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                zygote.request({"op": "spawn", "n": n}, (theirs.fileno(), status_theirs))
            finally:
                theirs.close()
                os.close(status_theirs)
            kind, value = self._status(_FORK_LIMIT)
            if kind != b"P":
                raise SandboxError(f"the sandbox server could not fork: {errno.errorcode.get(value, value)}")
            self.pid = value
        except BaseException:
            self.sock.close()
            os.close(self.status_fd)
            raise
        self.sock.setblocking(False)

    def _status(self, limit: float) -> tuple[bytes, int]:
        """The next word of the server about this process. Raises SandboxError if it has none."""
        if not select.select([self.status_fd], [], [], limit)[0]:
            raise SandboxError("the sandbox server does not answer")
        data = os.read(self.status_fd, STATUS.size)
        if len(data) < STATUS.size:
            raise SandboxError(f"the sandbox server has ended: {self.zygote.last_words()}")
        return STATUS.unpack(data)

    def send_signal(self, number: int, group: bool = True) -> None:
        with self.lock:  # until it is reaped its pid and its group are its own
            if self.reaped:
                return
            try:
                if group:
                    os.killpg(self.pid, number)
                else:
                    os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def wait(self, limit: float) -> int | None:
        """Its exit status, or None if it still runs after `limit` s. Raises SandboxError if the server is dead."""
        if self.exit_status is None and select.select([self.status_fd], [], [], limit)[0]:
            self.exit_status = self._status(0)[1]
        return self.exit_status

    def describe_exit(self) -> str:
        status = self.exit_status
        if status is None:
            return "its process is gone"
        if status >= 0:
            return f"its process exited with code {status}"
        try:
            return f"its process was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"its process was ended by signal {-status}"

    def close(self) -> None:
        """Kill the process and all that it started, remove its files. Returns when they are gone; may be repeated."""
        if self.reaped:
            return
        self.send_signal(signal.SIGKILL)
        try:
            deadline = time.monotonic() + _FORK_LIMIT
            while self.wait(max(deadline - time.monotonic(), 0)) is None and time.monotonic() < deadline:
                pass
            with self.lock:
                self.reaped = True
            self.zygote.request({"op": "reap", "n": self.n})
        except SandboxError:
            pass  # the server is dead, and its sessions died with it (parent-death signal)
        finally:
            self.reaped = True
            self.sock.close()
            os.close(self.status_fd)
            remove_tree(self.home)
