"""The server's own jail (level `namespaces`): a root of read-only binds, no network, no other process in sight.

Entered once, before the preload, by a server that runs as root or as an ordinary user. The process that enters stays
outside as a monitor; its child goes on inside as the first process of a pid namespace, so that its end takes every
session along.
"""

import os
import select
import shutil
import signal
import socket
from typing import NoReturn

from . import syscalls as sc
from .syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT

DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
SITE = "/opt/site"  # the farm, inside
HOME = "/s/tmp"  # a session's tmpfs, inside; its rule lies on /s, for Landlock ignores rules below a later mount
_MOVED = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/s", "/opt/site")  # what the jail has of its own: moved to /opt/host
_IDS = 65_536  # ids that the jail uses as root: one for each session
_FIRST_ID = 100_000
_FLAGS = sc.NEWNS | sc.NEWNET | sc.NEWIPC | sc.NEWUTS | sc.NEWPID | sc.NEWCGROUP


class JailError(OSError):
    """A step failed; `mechanism` names what the machine lacks for it."""

    def __init__(self, mechanism: str, error: OSError):
        super().__init__(error.errno, f"{mechanism}: {error.strerror or error}")
        self.mechanism = mechanism


def inside(path: str) -> str:
    """Where a path of the host lies in the jail."""
    return "/opt/host" + path if any(path == p or path.startswith(p + "/") for p in _MOVED) else path


def write_file(path: str, text: str, dir_fd: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def of_self(proc: int | None, name: str) -> str:
    """A file of /proc/self, at most 8 KiB. proc: descriptor of a /proc that no path leads to."""
    fd = os.open(f"self/{name}" if proc is not None else f"/proc/self/{name}", os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(fd, 8192).decode()
    finally:
        os.close(fd)


def enter(
    new_root: str, roots: list[str], holes: list[str], packages: dict[str, str], keep: list[int]
) -> tuple[int, bool]:
    """Returns, inside, (descriptor of the host's /proc, whether each session can have a host id of its own).

    new_root: an empty folder. roots, holes, packages: see farm.Farm. keep: descriptors that the monitor closes.
    Raises JailError; then the process is of no further use.
    """
    proc = os.open("/proc", sc.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    ids = _id_range() if os.getuid() == 0 else 0
    uid, gid = os.getuid(), os.getgid()
    if ids:
        try:
            sc.unshare(_FLAGS)
        except PermissionError:  # root without CAP_SYS_ADMIN: like an ordinary user
            ids = 0
    if not ids:
        try:
            sc.unshare(_FLAGS | sc.NEWUSER)
        except OSError as e:
            raise JailError("user namespaces", e) from e
        try:
            write_file("/proc/self/setgroups", "deny")
            write_file("/proc/self/gid_map", f"0 {gid} 1")
            write_file("/proc/self/uid_map", f"0 {uid} 1")
        except OSError as e:
            raise JailError("id maps of a user namespace", e) from e
    mask = os.umask(0o022)
    try:
        _build(new_root, roots, holes, packages)
    except OSError as e:
        raise JailError("mounts in a user namespace", e) from e
    finally:
        os.umask(mask)
    above, scratch = os.path.split(os.path.dirname(new_root))
    above_fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY)  # the root changes for the monitor too
    to_monitor, to_child = os.pipe(), os.pipe()
    parent = os.getppid()
    pid = os.fork()
    if pid:
        for fd in (*keep, to_monitor[1], to_child[0]):
            os.close(fd)
        _monitor(pid, parent, proc, to_monitor[0], to_child[1], ids, above_fd, scratch)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(above_fd)
    os.close(to_monitor[0])
    os.close(to_child[1])
    try:
        sc.mount("tmpfs", new_root + HOME, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=16m,mode=1777")
        sc.pivot_root(new_root)
        sc.mount(None, "/", None, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_REMOUNT | MS_BIND)
        socket.sethostname("sandbox")
        if ids:  # from here on root of a user namespace only: nothing in it is root of the host
            os.setgroups([])
            sc.unshare(sc.NEWUSER)
    except OSError as e:
        raise JailError("a root of its own", e) from e
    os.write(to_monitor[1], b"u")
    if not os.read(to_child[0], 1):
        raise JailError("id maps of a user namespace", PermissionError(1, "the ids could not be mapped"))
    if ids:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of ids clears it
    os.close(to_monitor[1])
    os.close(to_child[0])
    return proc, bool(ids)


def _id_range() -> int:
    """The first of `_IDS` ids that belong to nobody in particular here; 0 if this namespace has not as many."""
    with open("/proc/self/uid_map") as uids, open("/proc/self/gid_map") as gids:
        maps = [[tuple(map(int, line.split())) for line in f] for f in (uids, gids)]
    for first in (_FIRST_ID, 1 << 20, 2_000):
        if all(any(a <= first and first + _IDS <= a + n for a, _, n in m) for m in maps):
            return first
    return 0


def _monitor(pid: int, parent: int, proc: int, ready: int, go: int, ids: int, above: int, scratch: str) -> NoReturn:
    """Outside: writes the id maps, then waits for the end of the server inside, or of the pool's process.

    If it is the pool's, which can no longer do it, the folder `scratch` in the folder `above` is removed.
    """
    code = 1
    try:
        if os.read(ready, 1):  # empty: the child died
            if ids:
                for name in ("gid_map", "uid_map"):
                    write_file(f"{pid}/{name}", f"0 {ids} {_IDS}", proc)
            os.write(go, b"g")
        os.close(go)
        watch = [os.pidfd_open(pid)]
        if os.getppid() == parent:
            watch.append(os.pidfd_open(parent))
        if watch[0] not in select.select(watch, [], [])[0]:
            os.kill(pid, signal.SIGKILL)
            shutil.rmtree(scratch, ignore_errors=True, dir_fd=above)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os._exit(code if code >= 0 else 128 - code)


def _build(new_root: str, roots: list[str], holes: list[str], packages: dict[str, str]) -> None:
    sc.mount(None, "/", None, MS_PRIVATE | MS_REC)
    sc.mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    for folder in ("s/tmp", "etc", "dev", "opt", "var", SITE[1:]):
        os.makedirs(f"{new_root}/{folder}", mode=0o755, exist_ok=True)
    for root in roots:
        if os.path.islink(root):
            os.makedirs(os.path.dirname(new_root + root), exist_ok=True)
            os.symlink(os.readlink(root), new_root + root)
        else:
            _bind(root, new_root + inside(root))
    for hole in holes:
        place = new_root + inside(hole)
        if os.path.isdir(place):
            sc.mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "size=4k,mode=755")
    for name, place in packages.items():
        _bind(place, f"{new_root}{SITE}/{name}")
    for device in DEVICES:
        _bind(device, new_root + device, device=True)
    for link in ("/tmp", "/var/tmp", "/dev/shm"):
        os.symlink(HOME, new_root + link)
    for name, text in (("passwd", "user:x:1000:1000:user:/tmp:/bin/false\n"), ("group", "user:x:1000:\n")):
        with open(f"{new_root}/etc/{name}", "w") as f:
            f.write(text)


def _bind(source: str, target: str, device: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        with open(target, "a"):
            pass
    sc.mount(source, target, None, MS_BIND | (0 if device else MS_REC))
    own = sc.MOUNT_ATTR_NOEXEC if device else sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NODEV
    sc.mount_setattr(target, own | sc.MOUNT_ATTR_NOSUID)  # mounts that lie below it included
