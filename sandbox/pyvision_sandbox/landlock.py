"""Landlock: what of the file system a process may use; also no TCP, no abstract sockets and signals of others.

What Landlock does not govern, at any version: stat, access, readlink, chdir, and changes of a file's mode, owner and
times (the seccomp filter answers those). Rights are checked when a file is opened; descriptors opened before stay good.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Sequence

from . import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NEVER_WRITTEN = EXECUTE | MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK | IOCTL_DEV
BITS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # later ones added no right to files that is known here
ABI_WITH_TCP, ABI_WITH_SCOPES, ABI_WITH_QUIET = 4, 6, 7
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_DO_NOT_LOG = 1  # a session could fill the host's audit log with refusals

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_HELD_FROM = 256  # held descriptors keep clear of the numbers that a session's process uses


def abi() -> int:
    """The kernel's Landlock version, 0 where there is none or it may not be used."""
    try:
        return syscalls.syscall("landlock_create_ruleset", _CREATE, None, 0, _VERSION)
    except OSError:
        return 0


def available() -> str:
    """Empty, or why Landlock cannot be used here."""
    if not syscalls.supported():
        return "the machine is not x86-64 Linux"
    try:
        syscalls.syscall("landlock_create_ruleset", _CREATE, None, 0, _VERSION)
    except OSError as e:
        reasons = {
            errno.ENOSYS: "the kernel is older than 5.13 or built without Landlock",
            errno.EOPNOTSUPP: "Landlock is not enabled at boot (the kernel's lsm= list)",
            errno.EPERM: "a seccomp filter around this process refuses Landlock's calls",
        }
        return reasons.get(e.errno or 0, str(e))
    return ""


def handled(version: int) -> int:
    """The rights to files that Landlock version `version` governs; all are refused unless a rule gives them."""
    return (1 << BITS_BY_ABI[min(version, max(BITS_BY_ABI))]) - 1


class Ruleset:
    """Rules made once, that any number of forked processes put on themselves.

    read: files, and folders with all below, that may be read and mapped, and run where `execute`.
    read_dir: folders that may be listed, with all folders below; no file in them may be read.
    write: folders (or files) with all rights but running, devices, sockets; a rename between folders needs version 2.
    devices: device files that may be read and written.
    Paths that do not exist or cannot be reached are skipped. A rule holds for what lies at the path now: a mount on
    top of it hides it. Raises OSError where Landlock is missing.
    """

    def __init__(
        self,
        read: Sequence[str] = (),
        read_dir: Sequence[str] = (),
        write: Sequence[str] = (),
        devices: Sequence[str] = (),
        execute: bool = True,
    ):
        self._version = abi()
        self._handled = handled(self._version) if self._version else 0
        self._rules: list[tuple[int, bytes]] = []  # (descriptor, struct landlock_path_beneath_attr)
        self._fd = self._create()
        for paths, rights in (
            (read, READ_FILE | READ_DIR | (EXECUTE if execute else 0)),
            (read_dir, READ_DIR),
            (write, self._handled & ~NEVER_WRITTEN),
            (devices, READ_FILE | WRITE_FILE),
        ):
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                    self._allow(path, rights)

    def _create(self) -> int:
        fields = [self._handled]
        if self._version >= ABI_WITH_TCP:
            fields.append(_BIND_TCP | _CONNECT_TCP)
        if self._version >= ABI_WITH_SCOPES:
            fields.append(_SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
        attributes = struct.pack(f"<{len(fields)}Q", *fields)
        return _moved_up(syscalls.syscall("landlock_create_ruleset", _CREATE, attributes, len(attributes), 0))

    def _allow(self, path: str, rights: int) -> None:
        fd = _moved_up(os.open(path, syscalls.O_PATH | os.O_CLOEXEC))
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= OF_FILES
        if not rights & self._handled:  # leave to list a file is nothing
            os.close(fd)
            return
        self._rules.append((fd, struct.pack("<Qi", rights & self._handled, fd)))
        self._add(self._rules[-1][1])

    def _add(self, rule: bytes) -> None:
        syscalls.syscall("landlock_add_rule", _ADD_RULE, self._fd, _PATH_BENEATH, rule, 0)

    def add_write(self, path: str) -> None:
        """Let `path` be written by this process alone: the set that is shared with its parent stays as it is."""
        shared, self._fd = self._fd, self._create()
        os.close(shared)
        for _, rule in self._rules:
            self._add(rule)
        self._allow(path, self._handled & ~NEVER_WRITTEN)

    def restrict_self(self) -> None:
        """Put the rules on the calling thread, for ever. It must have no_new_privs or CAP_SYS_ADMIN."""
        flags = _DO_NOT_LOG if self._version >= ABI_WITH_QUIET else 0
        syscalls.syscall("landlock_restrict_self", _RESTRICT, self._fd, flags)

    def close(self) -> None:
        for fd in (self._fd, *(fd for fd, _ in self._rules)):
            os.close(fd)
        self._rules.clear()


def _moved_up(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HELD_FROM)
    finally:
        os.close(fd)
