"""Branches: a session that forks itself, with all its variables, and with a copy of its files.

Three parties. The session (`serve`) forks with the exact flags that the pool's gate lets through, and its child goes
on over a socket that the pool has sent. For files of its own the child has new user, pid and mount namespaces; a
helper (`helper`), forked from the server before the preload and so slim, gives it id maps, a fresh tmpfs and a copy
of the files. The pool (process.py) lets the child serve only after it has looked at it from outside.
"""

import contextlib
import gc
import os
import socket
from typing import TYPE_CHECKING, Any, NoReturn

from . import syscalls as sc
from .capture import nameless
from .confine import Confinement, mount_home
from .frame import CHANNEL_FD, pack
from .jail import of_self, write_file

if TYPE_CHECKING:
    from .runner import Runner

_MAX_DEPTH = 64
# Code may rebind what modules offer.
_recv_fds, _socket, _dup, _dup2, _close, _getcwd, _chdir = (
    socket.recv_fds, socket.socket, os.dup, os.dup2, os.close, os.getcwd, os.chdir,
)  # fmt: skip


def fresh_output(home: str) -> None:
    """Descriptors 1 and 2 become files without a name in the session's own folder, so their size is limited with it."""
    for fd in (1, 2):
        file = nameless(home)
        _dup2(file, fd)
        _close(file)


# ------------------------------------------------------------------------------------------------ in the session
def serve(runner: "Runner", message: dict[str, Any]) -> None:
    """Fork. The parent answers with the child's pid; the child answers over its own socket once it may serve."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # branches that have ended still count as processes
            pass
    sock = _socket(fileno=_dup(CHANNEL_FD))
    channel = _recv_fds(sock, 1, 1)[1][0]
    sock.close()
    private, folder = message["private"], _getcwd()
    gc.disable()  # a collection in the middle would write to every page
    runner.branching = True
    try:
        pid = sc.clone(sc.SESSION_FLAGS if private else 0)
    except OSError as e:
        _close(channel)
        runner.send(pack({"nonce": message["nonce"], "pid": -(e.errno or 1)}))
        return
    finally:
        runner.branching = False
        gc.enable()
    if pid:
        _close(channel)
        runner.send(pack({"nonce": message["nonce"], "pid": pid}))
        return
    sc.prctl(sc.PR_SET_PDEATHSIG, 9)  # not inherited; without it a branch could outlive its family
    if private:
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        os.read(channel, 1)  # the helper has done its part
        sc.clear_capabilities()  # until here full within its own new namespace, behind the same filters
        try:
            _chdir(folder)
        except OSError:
            _chdir("/tmp")
    fresh_output(os.environ["HOME"] if private else ".")
    _dup2(channel, CHANNEL_FD, inheritable=False)
    _close(channel)
    runner.branched()
    runner.send(pack({"nonce": message["nonce"]}))


# ------------------------------------------------------------------------------------------------ the helper
def helper(sock: socket.socket, proc: int, tmp_mb: int) -> NoReturn:
    """Serve the pool: two pidfds, parent and child, in one datagram; the answer is a msgpack map."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 64, 2)
        if not data:
            os._exit(0)
        pid = os.fork()  # entering a namespace is one-way
        if pid == 0:
            try:
                answer = {"bytes": _give_files(fds[0], fds[1], proc, tmp_mb)}
            except OSError as e:
                answer = {"error": f"{e.strerror}: {e.filename}"}
            finally:
                sock.send(pack(answer))
                os._exit(0)
        os.waitpid(pid, 0)
        for fd in fds:
            os.close(fd)


def _give_files(parent: int, child: int, proc: int, tmp_mb: int) -> int:
    """Id maps, a tmpfs and a copy of the parent's files for `child`, a clone in new namespaces. Returns bytes."""
    info = of_self(proc, f"fdinfo/{child}")
    pid = next(line.split()[1] for line in info.splitlines() if line.startswith("Pid:"))
    sc.setns(parent, sc.NEWUSER | sc.NEWNS)
    source = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    for name, text in (("setgroups", "deny"), ("gid_map", "1000 1000 1"), ("uid_map", "1000 1000 1")):
        write_file(f"{pid}/{name}", text, proc)
    sc.setns(child, sc.NEWUSER | sc.NEWNS)
    mount_home(tmp_mb)
    Confinement.become_user()
    return copy_tree(source, os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY))


def copy_tree(source: int, target: int, depth: int = 0) -> int:
    """Regular files, folders and links, by descriptor: never through a path that could be swapped. Returns bytes.

    Sockets, pipes and folders below `_MAX_DEPTH` are left out. Raises OSError if there is no room.
    """
    copied = 0
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_symlink():
                os.symlink(os.readlink(entry.name, dir_fd=source), entry.name, dir_fd=target)
            elif entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH:
                    copied += _copy_folder(entry.name, source, target, depth)
            elif entry.is_file(follow_symlinks=False):
                copied += _copy_file(entry.name, source, target)
    return copied


def _copy_folder(name: str, source: int, target: int, depth: int) -> int:
    os.mkdir(name, 0o700, dir_fd=target)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=source)
    outer = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=target)
    try:
        return copy_tree(inner, outer, depth + 1)
    finally:
        os.close(inner)
        os.close(outer)


def _copy_file(name: str, source: int, target: int) -> int:
    old = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    copied = 0
    try:
        while n := os.sendfile(new, old, None, 1 << 24):
            copied += n
    finally:
        os.close(old)
        os.close(new)
    return copied
