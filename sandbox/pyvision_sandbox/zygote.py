"""The server: exec'd fresh with a fixed environment, preloads once, then forks one session per request.

Started by process.py as `python -c ... zygote.main()`; argv: descriptor of the control socket, JSON configuration.
Control messages are msgpack maps in one datagram each: `{op: spawn, n}` with two descriptors (the session's socket and
the write end of its status pipe) and `{op: reap, n}`. On the status pipe the server tells the session's pid, then its
exit status. A dead session stays unreaped until the pool says `reap`: until then pid and process group are its own.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any

import msgpack

from . import show
from .runner import CHANNEL_FD, Runner
from .wire import HEAD, STATUS, pack

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NUMPY_PIL = (
    "base64", "collections", "datetime", "functools", "itertools", "json", "math", "random", "re", "statistics",
    "tempfile", "numpy", "numpy.fft", "numpy.linalg", "numpy.random", "PIL.Image", "PIL.ImageChops", "PIL.ImageDraw",
    "PIL.ImageEnhance", "PIL.ImageFilter", "PIL.ImageFont", "PIL.ImageOps", "PIL.JpegImagePlugin", "PIL.PngImagePlugin",
)  # fmt: skip
_PRELOAD = {"numpy_pil": _NUMPY_PIL, "vision": (*_NUMPY_PIL, "matplotlib", "matplotlib.pyplot", "matplotlib.patches")}
_libc = ctypes.CDLL(None, use_errno=True)


def preload(profile: str) -> None:
    show.install()
    for name in _PRELOAD[profile]:
        importlib.import_module(name)
    if profile == "vision":
        pyplot = sys.modules["matplotlib.pyplot"]
        pyplot.figure().gca().set_title("x")  # one figure fills the font and layout caches that all sessions share
        pyplot.gcf().canvas.draw()
        pyplot.close("all")
    compile("1", "<warm>", "eval")
    gc.collect()
    gc.freeze()  # the collector must not write into pages shared with the sessions


class Server:
    def __init__(self, control: socket.socket, config: dict[str, Any]):
        self.control, self.config = control, config
        self.sessions: dict[
            int, tuple[int, int, int]
        ] = {}  # n -> pid, pidfd, status pipe; pidfd -1: dead, not yet reaped
        self.parent = os.getppid()
        self.address_space = _mapped_bytes()

    # ------------------------------------------------------------------------------------------------ sessions
    def spawn(self, n: int, sock: int, status: int) -> None:
        try:
            pid = os.fork()
        except OSError as e:
            os.write(status, STATUS.pack(b"E", e.errno or 0))
            os.close(status)
            os.close(sock)
            return
        if pid == 0:
            self._session(n, sock)
        os.close(sock)
        # Both sides set the group: whichever comes second changes nothing. EACCES cannot be: a session never execs.
        os.setpgid(pid, pid)
        self.sessions[n] = (pid, os.pidfd_open(pid), status)
        os.write(status, STATUS.pack(b"P", pid))

    def _session(self, n: int, sock: int) -> None:
        code = 97
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.config["pid"]:
                os._exit(code)  # the server died before the line above
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # children that lose their parent stay below this session
            os.setpgid(0, 0)
            if sock == CHANNEL_FD:  # dup3 refuses to copy a descriptor onto itself
                os.set_inheritable(sock, False)
            else:
                os.dup2(sock, CHANNEL_FD, inheritable=False)
            for name, fd in (("stdout", 1), ("stderr", 2)):
                memory = os.memfd_create(name)
                os.dup2(memory, fd)
            os.closerange(3, CHANNEL_FD)
            os.closerange(CHANNEL_FD + 1, 1 << 20)
            for fd in (1, 2):
                os.set_inheritable(fd, True)
                _append_only(fd)
            home = os.path.join(self.config["scratch"], f"s{n}")
            os.mkdir(home, 0o700)
            os.chdir(home)
            os.environ.update(HOME=home, TMPDIR=home, PWD=home)
            tempfile.tempdir = None  # else it remembers the server's folder
            self._limit()
            signal.set_wakeup_fd(-1)
            gc.enable()
            Runner(self.config["limits"]).serve()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def _limit(self) -> None:
        limits, mb = self.config["limits"], 1 << 20
        cpu = limits["session_cpu"]
        for kind, value in (
            (resource.RLIMIT_AS, self.address_space + limits["memory_mb"] * mb),
            (resource.RLIMIT_FSIZE, limits["tmp_mb"] * mb),
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_NOFILE, 512),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # CPU: the soft limit's SIGXCPU tells the cause; at an equal hard limit the kernel sends a plain SIGKILL.
            hard = value + 5 if kind == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else value
            resource.setrlimit(kind, (value, hard))

    def ended(self, n: int) -> None:
        """A session's process has ended: its group and what it left behind go before its pid is free again."""
        pid, pidfd, status = self.sessions[n]
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self.sessions[n] = (pid, -1, -1)
        _kill_group(pid)
        self._kill_orphans()
        os.close(pidfd)
        with contextlib.suppress(BrokenPipeError):  # the pool has gone away meanwhile
            os.write(status, STATUS.pack(b"X", code))
        os.close(status)

    def _kill_orphans(self) -> None:
        """Children of this process that are no sessions: daemons whose session has ended.

        Killing one may hand its own children over to us, hence the loop. Where the kernel does not list children
        (gVisor) only the process group is killed.
        """
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return
        known = {pid for pid, _, _ in self.sessions.values()}
        for _ in range(1000):
            with open(f"/proc/self/task/{os.getpid()}/children") as f:
                orphans = [pid for pid in map(int, f.read().split()) if pid not in known]
            if not orphans:
                return
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)  # they are our unreaped children: the number is theirs
                os.waitpid(pid, 0)

    def reap(self, n: int) -> None:
        pid, pidfd, _ = self.sessions[n]
        if pidfd >= 0:
            _kill_group(pid)
            select.select([pidfd], [], [])
            self.ended(n)
        del self.sessions[n]
        os.waitpid(pid, 0)

    # ------------------------------------------------------------------------------------------------ the loop
    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        watched: set[int] = set()
        while True:
            fds = {pidfd: n for n, (_, pidfd, _) in self.sessions.items() if pidfd >= 0}
            for fd in watched - fds.keys():
                poll.unregister(fd)
            for fd in fds.keys() - watched:
                poll.register(fd, select.POLLIN)
            watched = set(fds)
            # The time-out is for a pool that died while a forked child of it still holds the control socket.
            for fd, _ in poll.poll(5000):
                if fd in fds:
                    if self.sessions.get(fds[fd], (0, -1, 0))[1] == fd:  # not reaped by a request of this same round
                        self.ended(fds[fd])
                elif fd == self.control.fileno() and not self._request():
                    return
            if os.getppid() != self.parent:
                return

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, 4096, 2)
        if not data:
            return False
        message = msgpack.unpackb(data[HEAD.size :])
        if message["op"] == "spawn":
            self.spawn(message["n"], *fds)
        else:
            self.reap(message["n"])
        return True

    def close(self) -> None:
        for n in list(self.sessions):
            self.reap(n)
        self._kill_orphans()
        shutil.rmtree(self.config["scratch"], ignore_errors=True)


def _append_only(fd: int) -> None:
    import fcntl  # of the server only; a session's first import of it would be paid each time

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def main() -> None:
    config = json.loads(sys.argv[2])
    control = socket.socket(fileno=int(sys.argv[1]))
    config["pid"] = os.getpid()
    os.umask(0o077)
    gc.disable()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    preload(config["limits"]["profile"])
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("the preload left threads running: a fork would lose them")
    server = Server(control, config)
    control.send(pack({"numpy": sys.modules["numpy"].__version__, "pillow": sys.modules["PIL"].__version__}))
    try:
        server.serve()
    finally:
        server.close()
