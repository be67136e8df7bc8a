"""The Linux calls that Python lacks, by ctypes: clone with namespaces, mounts, capabilities, a few more (x86-64).

Every function raises OSError that names the call. Nothing here decides anything: jail.py, confine.py and branching.py
say what is called when.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET, NEWTIME = 0x1000_0000, 0x2000_0000, 0x4000_0000, 0x80
NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME
CLONE_PARENT, CLONE_THREAD, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x1_0000, 0x20_0000, 0x100_0000
FORK_FLAGS = signal.SIGCHLD | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID  # what os.fork passes, and `clone` always
SESSION_FLAGS = NEWUSER | NEWPID | NEWNS

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
O_PATH = 0x20_0000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PR_GET_TID_ADDRESS = 40
_PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 28, 47, 4
# Root is nobody special, set-uid changes no capability, none is kept or raised, and each of these is locked.
_SECUREBITS = 0xEF
_CAPABILITY_VERSION = 0x2008_0522

_SIGSET = 128  # bytes of the C library's sigset_t

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

_CLONE, _CAPGET, _CAPSET, _PIVOT_ROOT, _SETNS, _CLOSE_RANGE, _MOUNT_SETATTR = (
    56, 125, 126, 155, 308, 436, 442,
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_holding = ctypes.PyDLL(None, use_errno=True)  # calls through this one keep the GIL
_libc.syscall.restype = _holding.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def supported() -> bool:
    """Whether the numbers in this package are this machine's: 64-bit Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and struct.calcsize("P") == 8


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(call: str, number: int, *args: int | bytes | None) -> int:
    """The raw system call `number`, named `call` in errors. Integers are passed as 64 bits, bytes as their address."""
    return _check(
        _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)), call
    )


def prctl(option: int, *args: int) -> int:
    result = _libc.prctl(option, *(*args, 0, 0, 0, 0)[:4])  # the kernel refuses some options unless the rest are zeros
    return result if result >= 0 else _check(result, f"prctl({option})")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Enter namespaces of `fd`: of one namespace file, or those in `flags` of the process of a pidfd."""
    syscall("setns", _SETNS, fd, flags)


def close_range(first: int, last: int = 0xFFFF_FFFF) -> None:
    """Close every descriptor from `first` to `last`, both included."""
    syscall("close_range", _CLOSE_RANGE, first, last, 0)


def mallopt(parameter: int, value: int) -> None:
    if _libc.mallopt(parameter, value) != 1:
        raise OSError(errno.EINVAL, f"mallopt({parameter}, {value}) was refused")


# ------------------------------------------------------------------------------------------------ mounts


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    result = _libc.mount(encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(data))
    _check(result, f"mount({source or kind} on {target})")


def mount_setattr(target: str, attributes: int) -> None:
    """Add `MOUNT_ATTR_*` to a mount and to all below it. Linux 5.12."""
    fields = struct.pack("<4Q", attributes, 0, 0, 0)
    syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target) + b"\0", _AT_RECURSIVE, fields, len(fields))


def umount(target: str, flags: int = MNT_DETACH) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), f"umount({target})")


def pivot_root(new_root: str) -> None:
    """Make the mount point `new_root` the root of this mount namespace; the old root is unmounted. Ends in `/`."""
    os.chdir(new_root)
    syscall("pivot_root", _PIVOT_ROOT, b".\0", b".\0")  # the old root is stacked on the new one ...
    umount(".")  # ... and taken off
    os.chdir("/")


# ------------------------------------------------------------------------------------------------ processes


def clone(flags: int = 0) -> int:
    """os.fork() with the namespace flags `flags`: the child's pid, or 0 in the child. For a single-threaded caller.

    The kernel, and so a seccomp filter, sees exactly `flags | FORK_FLAGS`. Python's fork hooks run; those of
    pthread_atfork do not. The child's id is written where the C library caches it, else it would keep its parent's;
    where the kernel does not tell that place, os.fork() is called, and namespaces cannot be had.
    """
    tid_address = ctypes.c_void_p()
    try:
        prctl(PR_GET_TID_ADDRESS, ctypes.addressof(tid_address))
    except OSError as e:
        if e.errno == errno.EINVAL and not flags:
            return os.fork()
        raise
    zero = ctypes.c_long(0)
    arguments = (ctypes.c_long(_CLONE), ctypes.c_long(flags | FORK_FLAGS), zero, zero, tid_address, zero)
    api = ctypes.pythonapi
    mask = ctypes.create_string_buffer(_SIGSET)
    _libc.pthread_sigmask(signal.SIG_BLOCK, b"\xff" * _SIGSET, mask)
    try:
        # A KeyboardInterrupt between the hooks would leave the interpreter's locks taken for ever.
        api.PyErr_CheckSignals()
        api.PyOS_BeforeFork()
        pid = _holding.syscall(*arguments)
        number = ctypes.get_errno()
        if pid == 0:
            api.PyOS_AfterFork_Child()
        else:
            api.PyOS_AfterFork_Parent()
    finally:
        _libc.pthread_sigmask(signal.SIG_SETMASK, mask, None)
    if pid < 0:
        raise OSError(number, f"clone({flags:#x}): {os.strerror(number)}")
    return pid


# ------------------------------------------------------------------------------------------------ capabilities


def clear_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets of the calling thread; a session's filter allows it."""
    syscall("capset", _CAPSET, struct.pack("<Ii", _CAPABILITY_VERSION, 0), bytes(24))


def drop_capabilities() -> None:
    """Give up every capability for good: bounding and ambient sets, secure bits, then the sets in use.

    Without CAP_SETPCAP the bounding set stays; with no_new_privs nothing can be regained from it. Raises OSError if a
    set in use is not empty afterwards.
    """
    try:
        for capability in range(64):
            prctl(_PR_CAPBSET_DROP, capability)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EINVAL):  # not privileged; past the last one
            raise
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    try:
        prctl(_PR_SET_SECUREBITS, _SECUREBITS)
    except OSError as e:
        if e.errno != errno.EPERM:
            raise
    clear_capabilities()
    sets = ctypes.create_string_buffer(24)
    _check(
        _libc.syscall(ctypes.c_long(_CAPGET), struct.pack("<Ii", _CAPABILITY_VERSION, 0), sets),
        "capget",
    )
    if any(sets.raw):
        raise OSError(errno.EPERM, "capset: capabilities are left")
