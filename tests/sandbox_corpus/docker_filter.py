"""A seccomp filter like Docker's default one, and the capabilities that a container's root keeps."""

from __future__ import annotations

import ctypes
import os
import struct

_ALLOW, _ERRNO, _ARCH = 0x7FFF0000, 0x00050000, 0xC000003E
_EPERM, _ENOSYS = 1, 38
_NEW_NAMESPACES = 0x7E020000
_REFUSED = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248,
    "request_key": 249, "ptrace": 101, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "name_to_handle_at": 303, "open_by_handle_at": 304, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "move_mount": 429, "open_tree": 428, "mount_setattr": 442,
    "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176, "swapon": 167, "swapoff": 168,
    "reboot": 169, "acct": 163, "quotactl": 179, "kcmp": 312, "lookup_dcookie": 212, "iopl": 172, "ioperm": 173,
    "settimeofday": 164, "clock_settime": 227, "process_vm_readv": 310, "process_vm_writev": 311, "uselib": 134,
}  # fmt: skip
_LANDLOCK = (444, 445, 446)
# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE NET_RAW SYS_CHROOT MKNOD AUDIT_WRITE
# SETFCAP
_KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instructions(landlock: bool) -> list[tuple[int, int, int, int]]:
    def refuse(number: int, error: int) -> list[tuple[int, int, int, int]]:
        return [(0x15, 0, 1, number), (0x06, 0, 0, _ERRNO | error)]

    program = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCH), (0x06, 0, 0, _ERRNO | _EPERM), (0x20, 0, 0, 0)]
    for number in _REFUSED.values():
        program += refuse(number, _EPERM)
    if not landlock:
        for number in _LANDLOCK:
            program += refuse(number, _EPERM)
    program += refuse(435, _ENOSYS)  # clone3: its flags lie in memory
    # clone with a namespace; a refused flag is looked up in the first argument.
    program += [(0x15, 0, 3, 56), (0x20, 0, 0, 16), (0x45, 0, 1, _NEW_NAMESPACES), (0x06, 0, 0, _ERRNO | _EPERM)]
    return [*program, (0x06, 0, 0, _ALLOW)]


def _check(value: int, what: str) -> None:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def confine(landlock: bool = True) -> None:
    """Put the calling process where a container's process is. Raises OSError. landlock=False: an older Docker.

    An ordinary user gets no_new_privs with it, without which the kernel takes no filter from him; root does not.
    """
    packed = b"".join(struct.pack("<HBBI", *i) for i in _instructions(landlock))
    program = _Program(len(packed) // 8, packed)
    if os.geteuid():
        _check(_libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))), "no_new_privs")
    _check(_libc.syscall(ctypes.c_long(317), ctypes.c_long(1), ctypes.c_long(0), ctypes.byref(program)), "seccomp")
    if os.geteuid() == 0:
        for capability in range(41):
            if capability not in _KEPT:
                _check(_libc.prctl(24, *map(ctypes.c_ulong, (capability, 0, 0, 0))), "bounding set")
        kept = sum(1 << c for c in _KEPT)
        header = struct.pack("<II", 0x20080522, 0)
        data = struct.pack("<6I", kept & 0xFFFFFFFF, kept & 0xFFFFFFFF, 0, kept >> 32, kept >> 32, 0)
        _check(_libc.syscall(ctypes.c_long(126), header, data), "capset")
