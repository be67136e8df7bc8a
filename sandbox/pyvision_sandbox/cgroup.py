"""Control groups: a limit on a session's memory and processes together. Used where they may be made, never required.

Both kinds are known: one unified tree (v2), where a group with the memory and pids controllers can be made below this
process's group or below one above it that is ours to write in; and a tree for each controller (v1).
"""

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REMOVAL = 2.0  # seconds for ended processes to leave a group
NEEDED = ("memory", "pids")


def _read(folder: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _write(folder: int, name: str, text: str | int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, str(text).encode())
    finally:
        os.close(fd)


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


class Tree(NamedTuple):
    """A hierarchy of groups: the folder to make them in, and those of the needed controllers that live there."""

    folder: int
    controllers: frozenset[str]
    unified: bool


class Group:
    """One session's group. Holds no descriptor: there may be thousands."""

    def __init__(self, name: str, trees: Sequence[Tree]):
        self.name = name
        self._unified = trees[0].unified
        self._made: list[int] = []  # the folders that it lies in, one for each tree
        self._in: dict[str, int] = {}  # controller -> the folder of that controller's tree
        self._oom_kills = 0
        try:
            for tree in trees:
                os.mkdir(name, 0o755, dir_fd=tree.folder)
                self._made.append(tree.folder)
                self._in |= dict.fromkeys(tree.controllers, tree.folder)
        except OSError:
            self.remove()
            raise

    def _get(self, controller: str, file: str) -> str:
        return _read(self._in[controller], f"{self.name}/{file}")

    def _set(self, controller: str, file: str, value: str | int) -> None:
        _write(self._in[controller], f"{self.name}/{file}", value)

    def _has(self, file: str) -> bool:
        return _exists(self._in["memory"], f"{self.name}/{file}")

    def limit(self, memory_bytes: int, pids: int) -> None:
        if self._unified:
            self._set("memory", "memory.max", memory_bytes)
            swap, amount = "memory.swap.max", 0
        else:
            self._set("memory", "memory.limit_in_bytes", memory_bytes)
            swap, amount = "memory.memsw.limit_in_bytes", memory_bytes  # memory and swap together
        if self._has(swap):
            self._set("memory", swap, amount)
        self._set("pids", "pids.max", pids)

    def add(self, pid: int) -> None:
        """Move a process here; what it uses from now on, and the children it makes, count here."""
        for folder in self._made:
            _write(folder, f"{self.name}/cgroup.procs", pid)

    def pids(self) -> list[int]:
        return [int(line) for line in self._get("memory", "cgroup.procs").split()]

    def memory(self) -> int:
        """Bytes in use, files in memory (tmpfs, page cache) included."""
        return int(self._get("memory", "memory.current" if self._unified else "memory.usage_in_bytes"))

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed at the group's limit; may be asked after `remove`, too."""
        if self._made:
            text = self._get("memory", "memory.events" if self._unified else "memory.oom_control")
            counts = dict(line.split() for line in text.splitlines())
            self._oom_kills = int(counts.get("oom_kill", 0))  # v1 tells it since Linux 4.13
        return self._oom_kills

    def freeze(self, on: bool) -> bool:
        """Stop all processes, or let them go on. False where the kernel has no freezer for this group."""
        if self._unified and self._has("cgroup.freeze"):
            self._set("memory", "cgroup.freeze", int(on))
        elif "freezer" in self._in:
            self._set("freezer", "freezer.state", "FROZEN" if on else "THAWED")
        else:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to every process; returns before they have ended."""
        if self._unified and self._has("cgroup.kill"):  # Linux 5.14
            self._set("memory", "cgroup.kill", 1)
            return
        self._set("pids", "pids.max", 0)  # no new ones while these are told
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    if pid in self.pids():  # else the number may be another's by now
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                finally:
                    os.close(fd)
        self.freeze(False)  # frozen processes of v1 do not end

    def remove(self) -> None:
        """Remove the group; waits at most two seconds for killed processes to leave. Raises OSError if one is left."""
        if "memory" in self._in:
            with contextlib.suppress(FileNotFoundError):
                self.oom_kills()
        deadline = time.monotonic() + _REMOVAL
        while self._made:
            try:
                os.rmdir(self.name, dir_fd=self._made[-1])
            except FileNotFoundError:
                pass
            except OSError as e:
                if e.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
                continue
            self._made.pop()


class Cgroups:
    """Where groups can be made. `why` is empty, or says why they cannot be: then it is false, and `create` raises.

    The places are held by descriptor, so it goes on working in a process that left the root.
    """

    def __init__(self, trees: Sequence[Tree] = (), why: str = ""):
        self._trees: tuple[Tree, ...] = tuple(trees)
        self.why = why

    def __bool__(self) -> bool:
        return not self.why

    @property
    def version(self) -> str:
        """`v2`, `v1`, or empty."""
        return "" if self.why else "v2" if self._trees[0].unified else "v1"

    def create(self, name: str, memory_bytes: int, pids: int) -> Group:
        """A group for at most `memory_bytes` (swap included) and `pids` processes and threads. Raises OSError."""
        if self.why:
            raise OSError(errno.ENOTSUP, self.why)
        group = Group(name, self._trees)
        try:
            group.limit(memory_bytes, pids)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        for tree in self._trees:
            os.close(tree.folder)
        self._trees, self.why = (), "closed"


# ------------------------------------------------------------------------------------------------ looking for a place


class Mount(NamedTuple):
    """A mounted hierarchy: its mount point, the group that is mounted there, the controllers (v1), and its kind."""

    point: str
    root: str
    options: frozenset[str]
    unified: bool


def mounts(mountinfo: str) -> list[Mount]:
    """From the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = (_unescape(field) for field in left.split(" ")[3:5])
            found.append(Mount(point, root, frozenset(options.split(",")), kind == "cgroup2"))
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def own_folder(mount: Mount, memberships: str) -> str | None:
    """This process's group as a path, None where it lies outside of what is mounted. From /proc/self/cgroup."""
    for line in memberships.splitlines():
        number, controllers, path = line.split(":", 2)
        if mount.unified:
            ours = number == "0" and not controllers
        else:
            ours = bool(controllers) and set(controllers.split(",")) <= mount.options
        if not ours:
            continue
        if mount.root == "/":
            below = path
        elif path == mount.root or path.startswith(mount.root + "/"):
            below = path[len(mount.root) :]
        else:
            return None
        return None if below.startswith("/..") else os.path.normpath(mount.point + below)
    return None


def find() -> Cgroups:
    """Where this process may make groups, proven by making one and removing it again. Never raises OSError.

    No group with a memory limit is ever left for a place above it.
    """
    try:
        with open("/proc/self/mountinfo") as file:
            mounted = mounts(file.read())
        with open("/proc/self/cgroup") as file:
            memberships = file.read()
    except OSError as e:
        return Cgroups(why=f"no control groups can be seen: {e}")
    reasons = []
    for kind, candidates in (("v2", _unified(mounted, memberships)), ("v1", _split(mounted, memberships))):
        reason = "not mounted, or without the controllers memory and pids"
        for places in candidates:
            try:
                return _proven(places)
            except OSError as e:
                reason = f"{places[0].path}: {e.strerror}"
        reasons.append(f"{kind}: {reason}")
    return Cgroups(why="; ".join(reasons))


class Place(NamedTuple):
    """A tree that is not yet opened, by the path of the folder to make groups in."""

    path: str
    controllers: frozenset[str]
    unified: bool


def _proven(places: Sequence[Place]) -> Cgroups:
    trees: list[Tree] = []
    try:
        for path, controllers, unified in places:
            trees.append(Tree(os.open(path, _DIRECTORY), controllers, unified))
            if unified and not set(NEEDED) <= set(_read(trees[-1].folder, "cgroup.subtree_control").split()):
                _write(trees[-1].folder, "cgroup.subtree_control", " ".join(f"+{name}" for name in NEEDED))
            if not os.access("cgroup.procs", os.W_OK, dir_fd=trees[-1].folder, effective_ids=True):
                raise PermissionError(errno.EACCES, "no process may be moved here")
        group = Cgroups(trees).create(f"pyvision-trial-{os.urandom(8).hex()}", 1 << 26, 16)
        group.memory()
        group.remove()
    except OSError:
        for tree in trees:
            os.close(tree.folder)
        raise
    return Cgroups(trees)


def _unified(mounted: Sequence[Mount], memberships: str) -> Iterator[list[Place]]:
    """This process's own group, then those above it that hand the controllers down already."""
    for mount in mounted:
        path = own_folder(mount, memberships) if mount.unified else None
        own = True
        while path is not None:
            handed_down = _words(path, "cgroup.controllers" if own else "cgroup.subtree_control")
            if set(NEEDED) <= handed_down:
                yield [Place(path, frozenset(NEEDED), unified=True)]
            # Beside a group with a limit, a session's memory would no longer count towards it.
            limited = _words(path, "memory.max") - {"max"}
            path = None if path == mount.point or limited else os.path.dirname(path)
            own = False


def _words(folder: str, name: str) -> set[str]:
    try:
        with open(os.path.join(folder, name)) as file:
            return set(file.read().split())
    except OSError:
        return set()


def _split(mounted: Sequence[Mount], memberships: str) -> Iterator[list[Place]]:
    """This process's own groups in the trees of memory and pids, with that of the freezer if it can be had."""
    found: dict[str, set[str]] = {}  # folder -> its controllers: two may share a tree
    for mount in mounted:
        ours = {*NEEDED, "freezer"} & mount.options
        path = own_folder(mount, memberships) if ours and not mount.unified else None
        if path is not None:
            found.setdefault(path, set()).update(ours)
    places = [Place(path, frozenset(ours), unified=False) for path, ours in found.items()]
    needed = [place for place in places if place.controllers & set(NEEDED)]
    if {name for place in needed for name in place.controllers} >= set(NEEDED):
        if places != needed:
            yield places
        yield needed
