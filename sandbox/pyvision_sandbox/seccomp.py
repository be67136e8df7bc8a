"""The session's seccomp filters: an allow-list, all else is EPERM, never a kill (x86-64).

Principles. A call that is not in these tables is refused. Every call that can name another process, or a target for a
signal, has that argument checked. Nothing that outlives a session, or that all sessions share, can be changed. A check
reads what the kernel reads: the low word where it takes an int, all 64 bits where it takes a long or an address.

A session loads two filters. The first returns a notification descriptor if forks are to be asked for, and leaves
`sendmsg` and `seccomp` open just long enough to hand that descriptor over and to load the second, which closes those
two.

Landlock governs neither a file's mode and times nor, before its version 3, truncation. In a mount namespace the
read-only root does. Without one (`own_pid` given) chmod and utime do nothing and say that they worked, as on a file
system without modes: an error would break shutil.copy, and leave would let a session make the host's files unreadable.
"""

import ctypes
import errno
import functools
import itertools
import os
import resource
import signal
import socket
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from . import syscalls

ALLOW, NOTIFY, ERRNO = 0x7FFF_0000, 0x7FC0_0000, 0x0005_0000  # what a filter returns; ERRNO with the number in it
AUDIT_ARCH_X86_64 = 0xC000_003E
OWN_PID = 0x7FFF_FFFF  # stands for the session's pid in a template; no process can have it
NR, ARCH, ARGS = 0, 4, 16  # offsets in struct seccomp_data; an argument has its low word first


class Arg(NamedTuple):
    """A condition on argument `index`: its value under `mask` is one of `values`. `wide`: its high word is 0, too."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFF_FFFF
    wide: bool = False


class Call(NamedTuple):
    """Allowed if all conditions of one of the `ways` hold, else answered with `otherwise`."""

    name: str
    ways: tuple[tuple[Arg, ...], ...]
    otherwise: int = errno.EPERM


# Allowed whatever the arguments. Number: name.
FREE = {
    0: "read", 1: "write", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 8: "lseek", 10: "mprotect",
    11: "munmap", 12: "brk", 13: "rt_sigaction", 14: "rt_sigprocmask", 15: "rt_sigreturn", 17: "pread64",
    18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 22: "pipe", 23: "select", 24: "sched_yield", 25: "mremap",
    26: "msync", 32: "dup", 33: "dup2", 34: "pause", 35: "nanosleep", 36: "getitimer", 37: "alarm", 38: "setitimer",
    39: "getpid", 40: "sendfile", 45: "recvfrom", 47: "recvmsg", 48: "shutdown", 51: "getsockname", 52: "getpeername",
    60: "exit", 61: "wait4", 63: "uname", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 78: "getdents",
    79: "getcwd", 80: "chdir", 81: "fchdir", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link",
    87: "unlink", 88: "symlink", 89: "readlink", 95: "umask", 96: "gettimeofday", 97: "getrlimit", 98: "getrusage",
    99: "sysinfo", 100: "times", 102: "getuid", 104: "getgid", 107: "geteuid", 108: "getegid", 110: "getppid",
    111: "getpgrp", 115: "getgroups", 118: "getresuid", 120: "getresgid", 127: "rt_sigpending", 128: "rt_sigtimedwait",
    130: "rt_sigsuspend", 131: "sigaltstack", 137: "statfs", 138: "fstatfs", 146: "sched_get_priority_max",
    147: "sched_get_priority_min", 186: "gettid", 187: "readahead", 201: "time", 213: "epoll_create",
    217: "getdents64", 218: "set_tid_address", 219: "restart_syscall", 223: "timer_settime", 224: "timer_gettime",
    225: "timer_getoverrun", 226: "timer_delete", 231: "exit_group", 232: "epoll_wait",
    233: "epoll_ctl", 247: "waitid", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat",
    265: "linkat", 266: "symlinkat", 267: "readlinkat", 269: "faccessat", 270: "pselect6", 271: "ppoll",
    273: "set_robust_list", 281: "epoll_pwait", 282: "signalfd", 283: "timerfd_create", 284: "eventfd",
    285: "fallocate", 286: "timerfd_settime", 287: "timerfd_gettime", 289: "signalfd4", 290: "eventfd2",
    291: "epoll_create1", 292: "dup3", 295: "preadv", 296: "pwritev", 309: "getcpu", 316: "renameat2",
    318: "getrandom", 326: "copy_file_range", 327: "preadv2", 328: "pwritev2", 332: "statx", 334: "rseq",
    436: "close_range", 439: "faccessat2", 441: "epoll_pwait2",
    126: "capset",  # adds no capability
}  # fmt: skip
UNTIL_CLOSED = {46: "sendmsg", 317: "seccomp"}
EXEC = {59: "execve", 322: "execveat"}
FORKS = {57: "fork", 58: "vfork"}
CLONE = 56
# What Landlock does not govern; the first can be ignored, the second cannot.
MODES_AND_TIMES = {
    90: "chmod", 91: "fchmod", 132: "utime", 235: "utimes", 261: "futimesat", 268: "fchmodat", 280: "utimensat",
    452: "fchmodat2",
}  # fmt: skip
TRUNCATE = {76: "truncate"}
_OWN = Arg(0, (0, OWN_PID))
_CLOCK = Arg(0, (0,), mask=1 << 31)  # a negative number is the processor time of a process, or a device
SIGNALS = {
    number: Call(name, ((Arg(0, (OWN_PID,)),),)) for number, name in ((62, "kill"), (200, "tkill"), (234, "tgkill"))
}
# Others that name a process or a thread; free in a pid namespace, as signals are.
PROCESS_ARGS = {
    121: Call("getpgid", ((_OWN,),)),
    124: Call("getsid", ((_OWN,),)),
    143: Call("sched_getparam", ((_OWN,),)),
    145: Call("sched_getscheduler", ((_OWN,),)),
    204: Call("sched_getaffinity", ((_OWN,),)),
    222: Call("timer_create", ((_CLOCK,),)),
    228: Call("clock_gettime", ((_CLOCK,),)),
    229: Call("clock_getres", ((_CLOCK,),)),
    230: Call("clock_nanosleep", ((_CLOCK,),)),
}

# O_TRUNC without leave to write empties a file that Landlock before version 3 lets be read; O_ACCMODE alone is neither.
_OPEN_FLAGS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE, os.O_TRUNC | os.O_WRONLY, os.O_TRUNC | os.O_RDWR)
_HUGETLB = 0x4_0000  # takes from the host's huge pages
# All but MERGEABLE, which has a kernel thread compare the memory of sessions, HWPOISON and SOFT_OFFLINE.
_ADVICE = (*range(5), *range(8, 12), *range(14, 26), 102, 103)
# WAIT, WAKE, REQUEUE, CMP_REQUEUE, WAKE_OP and the BITSET forms. Those with priority inheritance name a thread.
_FUTEX, _FUTEX_COMMAND = (0, 1, 3, 4, 5, 9, 10), 0x7F
# RLIMIT_CORE stays what it is: at 1 nothing is dumped, at 0 the kernel would still feed a program that handles dumps.
_LIMITS = tuple(kind for kind in range(16) if kind != resource.RLIMIT_CORE)
# REUSEADDR TYPE ERROR SNDBUF RCVBUF KEEPALIVE LINGER RCVTIMEO SNDTIMEO ACCEPTCONN PROTOCOL DOMAIN of SOL_SOCKET: not
# filters (a program for the kernel), PEERPIDFD (a handle on the pool) or PASSCRED.
_SOCKET_OPTIONS = (Arg(1, (socket.SOL_SOCKET,)), Arg(2, (2, 3, 4, 7, 8, 9, 13, 20, 21, 30, 38, 39)))
# GET_PDEATHSIG GET_DUMPABLE SET_NAME GET_NAME GET_SECCOMP CAPBSET_READ GET_SECUREBITS GET_TIMERSLACK
# GET_CHILD_SUBREAPER GET_NO_NEW_PRIVS GET_TID_ADDRESS SET_VMA
_PRCTL = (2, 3, 15, 16, 21, 23, 27, 30, 37, 39, syscalls.PR_GET_TID_ADDRESS, 0x5356_4D41)

CHECKED: Mapping[int, Call] = {
    2: Call("open", ((Arg(1, _OPEN_FLAGS, mask=os.O_TRUNC | os.O_ACCMODE),),)),
    9: Call("mmap", ((Arg(3, (0,), mask=_HUGETLB),),), errno.ENOMEM),
    # The first is isatty. Never TIOCSTI (types into a terminal), FIOSETOWN (signals), or a device's own.
    16: Call(
        "ioctl",
        ((Arg(1, (termios.TCGETS, termios.FIONREAD, termios.FIOCLEX, termios.FIONCLEX, termios.FIONBIO)),),),
        errno.EOPNOTSUPP,  # a copy by FICLONE falls back to an ordinary one on this error only
    ),
    28: Call("madvise", ((Arg(2, _ADVICE),),)),
    44: Call("sendto", ((Arg(4, (0,), wide=True),),)),  # without an address
    53: Call("socketpair", ((Arg(0, (socket.AF_UNIX,)),),)),
    54: Call("setsockopt", (_SOCKET_OPTIONS,)),
    55: Call("getsockopt", (_SOCKET_OPTIONS,)),
    # DUPFD to SETLKW, the locks of open file descriptions, DUPFD_CLOEXEC, GETPIPE_SZ, GET_SEALS. Not SETOWN, SETSIG,
    # SETLEASE, NOTIFY (signals), SETPIPE_SZ (memory of the kernel), ADD_SEALS (files shared with the pool).
    72: Call("fcntl", ((Arg(1, (*range(8), 36, 37, 38, 1030, 1032, 1034)),),)),
    140: Call("getpriority", ((Arg(0, (os.PRIO_PROCESS,)), Arg(1, (0, OWN_PID))),)),
    # SIGKILL at the parent's death, so that it cannot be undone; dumpable or not
    157: Call(
        "prctl",
        (
            (Arg(0, (syscalls.PR_SET_PDEATHSIG,)), Arg(1, (signal.SIGKILL,), wide=True)),
            (Arg(0, (syscalls.PR_SET_DUMPABLE,)), Arg(1, (0, 1), wide=True)),
            (Arg(0, _PRCTL),),
        ),
    ),
    # FS and GS of the thread, which a program's start sets; leave to use wide registers
    158: Call("arch_prctl", ((Arg(0, (*range(0x1001, 0x1005), *range(0x1021, 0x1026))),),)),
    160: Call("setrlimit", ((Arg(0, _LIMITS),),)),
    202: Call("futex", ((Arg(1, _FUTEX, mask=_FUTEX_COMMAND),),), errno.ENOSYS),
    221: Call("fadvise64", ((Arg(3, (0, 1, 2, 3, 5)),),)),  # not DONTNEED, which empties the cache for all
    257: Call("openat", ((Arg(2, _OPEN_FLAGS, mask=os.O_TRUNC | os.O_ACCMODE),),)),
    # Not O_NOTIFICATION_PIPE
    293: Call("pipe2", ((Arg(1, (0,), mask=0xFFFF_FFFF & ~(os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)),),)),
    # The second way only asks. A limit rises only with a capability of the host.
    302: Call("prlimit64", ((_OWN, Arg(1, _LIMITS)), (_OWN, Arg(2, (0,), wide=True)))),
}
# Refused with the error that callers take for "not here", where they would give up on EPERM. clone3 and openat2 have
# their flags in memory, where a filter cannot read them; extended attributes are copied by shutil where there are any.
ABSENT = {435: ("clone3", errno.ENOSYS), 437: ("openat2", errno.ENOSYS)} | {
    number: ("xattr", errno.ENOTSUP) for number in range(188, 200)
}


# ------------------------------------------------------------------------------------------------ assembling

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false (both count from the next one), operand
Body = tuple[Instruction, ...]  # ends in a return on every path
_INSTRUCTION = struct.Struct("<HBBI")
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06


def _ret(action: int) -> Body:
    return ((_RETURN, 0, 0, action),)


def _refuse(number: int = errno.EPERM) -> Body:
    return _ret(ERRNO | number)


def _load(offset: int) -> Body:
    return ((_LOAD, 0, 0, offset),)


def _if(kind: int, operand: int, then: Body, otherwise: Body) -> Body:
    """Both short: a conditional jump reaches 255 instructions."""
    return ((kind, 0, len(then), operand), *then, *otherwise)


def _holds(condition: Arg, then: Body) -> Body:
    """`then` if the condition holds, else what follows it."""
    offset = ARGS + 8 * condition.index
    if condition.wide:
        then = (*_load(offset + 4), (_EQUAL, 0, len(then), 0), *then)
    mask: Body = () if condition.mask == 0xFFFF_FFFF else ((_AND, 0, 0, condition.mask),)
    *others, last = condition.values
    hits = tuple((_EQUAL, len(others) - k, 0, value) for k, value in enumerate(others))
    return (*_load(offset), *mask, *hits, (_EQUAL, 0, len(then), last), *then)


def _checked(call: Call) -> Body:
    ways = (functools.reduce(lambda body, arg: _holds(arg, body), reversed(way), _ret(ALLOW)) for way in call.ways)
    return (*itertools.chain.from_iterable(ways), *_refuse(call.otherwise))


def _clone(gate: bool, allow_fork: bool) -> Body:
    if allow_fork:  # the child of one's parent would be the server's
        fork = _if(_ANY_BIT, syscalls.CLONE_PARENT, _refuse(), _ret(ALLOW))
    elif gate:
        fork = _if(_EQUAL, syscalls.FORK_FLAGS, _ret(NOTIFY), _refuse())
    else:
        fork = _refuse()
    body = _if(_ANY_BIT, syscalls.NAMESPACES, _refuse(), _if(_ANY_BIT, syscalls.CLONE_THREAD, _ret(ALLOW), fork))
    if gate and not allow_fork:
        body = _if(_EQUAL, syscalls.FORK_FLAGS | syscalls.SESSION_FLAGS, _ret(NOTIFY), body)
    body = (*_load(ARGS), *body)
    return (*_load(ARGS + 4), *_if(_EQUAL, 0, body, _refuse()))


def _search(ranges: list[tuple[int, Body]]) -> Body:
    """A binary search by the loaded number, over (first number, body), sorted."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) <= 255:
        return ((_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above)
    return ((_AT_LEAST, 0, 1, ranges[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above)


@functools.lru_cache
def _template(bounded: bool, scoped: bool, gate: bool, allow_exec: bool, allow_fork: bool) -> tuple[bytes, list[int]]:
    """The program and where its operands are to be the own pid.

    bounded: a pid namespace and a read-only root hold what some checks would. scoped: signals cannot leave anyway.
    """
    calls = {number: _ret(ALLOW) for number in (*FREE, *UNTIL_CLOSED)}
    calls |= {number: _checked(call) for number, call in CHECKED.items()}
    calls |= {number: _refuse(error) for number, (_, error) in ABSENT.items()}
    calls |= {number: _ret(ALLOW) if bounded or scoped else _checked(call) for number, call in SIGNALS.items()}
    calls |= {number: _ret(ALLOW) if bounded else _checked(call) for number, call in PROCESS_ARGS.items()}
    calls |= {number: _ret(ALLOW) if bounded else _refuse(0) for number in MODES_AND_TIMES}
    calls |= {number: _ret(ALLOW) for number in TRUNCATE if bounded}
    calls |= {number: _ret(ALLOW) for number in EXEC if allow_exec}
    calls |= {number: _ret(ALLOW) for number in FORKS if allow_fork}
    calls[CLONE] = _clone(gate, allow_fork)
    ranges: list[tuple[int, Body]] = []
    for number in sorted({0, *calls, *(number + 1 for number in calls)}):
        body = calls.get(number, _refuse())
        if not ranges or ranges[-1][1] != body:
            ranges.append((number, body))
    # Another architecture's numbers mean other calls. Those of x32 have bit 30 set: above all of these, so unknown.
    known = ((_EQUAL, 1, 0, AUDIT_ARCH_X86_64), *_refuse())
    code = (*_load(ARCH), *known, *_load(NR), *_search(ranges))
    owns = [at for at, (kind, _, _, operand) in enumerate(code) if kind == _EQUAL and operand == OWN_PID]
    return _packed(code), [at * _INSTRUCTION.size + 4 for at in owns]


def _packed(code: Body) -> bytes:
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


# ------------------------------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Program:
    """A filter in the kernel's form, to be loaded any number of times."""

    code: bytes

    def __len__(self) -> int:
        return len(self.code) // _INSTRUCTION.size

    def instructions(self) -> list[Instruction]:
        return list(_INSTRUCTION.iter_unpack(self.code))


def session_filter(
    own_pid: int | None, gate: bool, allow_exec: bool = False, allow_fork: bool = False, scoped_signals: bool = False
) -> Program:
    """The first filter of a session; `closing_filter` must follow before any code of the session runs.

    own_pid: the only process that may be a target of signals, for levels without a pid namespace of the session's own.
    A fork of it has another pid and cannot signal even itself, unless `scoped_signals`: Landlock (from version 6) holds
    signals back. gate: the exact clone calls `FORK_FLAGS` and `FORK_FLAGS | SESSION_FLAGS` ask the listener, every
    other way to fork is refused; without it all are. allow_fork: forks are free, namespaces never are, and there is
    nothing to ask. Cheap after the first time.
    """
    template, owns = _template(own_pid is None, scoped_signals, gate, allow_exec, allow_fork)
    code = bytearray(template)
    if own_pid is not None:
        for at in owns:
            struct.pack_into("<I", code, at, own_pid)
    return Program(bytes(code))


def closing_filter() -> Program:
    """The second: what the first left open for the hand-over."""
    closed = ((_EQUAL, 0, 1, number) for number in UNTIL_CLOSED)
    refusals = itertools.chain.from_iterable((jump, *_refuse()) for jump in closed)
    return Program(_packed((*_load(NR), *refusals, *_ret(ALLOW))))


class _Fprog(ctypes.Structure):  # struct sock_fprog
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_SECCOMP, _SET_MODE_FILTER = 317, 1
_NEW_LISTENER, _WAIT_KILLABLE_RECV = 1 << 3, 1 << 5


def load(program: Program, listener: bool = False) -> int | None:
    """Put a filter on the calling thread, for ever; it must have no_new_privs. Returns the listener's descriptor.

    Raises OSError: EBUSY if a filter around this process has a listener already.
    """
    fprog = _Fprog(len(program), program.code)
    address = ctypes.addressof(fprog)
    if not listener:
        syscalls.syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, 0, address)
        return None
    try:  # once the pool has read a question, only a deadly signal may take it back
        return syscalls.syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE_RECV, address)
    except OSError as e:
        if e.errno != errno.EINVAL:  # before Linux 5.19
            raise
    return syscalls.syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, address)


# ------------------------------------------------------------------------------------------------ trials


def available() -> str:
    """Empty, or why filters cannot be loaded. Tried in a forked child: for a single-threaded caller."""
    return _trial(listener=False)


def listener_available() -> str:
    """Empty, or why a filter cannot ask the pool. Tried in a forked child: for a single-threaded caller."""
    return _trial(listener=True)


def _trial(listener: bool) -> str:
    if not syscalls.supported():
        return "the machine is not x86-64 Linux"
    if listener and tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (5, 5):
        return "a listener that may let a call through needs Linux 5.5"
    pid = os.fork()
    if pid == 0:
        number = errno.EIO
        try:
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            load(Program(_packed(_ret(ALLOW))), listener)
            number = 0
        except OSError as e:
            number = e.errno or errno.EIO
        finally:
            os._exit(number)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number == 0:
        return ""
    reasons = {
        errno.EBUSY: "a filter around this process has a listener already",
        errno.EINVAL: "the kernel has no seccomp filters" + (" with listeners" if listener else ""),
        errno.ENOSYS: "the kernel has no seccomp call",
        errno.EPERM: "a seccomp filter around this process refuses to load another",
    }
    return reasons.get(number, os.strerror(number) if number > 0 else f"the trial was ended by signal {-number}")
