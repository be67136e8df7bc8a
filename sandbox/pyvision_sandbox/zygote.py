"""The server: exec'd fresh with a fixed environment, confines itself, preloads once, then forks sessions on request.

Started by process.py as `python -c ... zygote.main()`; argv: descriptors of the control socket and of the helper's
socket, JSON configuration. Control messages are msgpack maps in one datagram each, a request and its answer:
`{op: spawn, n}` with the session's socket -> `{}` with a pidfd; `{op: reap, n}` -> `{code}`. A dead session stays
unreaped until the pool says `reap`: until then its pid and process group are its own.
"""

import contextlib
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
from typing import TYPE_CHECKING, Any

import msgpack

from . import branching, jail, landlock, profiles, seccomp
from . import syscalls as sc
from .confine import Confinement
from .frame import CHANNEL_FD, HEAD, pack

if TYPE_CHECKING:
    from .runner import Runner


class Refused(Exception):
    """This machine cannot do the level. args: mechanism, why."""


class Server:
    def __init__(self, control: socket.socket, config: dict[str, Any]):
        self.control, self.config = control, config
        self.jailed = config["level"] == "namespaces"
        self.sessions: dict[int, int] = {}  # number -> pid
        self.confinement = Confinement(config)
        self.runner: Runner | None = None  # not yet while the confinement is tried

    # ------------------------------------------------------------------------------------------------ sessions
    def spawn(self, n: int, sock: int) -> int:
        """Fork a session; returns its pid. Raises OSError."""
        home = "/tmp" if self.jailed else self.confinement.make_home(n)
        pid = self._clone(n)
        if pid == 0:
            self._session(n, sock, home)
        self.sessions[n] = pid
        return pid

    def _clone(self, n: int) -> int:
        if not self.jailed:
            # Not os.fork() where it can be avoided: the first clone looks up what a branch needs.
            return os.fork() if self.config["level"] == "none" else sc.clone()
        if not self.config["own_ids"]:
            return sc.clone(sc.SESSION_FLAGS)
        host = 1000 + n % 60_000  # each session's namespace belongs to an id of its own
        os.setresgid(-1, host, -1)
        os.setresuid(-1, host, -1)
        pid = -1
        try:
            pid = sc.clone(sc.SESSION_FLAGS)
        finally:
            if pid != 0:
                os.setresuid(-1, 0, -1)
                os.setresgid(-1, 0, -1)
        return pid

    def _session(self, n: int, sock: int, home: str) -> None:
        code = 97
        try:
            self._arrange(n, sock, home)
        except BaseException:
            os.write(CHANNEL_FD, b"E" + traceback.format_exc().encode()[-4000:])
            os._exit(code)
        try:
            if self.runner is not None:
                gc.enable()
                self.runner.begin()
                self.runner.serve()
            code = 0
        finally:
            os._exit(code)

    def _arrange(self, n: int, sock: int, home: str) -> None:
        """Descriptors, identity, limits: from here on nothing of the server but its memory is left."""
        if sock == CHANNEL_FD:  # dup3 refuses to copy a descriptor onto itself
            os.set_inheritable(sock, False)
        else:
            os.dup2(sock, CHANNEL_FD, inheritable=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the runner sets its own
        if self.jailed:
            self.confinement.enter_namespaces(n)
        else:
            sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.config["pid"]:
                os._exit(97)  # the server died before the line above
        if self.config["level"] == "none":
            sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)  # children that lose their parent stay below this session
            os.setpgid(0, 0)
        os.chdir(home)
        branching.fresh_output(home)
        os.environ.update(HOME=home, TMPDIR=home, PWD=home, MPLCONFIGDIR=home)
        tempfile.tempdir = None  # else it remembers the server's folder
        self.confinement.apply(n, home, CHANNEL_FD)
        os.closerange(3, CHANNEL_FD)
        os.closerange(CHANNEL_FD + 1, 1 << 20)

    def reap(self, n: int) -> int | None:
        """The exit code (minus the signal), None if it still runs. Its number and files are free then."""
        pid = self.sessions[n]
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        if not self.jailed:
            _kill_group(pid)
            self._kill_orphans()
        del self.sessions[n]
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _kill_orphans(self) -> None:
        """Children of this process that are no sessions: daemons and branches whose session has ended.

        Killing one may hand its own children over to us, hence the loop. Where the kernel does not list children
        (gVisor) only the process group is killed.
        """
        children = f"/proc/self/task/{os.getpid()}/children"
        if not os.path.exists(children):
            return
        known = set(self.sessions.values())
        for _ in range(1000):
            with open(children) as f:
                orphans = [pid for pid in map(int, f.read().split()) if pid not in known]
            if not orphans:
                return
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)  # they are our unreaped children: the number is theirs
                os.waitpid(pid, 0)

    def trial(self) -> None:
        """A session that confines itself and ends, before the costly preload. Raises Refused with what failed."""
        ours, theirs = socket.socketpair()
        try:
            pid = self.spawn(0, theirs.fileno())
        except OSError as e:
            raise Refused("namespaces of a session" if self.jailed else "a forked session", str(e)) from e
        os.waitpid(pid, 0)
        del self.sessions[0]
        theirs.close()
        said = ours.recv(8192)
        ours.close()
        if not self.jailed:
            shutil.rmtree(os.path.join(self.config["homes"], "s0"), ignore_errors=True)
        if said[:1] not in (b"N", b"-") or b"E" in said[1:2]:
            why = said.lstrip(b"N-E").decode("utf-8", "replace").strip().splitlines() or ["the session ended at once"]
            raise Refused("the confinement of a session", why[-1])

    def make_runner(self) -> None:
        """After the preload; what it imports is not to be in the helper."""
        module = importlib.import_module("pyvision_sandbox.runner")
        runner: Runner = module.Runner(self.config["limits"])
        null, kept = os.open("/dev/null", os.O_RDWR), [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2, CHANNEL_FD):
            os.dup2(null, fd)
        runner.warm()
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
        for fd in (null, CHANNEL_FD, *kept):
            os.close(fd)
        gc.collect()
        gc.freeze()  # the collector must not write into pages shared with the sessions
        self.runner = runner

    # ------------------------------------------------------------------------------------------------ the loop
    def serve(self) -> None:
        watched = [self.control.fileno()]
        if not self.jailed:
            watched.append(os.pidfd_open(os.getppid()))
        while True:
            ready = select.select(watched, [], [])[0]
            if watched[0] not in ready or not self._request():
                return

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, 4096, 1)
        if not data:
            return False
        message = msgpack.unpackb(data[HEAD.size :])
        answer: dict[str, Any] = {}
        answer_fds = []
        try:
            if message["op"] == "spawn":
                answer_fds = [os.pidfd_open(self.spawn(message["n"], fds[0]))]
            else:
                answer["code"] = self.reap(message["n"])
        except OSError as e:
            answer["error"] = str(e)
        for fd in fds:
            os.close(fd)
        socket.send_fds(self.control, [pack(answer)], answer_fds)
        for fd in answer_fds:
            os.close(fd)
        return True

    def close(self) -> None:
        for pid in self.sessions.values():
            _kill_group(pid)
            os.kill(pid, signal.SIGKILL)
        for pid in self.sessions.values():
            os.waitpid(pid, 0)
        self.sessions.clear()
        if not self.jailed:
            self._kill_orphans()
            shutil.rmtree(self.config["scratch"], ignore_errors=True)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reachable_by_others(paths: list[str]) -> bool:
    """Whether a user other than root can get at all of these: an interpreter below a 0700 home cannot be."""
    for path in paths:
        place = os.path.realpath(path)
        while place != "/":
            if not os.stat(place).st_mode & 0o001 and os.path.isdir(place):
                return False
            place = os.path.dirname(place)
    return True


def _enter(config: dict[str, Any], control: int, helper: int) -> None:
    """Take the level's steps that concern the server itself; completes the configuration."""
    level = config["level"]
    config |= {"proc": None, "own_ids": False, "landlock_abi": 0, "gate": False, "no_gate": ""}
    config["no_own_ids"] = "that of the pool: only root can give others"
    if level == "none":
        return
    why = seccomp.available() if sc.supported() else f"system calls of {os.uname().machine} are not known here"
    if why:
        raise Refused("seccomp", why)
    config["no_gate"] = seccomp.listener_available()
    config["gate"] = not config["no_gate"]
    no_landlock = landlock.available()
    config["landlock_abi"] = landlock.abi() if level != "seccomp" and not no_landlock else 0
    if level == "landlock" and no_landlock:
        raise Refused("Landlock", no_landlock)
    if level == "namespaces":
        try:
            config["proc"], config["own_ids"] = jail.enter(
                config["new_root"], config["roots"], config["holes"], config["packages"], [control, helper]
            )
        except jail.JailError as e:
            raise Refused(e.mechanism, e.strerror or str(e)) from e
        _move_paths(config["farm"])
        os.environ.update(HOME="/tmp", TMPDIR="/tmp", MPLCONFIGDIR="/tmp")
        return
    if os.getuid() == 0:
        config["own_ids"] = _reachable_by_others([*config["roots"], *config["packages"].values(), config["farm"]])
        config["no_own_ids"] = "root's, without its rights: others cannot enter the folders of this interpreter"


def _move_paths(farm: str) -> None:
    """The root has changed: packages that are loaded already find their later parts in the new one."""

    def moved(path: str) -> str:
        return jail.SITE + path[len(farm) :] if path == farm or path.startswith(farm + "/") else jail.inside(path)

    sys.path[:] = [moved(p) for p in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        path = vars(module).get("__path__")
        if isinstance(path, list):
            path[:] = [moved(p) for p in path]


def _start_helper(config: dict[str, Any], control: socket.socket, fd: int) -> None:
    """Slim because it is forked before the preload."""
    if config["level"] == "namespaces" and config["gate"] and os.fork() == 0:
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        branching.helper(socket.socket(fileno=fd), config["proc"], config["limits"]["tmp_mb"])
    os.close(fd)


def _mechanisms(config: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(name, on, why) of what confines the sessions, for the report."""
    level, limits, abi = config["level"], config["limits"], config["landlock_abi"]
    jailed, filtered, gate = level == "namespaces", level != "none", config["gate"]
    absent = "not at this level"
    rules = f"ABI {abi}: files{', TCP' if abi >= 4 else ''}{', signals, abstract sockets' if abi >= 6 else ''}"
    fork = "asked of the pool, refused unless it branches the session"
    if not gate:
        fork = f"refused; branches are replayed: {config['no_gate']}" if filtered else "allowed: " + absent
    memory = f"memory +{limits['memory_mb']} MiB, files {limits['tmp_mb']} MiB, CPU {limits['session_cpu']} s"
    return [
        (
            "namespaces",
            jailed,
            "user, pid, mount for each session; net, ipc, uts, cgroup for all" if jailed else absent,
        ),
        ("read-only root", jailed, "interpreter, libraries and the profile's packages" if jailed else absent),
        (
            "landlock",
            abi > 0,
            rules if abi else "not in this kernel" if level in ("landlock", "namespaces") else absent,
        ),
        ("seccomp", filtered, "an allow-list; all other calls are refused" if filtered else absent),
        ("capabilities", filtered, "none, and no new privileges" if filtered else absent),
        ("user ids", config["own_ids"], "one for each session" if config["own_ids"] else config["no_own_ids"]),
        ("fork", gate, fork),
        ("rlimits", True, memory),
        ("environment", True, "fixed variables; no descriptor and no secret of the caller is inherited"),
    ]


def main() -> None:
    control_fd, helper_fd, config = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    control = socket.socket(fileno=control_fd)
    os.umask(0o077)
    gc.disable()
    # If memory runs out the kernel takes a session, not the trainer; later ids may not say so.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")
    try:
        _enter(config, control_fd, helper_fd)
        config["pid"] = os.getpid()
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
        _start_helper(config, control, helper_fd)
        server = Server(control, config)
        if config["level"] != "none":
            server.trial()
    except Refused as e:
        control.send(pack({"refused": list(e.args)}))
        return
    missing = profiles.preload(config["limits"]["profile"])
    server.make_runner()
    if jail.of_self(config["proc"], "status").split("Threads:\t")[1].split()[0] != "1":
        raise RuntimeError("the preload left threads running: a fork would lose them")
    pages = int(jail.of_self(config["proc"], "statm").split()[0])
    server.confinement.address_space = pages * resource.getpagesize()
    hello = {"landlock_abi": config["landlock_abi"], "missing": missing, "mechanisms": _mechanisms(config)}
    control.send(pack(hello))
    try:
        server.serve()
    finally:
        server.close()
