"""What the probes try to reach from inside a session: a file, a process, listeners, made for one round of them."""

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from .policy import Policy

FOREIGN = ("jax", "torch", "pyvision_jax")  # packages of the trainer, if they are installed
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dri/renderD128", "/dev/accel0", "/dev/kvm", "/dev/fuse")
_MB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Bait:
    """What lies outside, made for one round of probes and gone after it."""

    folder: str  # anyone may write there
    token: str  # a random word in a file of the folder, and in the environment of the victim
    victim: int  # pid of a process of this user
    tcp: int  # port of a listener on 127.0.0.1; 0 where there is no such address
    unix: str  # name of an abstract unix listener
    listeners: tuple[socket.socket, ...]

    def inside(self, policy: Policy) -> dict[str, Any]:
        """The names, numbers and places that the cells are to try."""
        specs = [importlib.util.find_spec(name) for name in FOREIGN]
        canary = os.path.join(self.folder, "canary")
        return {
            "token": self.token, "victim": self.victim, "pool": os.getpid(), "foreign": FOREIGN, "canary": canary,
            "new": os.path.join(self.folder, "new"), "files": [canary, *(s.origin for s in specs if s and s.origin)],
            "devices": [name for name in _DEVICES if os.path.exists(name)],
            "listeners": [("AF_UNIX", self.unix), *([("AF_INET", ("127.0.0.1", self.tcp))] if self.tcp else [])],
            "too_much": (policy.memory_mb + 64) * _MB,
        }  # fmt: skip

    def taken(self) -> list[str]:
        """What has happened to it since the last look."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(self.folder, "new"))
            found.append("a file was made outside")
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("a connection came in")
        return found


@contextlib.contextmanager
def baited() -> Iterator[Bait]:
    with contextlib.ExitStack() as stack:
        token = secrets.token_hex(16)
        folder = tempfile.mkdtemp(prefix="pyvision-bait-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with open(os.path.join(folder, "canary"), "w") as f:
            f.write(token)
            os.fchmod(f.fileno(), 0o666)
        os.chmod(folder, 0o777)
        tcp = stack.enter_context(socket.socket(socket.AF_INET))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(name := f"\0pyvision-bait-{token}")
        port = 0
        with contextlib.suppress(OSError):  # a network namespace whose loopback is down
            tcp.bind(("127.0.0.1", 0))
            port = tcp.getsockname()[1]
        listeners = (tcp, unix) if port else (unix,)
        for listener in listeners:
            listener.listen(1)
            listener.setblocking(False)
        # It ends by itself with this process: its standard input closes.
        victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PYVISION_BAIT": token},
        )  # fmt: skip
        stack.enter_context(victim)
        stack.callback(victim.kill)
        yield Bait(folder, token, victim.pid, port, name, listeners)
