"""What a session does to itself, after the fork and before any code of the model: about 3 ms of CPU.

The steps of a level are all taken or the session ends; nothing is left out in silence.
"""

import contextlib
import os
import resource
import signal
import socket
from typing import Any

from . import seccomp
from . import syscalls as sc
from .farm import cover
from .jail import DEVICES, HOME, write_file
from .landlock import ABI_WITH_SCOPES, Ruleset
from .syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID

_FIRST_HOST_ID = 200_000  # of sessions at the levels without namespaces, where the server is root
_USER = 1_000  # a session's own id, as it sees it, in a user namespace
_MB = 1 << 20


class Confinement:
    """Made once in the server: programs and rules are ready when a session starts.

    config: level, limits (the policy), gate (is there a notification), own_ids (one host id for each session), proc
    (descriptor of the host's /proc, level `namespaces`), farm, roots, holes, packages, homes.
    """

    def __init__(self, config: dict[str, Any]):
        self.config, self.limits, self.level = config, config["limits"], config["level"]
        self.gate: bool = config["gate"] and not self.limits["allow_fork"]
        self.address_space = self.host_threads = 0
        self.filter = seccomp.session_filter(None, self.gate, **self._allow()) if self.level == "namespaces" else None
        self.closing = seccomp.closing_filter() if self.level != "none" else None
        self.rules: Ruleset | None = None
        if self.level == "namespaces" and config["landlock_abi"]:
            self.rules = Ruleset(["/"], [], ["/s"], DEVICES, execute=self.limits["allow_exec"])
        elif self.level == "landlock":
            places = [*config["packages"].values()]
            whole, listed = cover(config["roots"], config["holes"])
            listed.append(config["farm"])
            self.rules = Ruleset([*whole, *places], listed, [], DEVICES, execute=self.limits["allow_exec"])

    # ------------------------------------------------------------------------------------------------ identity, files
    def host_id(self, n: int) -> int | None:
        """The id under which session n is to run, at the levels without namespaces; None: the server's own."""
        return _FIRST_HOST_ID + n % 65_536 if self.config["own_ids"] else None

    def enter_namespaces(self, n: int) -> None:
        """Maps the ids of a fresh user namespace and mounts the session's files."""
        proc = self.config["proc"]
        sc.prctl(sc.PR_SET_DUMPABLE, 1)  # to write its own maps
        host = _USER + n % 60_000 if self.config["own_ids"] else 0
        write_file("self/setgroups", "deny", proc)
        write_file("self/gid_map", f"{_USER} {host} 1", proc)
        write_file("self/uid_map", f"{_USER} {host} 1", proc)
        self.become_user()
        mount_home(self.limits["tmp_mb"])

    @staticmethod
    def become_user() -> None:
        os.setresgid(_USER, _USER, _USER)
        os.setresuid(_USER, _USER, _USER)

    def make_home(self, n: int) -> str:
        """By the server, at the levels where a session's files lie on the host."""
        home = os.path.join(self.config["homes"], f"s{n}")
        os.mkdir(home, 0o700)
        with open("/proc/loadavg") as f:
            self.host_threads = int(f.read().split()[3].split("/")[1])
        host = self.host_id(n)
        if host is not None:
            os.chown(home, host, host)
        return home

    # ------------------------------------------------------------------------------------------------ the steps
    def apply(self, n: int, home: str, channel: int) -> None:
        """Everything but the namespaces. Sends `N` with the notification descriptor over the channel, or `-`."""
        if self.level == "none":
            self._limit()
            os.write(channel, b"-")
            return
        host = self.host_id(n)
        if self.level != "namespaces" and host is not None:
            os.setgroups([])
            os.setresgid(host, host, host)
            os.setresuid(host, host, host)
            sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of ids clears it
        # The helper that prepares a branch, and the pool that counts the open files, must be able to look into it.
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        if self.rules is not None:
            if self.level == "landlock":
                self.rules.add_write(home)
            self.rules.restrict_self()
        self._limit()
        os.setsid()
        sc.drop_capabilities()
        program = self.filter or seccomp.session_filter(os.getpid(), self.gate, **self._allow())
        listener = seccomp.load(program, listener=self.gate)
        with contextlib.ExitStack() as stack:
            sock = socket.socket(fileno=os.dup(channel))
            stack.callback(sock.close)
            if listener is None:
                sock.send(b"-")
            else:
                socket.send_fds(sock, [b"N"], [listener])
                os.close(listener)  # with it a session could answer its own questions
        assert self.closing is not None
        seccomp.load(self.closing)

    def _allow(self) -> dict[str, bool]:
        allow = {name: self.limits[name] for name in ("allow_exec", "allow_fork")}
        return allow | {"scoped_signals": self.config["landlock_abi"] >= ABI_WITH_SCOPES}

    def _limit(self) -> None:
        limits = self.limits
        wanted = {
            resource.RLIMIT_AS: self.address_space + limits["memory_mb"] * _MB,
            resource.RLIMIT_FSIZE: limits["tmp_mb"] * _MB,
            resource.RLIMIT_CPU: limits["session_cpu"],
            resource.RLIMIT_NOFILE: 512,
            resource.RLIMIT_CORE: 1,  # at 0 a core_pattern that is a pipe would still get a dump
        }
        if self.level != "none":
            wanted |= {
                resource.RLIMIT_STACK: 8 * _MB, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
                resource.RLIMIT_SIGPENDING: 128,
            }  # fmt: skip
            # The kernel counts the threads of an id. Where sessions have the trainer's, its own must be let through.
            own = self.level == "namespaces" or self.config["own_ids"]
            wanted[resource.RLIMIT_NPROC] = limits["threads"] if own else self.host_threads + 3 * limits["threads"]
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # CPU: the soft limit's SIGXCPU tells the cause; at an equal hard limit the kernel sends a plain SIGKILL.
            hard = value + 5 if kind == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else value
            resource.setrlimit(kind, (value, hard))


def mount_home(tmp_mb: int) -> None:
    sc.mount(
        "tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
        f"size={tmp_mb}m,nr_inodes=4096,mode=700,uid={_USER},gid={_USER}",
    )  # fmt: skip
