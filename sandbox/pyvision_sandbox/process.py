"""The pool's end of the server and of each session's process: start, signal, branch, end. No answer is read here."""

import contextlib
import dataclasses
import errno
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
from typing import Any

import msgpack

from . import cgroup, wire
from . import syscalls as sc
from .farm import survey
from .frame import HEAD, pack
from .gate import Gate
from .policy import BranchUnsafe, LevelUnavailable, Policy, SandboxError, SandboxUnavailable

_START_LIMIT = 60.0  # seconds for the preload: matplotlib's font cache may have to be built on a slow disk
_CALL_LIMIT = 20.0
_THREAD_WAIT = 0.1  # seconds for a thread that was joined to end quite
_UNKNOWN = 256  # the exit status of a branch is its frozen parent's to know


def remove_tree(path: str) -> None:
    """Remove a folder made by untrusted code: unreadable folders and trees deeper than Python can recurse included.

    No link is followed, neither below `path` nor at `path` itself, where the code may have put one.
    """
    with contextlib.suppress(OSError):
        os.unlink(path)  # a link, or a file: a folder is refused
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        null = subprocess.DEVNULL
        # chmod -R leaves links below its argument alone; the argument is a folder, and its owner has ended.
        for command in (["chmod", "-R", "u+rwx", "--", path], ["rm", "-rf", "--", path]):
            subprocess.run(command, stdin=null, stdout=null, stderr=null, check=False)


class Zygote:
    """One server process at one level. Thread-safe: requests to it wait for each other."""

    def __init__(self, policy: Policy, level: str):
        self.policy, self.level = policy, level
        self.cgroups = cgroup.find()
        if policy.allow_fork and level != "none" and not self.cgroups:
            raise SandboxUnavailable(
                "allow_fork needs a control group that this process may make, for all other limits hold for each "
                f"process by itself: {self.cgroups.why}"
            )
        farm = survey(policy.profile, programs=policy.allow_exec)
        self.scratch = tempfile.mkdtemp(prefix="pyvision-sandbox-")
        os.chmod(self.scratch, 0o711)  # sessions may have ids of their own, and reach only what they know by name
        place = {name: os.path.join(self.scratch, name) for name in ("root", "homes", "farm", "tmp")}
        for name in ("root", "homes", "tmp"):
            os.mkdir(place[name], 0o711)
        farm.plant(place["farm"])
        config = {
            "level": level, "limits": dataclasses.asdict(policy), "scratch": self.scratch, "new_root": place["root"],
            "homes": place["homes"], "farm": place["farm"], "roots": farm.roots, "holes": farm.holes,
            "packages": farm.packages,
        }  # fmt: skip
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": place["tmp"], "TMPDIR": place["tmp"],
            "MPLBACKEND": "agg", "MPLCONFIGDIR": place["tmp"],
            "PYTHONHASHSEED": "0",  # the order of a set of strings is the same in every run
            "PYTHONDONTWRITEBYTECODE": "1",
            # One thread before any fork, and one heap: an arena for each thread would count against the memory limit.
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
            "MALLOC_TOP_PAD_": str(16 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20),  # fewer page faults after a fork
        }  # fmt: skip
        # No `site`: neither .pth files nor a sitecustomize run in the server. The package is named without running its
        # __init__, which would load the caller's side.
        code = (
            f"import sys, types; sys.path.append({place['farm']!r}); package = types.ModuleType('pyvision_sandbox'); "
            f"package.__path__ = [{os.path.join(place['farm'], 'pyvision_sandbox')!r}]; "
            "sys.modules['pyvision_sandbox'] = package; from pyvision_sandbox.zygote import main; main()"
        )
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.helper, helpers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, helpers, open(os.path.join(self.scratch, "server.log"), "wb") as log:
                fds = [theirs.fileno(), helpers.fileno()]
                self.process = subprocess.Popen(
                    [sys.executable, "-S", "-s", "-P", "-c", code, *map(str, fds), json.dumps(config)],
                    env=environment, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd=self.scratch,
                )  # fmt: skip
        except BaseException:
            self.control.close()
            self.helper.close()
            remove_tree(self.scratch)
            raise
        self.gate = Gate()
        self._facts: dict[str, Any] | None = None
        self._lock, self._helper_lock = threading.Lock(), threading.Lock()
        self.control.settimeout(_START_LIMIT)
        self.helper.settimeout(_CALL_LIMIT)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> dict[str, Any]:
        """What the server found out, once the preload is done.

        Raises LevelUnavailable if this machine cannot do the level, SandboxError with the server's own last words.
        """
        with self._lock:
            if self._facts is not None:
                return self._facts
            try:
                hello = self.control.recv(1 << 16)
            except OSError as e:
                raise SandboxError(f"the sandbox server did not start: {e}") from e
            if not hello:
                raise SandboxError(f"the sandbox server did not start: {self.last_words()}")
            facts = msgpack.unpackb(hello[HEAD.size :])
            if "refused" in facts:
                raise LevelUnavailable(self.level, *facts["refused"])
            groups = self.cgroups
            held = (
                f"{groups.version}: memory and processes of a session and all that it starts" if groups else groups.why
            )
            facts["mechanisms"].append(["cgroup", bool(groups), held])
            self._facts = facts
            self.control.settimeout(_CALL_LIMIT)
            return facts

    def last_words(self) -> str:
        try:
            with open(os.path.join(self.scratch, "server.log"), "rb") as log:
                return log.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"
        except FileNotFoundError:
            return "its folder is gone"

    def call(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> tuple[dict[str, Any], list[int]]:
        """One request and its answer. Raises SandboxError if there is none or it says so."""
        with self._lock:
            try:
                socket.send_fds(self.control, [pack(message)], list(fds))
                data, answer_fds, _, _ = socket.recv_fds(self.control, 8192, 1)
            except ConnectionError:
                data, answer_fds = b"", []
            except OSError as e:
                self.process.kill()  # an answer may still come: the stream is out of step
                raise SandboxError(f"the sandbox server does not answer ({e}): {self.last_words()}") from e
        if not data:
            raise SandboxError(f"the sandbox server has ended: {self.last_words()}")
        answer = msgpack.unpackb(data[HEAD.size :])
        if "error" in answer:
            raise SandboxError(f"the sandbox server could not {message['op']}: {answer['error']}")
        return answer, answer_fds

    def give_files(self, parent: int, child: int) -> None:
        """Have the helper prepare a branch (pidfds) with files of its own. Raises BranchUnsafe if it cannot."""
        with self._helper_lock:
            try:
                socket.send_fds(self.helper, [b"f"], [parent, child])
                answer = msgpack.unpackb(self.helper.recv(4096)[HEAD.size :])
            except (OSError, ValueError) as e:
                raise SandboxError(f"the sandbox's helper does not answer: {e}") from e
        if "error" in answer:
            raise BranchUnsafe(f"the files could not be copied: {answer['error']}")

    def close(self) -> None:
        """The server sees the end of its control socket, and ends with every session."""
        self.control.close()
        self.helper.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.gate.close()
        self.cgroups.close()
        remove_tree(self.scratch)


class Process:
    """One session's process. `send_signal` may be called from any thread; the rest from one at a time."""

    def __init__(self, zygote: Zygote, n: int):
        self.zygote, self.n = zygote, n
        self._lock = threading.Lock()
        self._collected = self._reaped = False
        self.exit_status: int | None = None  # >= 0: exit code, < 0: minus the signal
        self.gate_fd: int | None = None
        self.group: cgroup.Group | None = None
        self.home = None if zygote.level == "namespaces" else os.path.join(zygote.scratch, "homes", f"s{n}")
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                _, (self.pidfd,) = zygote.call({"op": "spawn", "n": n}, (theirs.fileno(),))
        except BaseException:
            self.sock.close()
            raise
        self.pid = _host_pid(self.pidfd)
        self.sock.setblocking(False)
        try:
            self._limit_group()  # while it confines itself
            self._await_confined()
        except BaseException:
            self.close()
            raise

    @classmethod
    def _branched(cls, parent: "Process", sock: socket.socket, pidfd: int) -> "Process":
        self = object.__new__(cls)
        self.zygote, self.n, self.home = parent.zygote, 0, parent.home
        self._lock, self._collected, self._reaped = threading.Lock(), False, False
        self.exit_status, self.gate_fd, self.group = None, parent.gate_fd, None
        self.sock, self.pidfd, self.pid = sock, pidfd, _host_pid(pidfd)
        return self

    def _await_confined(self) -> None:
        """Its first word: it has confined itself, and here is the descriptor of its questions."""
        if not _readable(self.sock.fileno(), _CALL_LIMIT):
            raise SandboxError("a session's process does not answer")
        try:
            word, fds, _, _ = socket.recv_fds(self.sock, 1, 1)
            said = b"" if word in (b"N", b"-") else self.sock.recv(4096)
        except OSError as e:
            raise SandboxError(f"a session's process ended at its start: {e}") from e
        if word == b"N" and fds:
            self.gate_fd = fds[0]
            self.zygote.gate.watch(fds[0])
        elif word != b"-":
            raise SandboxError(f"a session could not confine itself: {said.decode('utf-8', 'replace') or 'it ended'}")

    def _limit_group(self) -> None:
        groups, policy = self.zygote.cgroups, self.zygote.policy
        if not groups or self.zygote.level == "none":
            return
        memory = (policy.memory_mb + policy.tmp_mb + 16) << 20
        self.group = groups.create(f"pyvision-{os.getpid()}-{self.pid}", memory, policy.threads + 64)
        self.group.add(self.pid)

    # ------------------------------------------------------------------------------------------------ signals, end
    def send_signal(self, number: int, group: bool = True) -> None:
        """group: to what the session has started as well, which only `allow_fork` and the level `none` permit."""
        with self._lock:  # until it is reaped its pid and its group are its own
            if self._reaped:
                return
            with contextlib.suppress(ProcessLookupError):
                if group and self.n and (self.zygote.level == "none" or self.zygote.policy.allow_fork):
                    os.killpg(self.pid, number)
                signal.pidfd_send_signal(self.pidfd, number)

    @property
    def ended(self) -> bool:
        return _readable(self.pidfd, 0)

    def wait(self, limit: float) -> int | None:
        """Its exit status, or None if it still runs after `limit` s. Raises SandboxError if the server is dead."""
        if not self._collected and _readable(self.pidfd, limit):
            self._collected = True
            if self.group is not None:
                self.group.kill()
            self.exit_status = self.zygote.call({"op": "reap", "n": self.n})[0]["code"] if self.n else _UNKNOWN
            with self._lock:
                self._reaped = True
        return self.exit_status

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel ended it at its group's memory limit."""
        return self.group is not None and self.group.oom_kills() > 0

    def describe_exit(self) -> str:
        status = self.exit_status
        if status is None or status == _UNKNOWN:
            return "its process is gone"
        if status >= 0:
            return f"its process exited with code {status}"
        try:
            return f"its process was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"its process was ended by signal {-status}"

    def close(self) -> None:
        """Kill the process and all that it started, remove its files. Returns when they are gone; may be repeated."""
        if self.sock.fileno() < 0:
            return
        self.send_signal(signal.SIGKILL)
        try:
            self.wait(_CALL_LIMIT)
        except SandboxError:
            pass  # the server is dead, and its sessions died with it (parent-death signal, pid namespace)
        finally:
            with self._lock:
                self._reaped = True
                self.sock.close()
                os.close(self.pidfd)
            if self.group is not None:
                self.group.remove()
            if self.n and self.home is not None:
                remove_tree(self.home)

    # ------------------------------------------------------------------------------------------------ branches
    def branch(self, private: bool, deadline: float) -> "Process":
        """A second process that goes on from here with the same variables; both are stopped afterwards.

        private: with namespaces and a copy of the files of its own (level `namespaces`), else in the same files. The
        session must be between two cells. Raises BranchUnsafe if that is not possible here, SandboxError if it failed;
        after a failure in the middle this process may be gone too.
        """
        self._check_branchable(private)
        assert self.gate_fd is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        nonce = wire.new_nonce()
        limit = self.zygote.policy.max_header
        self.send_signal(signal.SIGCONT)
        try:
            self._await_one_thread()
            flags = sc.FORK_FLAGS | (sc.SESSION_FLAGS if private else 0)
            request = pack({"op": "branch", "nonce": nonce, "private": private})
            with theirs, self.zygote.gate.grant(self.gate_fd, self.pid, flags):
                wire.send(self.sock, self.pidfd, [request], deadline)
                socket.send_fds(self.sock, [b"F"], [theirs.fileno()])
                reader = wire.Reader(self.sock, self.pidfd, deadline, deadline, lambda: None)
                answer = reader.message(limit)
            wire.check_nonce(answer, nonce)
            inner = answer.get("pid")
            if type(inner) is not int or inner <= 0:
                name = errno.errorcode.get(-inner, str(inner)) if type(inner) is int else "no number"
                raise BranchUnsafe(f"the session could not fork: {name}")
            child = Process._branched(self, ours, _open_child(self.pid, inner, private))
        except (wire.Silent, wire.Gone, wire.ProtocolError, OSError) as e:
            ours.close()
            raise SandboxError(f"a branch could not be made: {e or 'no answer in time'}") from e
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if self.zygote.policy.freeze:
                self.send_signal(signal.SIGSTOP)
        try:
            if private:
                self.zygote.give_files(self.pidfd, child.pidfd)
                child.sock.send(b"g")
            reader = wire.Reader(child.sock, child.pidfd, deadline, deadline, lambda: None)
            wire.check_nonce(reader.message(limit), nonce)
            child._check_confined()
        except (wire.Silent, wire.Gone, wire.ProtocolError, OSError) as e:
            child.close()
            raise SandboxError(f"a branch did not start: {e or 'no answer in time'}") from e
        except BaseException:
            child.close()
            raise
        if self.zygote.policy.freeze:
            child.send_signal(signal.SIGSTOP)
        return child

    def _check_branchable(self, private: bool) -> None:
        level = self.zygote.level
        if self.zygote.policy.allow_fork:
            raise BranchUnsafe("a session that may fork has processes that a branch would lose")
        if self.gate_fd is None:
            raise BranchUnsafe(f"no fork can be let through at level {level!r} on this machine")
        if private and level != "namespaces":
            raise BranchUnsafe(f"files of its own need the level 'namespaces', this is {level!r}")

    def _await_one_thread(self) -> None:
        limit = time.monotonic() + _THREAD_WAIT
        while self._status()["Threads"] != "1":
            if time.monotonic() > limit:
                raise BranchUnsafe("the session has threads, which a fork would lose")
            time.sleep(0.001)

    def _status(self) -> dict[str, str]:
        with open(f"/proc/{self.pid}/status") as f:
            return dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)

    def _check_confined(self) -> None:
        """The kernel's view, not the session's word: no capabilities, the filters on, no new privileges, one thread."""
        status = self._status()
        free = all(int(status[key], 16) == 0 for key in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
        if not (free and status["Seccomp"] == "2" and status["NoNewPrivs"] == "1" and status["Threads"] == "1"):
            raise SandboxError("a branch was not confined, and has been killed")


def _readable(fd: int, limit: float) -> bool:
    poll = select.poll()  # select() ends at descriptor 1024
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(limit * 1000))


def _host_pid(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as f:
        return int(next(line for line in f if line.startswith("Pid:")).split()[1])


def _open_child(parent: int, inner: int, private: bool) -> int:
    """A pidfd of the child that `parent` knows as `inner`: its own pid namespace, if it has one, comes last."""
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as f:
            children = f.read().split()
        for child in children:
            with open(f"/proc/{child}/status") as f:
                ids = next(line for line in f if line.startswith("NSpid:")).split()[1:]
            if len(ids) > int(private) and int(ids[-1 - int(private)]) == inner:
                return os.pidfd_open(int(child))
    except FileNotFoundError as e:
        raise BranchUnsafe(f"this kernel does not list a process's children: {e}") from e
    raise SandboxError("a branch ended at its start")
