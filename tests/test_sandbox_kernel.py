"""The kernel layer of the sandbox: the filter run on paper and live, Landlock, clone, capabilities, mounts, cgroups."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyvision_sandbox import cgroup, landlock, seccomp, syscalls
from pyvision_sandbox.syscalls import FORK_FLAGS, NAMESPACES, NEWNS, NEWUSER, SESSION_FLAGS

pytestmark = pytest.mark.skipif(not syscalls.supported(), reason="system call numbers: not x86-64 Linux")

ALLOW, NOTIFY, EPERM = seccomp.ALLOW, seccomp.NOTIFY, seccomp.ERRNO | errno.EPERM
ENOSYS, QUIET = seccomp.ERRNO | errno.ENOSYS, seccomp.ERRNO
ONES, HIGH, PID = (1 << 64) - 1, 1 << 32, 4321
VARIANTS = {
    "namespaces": seccomp.session_filter(None, gate=True),
    "landlock": seccomp.session_filter(PID, gate=True),
    "ungated": seccomp.session_filter(PID, gate=False),
    "forks": seccomp.session_filter(None, gate=True, allow_fork=True),
    "exec": seccomp.session_filter(PID, gate=False, allow_exec=True, allow_fork=True),
}
ALL, GATED, FREELY = tuple(VARIANTS), ("namespaces", "landlock"), ("forks", "exec")
BOUNDED, OWN = ("namespaces", "forks"), ("landlock", "ungated", "exec")  # without and with own_pid

# Written down again, not taken from the module.
REFUSED = dict(
    shmget=29, socket=41, connect=42, bind=49, listen=50, semget=64, msgget=68, chown=92, ptrace=101, setuid=105,
    setpgid=109, setsid=112, setgroups=116, capget=125, rt_sigqueueinfo=129, mknod=133, personality=135,
    setpriority=141, sched_setscheduler=144, modify_ldt=154, pivot_root=155, chroot=161, sync=162, mount=165,
    init_module=175, sched_setaffinity=203, io_setup=206, mq_open=240, mq_notify=244, kexec_load=246, keyctl=250,
    ioprio_set=251, inotify_init=253, migrate_pages=256, unshare=272, splice=275, vmsplice=278, rt_tgsigqueueinfo=297,
    perf_event_open=298, name_to_handle_at=303, open_by_handle_at=304, sendmmsg=307, setns=308, process_vm_readv=310,
    process_vm_writev=311, kcmp=312, memfd_create=319, bpf=321, userfaultfd=323, pidfd_send_signal=424,
    io_uring_setup=425, open_tree=428, move_mount=429, pidfd_open=434, pidfd_getfd=438, process_madvise=440,
    landlock_create_ruleset=444, memfd_secret=447, process_mrelease=448,
)  # fmt: skip
CHECKED = dict(
    open=2, mmap=9, ioctl=16, madvise=28, sendto=44, sendmsg=46, recvmsg=47, socketpair=53, setsockopt=54,
    getsockopt=55, clone=56, fork=57, vfork=58, execve=59, kill=62, fcntl=72, truncate=76, chmod=90, fchmod=91,
    getpgid=121, capset=126, utime=132, getpriority=140, prctl=157, arch_prctl=158, setrlimit=160, setxattr=188,
    fremovexattr=199, tkill=200, futex=202, sched_getaffinity=204, fadvise64=221, timer_create=222, clock_gettime=228,
    tgkill=234, openat=257, utimensat=280, pipe2=293, prlimit64=302, seccomp=317, execveat=322, clone3=435,
    openat2=437, fchmodat2=452,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ the filter on paper


def run(program: seccomp.Program, number: int, *args: int, arch: int = seccomp.AUDIT_ARCH_X86_64) -> int:
    """What the program returns for this call: classic BPF over struct seccomp_data, as the kernel runs it."""
    words = [value & ONES for value in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<IIQ6Q", number, arch, 0x7F00_0000_0000, *words)
    code, at, a = program.instructions(), 0, 0
    while True:
        kind, if_true, if_false, operand = code[at]
        at += 1
        taken = {0x15: a == operand, 0x35: a >= operand, 0x45: a & operand}
        if kind in taken:
            at += if_true if taken[kind] else if_false
        elif kind == 0x20:
            (a,) = struct.unpack_from("<I", data, operand)
        elif kind == 0x54:
            a &= operand
        elif kind == 0x05:
            at += operand
        else:
            assert kind == 0x06
            return operand


@pytest.mark.parametrize("variant", VARIANTS)
def test_unknown_calls_are_refused_and_nothing_kills(variant: str) -> None:
    program = VARIANTS[variant]
    tables = (
        seccomp.FREE, seccomp.UNTIL_CLOSED, seccomp.EXEC, seccomp.FORKS, seccomp.MODES_AND_TIMES, seccomp.TRUNCATE,
        seccomp.PROCESS_ARGS, seccomp.SIGNALS, seccomp.CHECKED, seccomp.ABSENT, {seccomp.CLONE: "clone"},
    )  # fmt: skip
    known = [number for table in tables for number in table]
    assert len(known) == len(set(known)), "a call stands in two tables"
    assert not set(known) & set(REFUSED.values())
    for number in (*range(600), 0x3FFF_FFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF):
        for args in ((), (ONES,) * 6):
            if number not in known:
                assert run(program, number, *args) == EPERM, number
            assert run(program, number | 0x4000_0000, *args) == EPERM, f"x32 {number}"
            for arch in (0x4000_0003, 0xC000_00B7, 0):
                assert run(program, number, *args, arch=arch) == EPERM, f"{arch:#x} {number}"
    for number in (*seccomp.FREE, *seccomp.UNTIL_CLOSED):
        assert run(program, number) == run(program, number, *(ONES,) * 6) == ALLOW
    code = program.instructions()
    actions = {operand & 0xFFFF_0000 for kind, _, _, operand in code if kind == 0x06}
    assert actions == {ALLOW, seccomp.ERRNO} | ({NOTIFY} if variant in GATED else set())
    assert len(code) < 600 and code[-1][0] == 0x06
    assert variant in BOUNDED or not any(operand == seccomp.OWN_PID for _, _, _, operand in code)


def test_names_beside_the_numbers_are_the_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the C library's headers (asm/unistd_64.h) are not installed")
    true = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    ours = {name: number for table in (REFUSED, CHECKED) for name, number in table.items()}
    for table in (seccomp.FREE, seccomp.UNTIL_CLOSED, seccomp.EXEC, seccomp.FORKS, seccomp.MODES_AND_TIMES):
        ours |= {name: number for number, name in table.items()}
    for table in (seccomp.CHECKED, seccomp.PROCESS_ARGS, seccomp.SIGNALS):
        ours |= {call.name: number for number, call in table.items()}
    known = ours.keys() & true.keys()  # an older header lacks the newest
    assert {name: ours[name] for name in known} == {name: true[name] for name in known}
    assert {true[name] for name in true if name.endswith("xattr")} == set(range(188, 200))


THREAD, SPAWN = 0x3D_0F00, 0x4100 | signal.SIGCHLD  # what pthread_create and posix_spawn pass
PRIVATE, BITS, TRUNC = FORK_FLAGS | SESSION_FLAGS, [1 << bit for bit in range(64)], os.O_TRUNC
RULES: tuple[tuple[str, tuple[str, ...], int, list[Any]], ...] = (
    ("clone", ALL, ALLOW, [THREAD]),
    ("clone", GATED, NOTIFY, [FORK_FLAGS, PRIVATE]),
    ("clone", GATED, EPERM, [signal.SIGCHLD, SPAWN, 0, *(FORK_FLAGS ^ bit for bit in BITS if bit != 0x1_0000)]),
    ("clone", ("ungated",), EPERM, [FORK_FLAGS, PRIVATE, SPAWN]),
    ("clone", FREELY, ALLOW, [FORK_FLAGS, SPAWN, signal.SIGCHLD]),
    ("clone", FREELY, EPERM, [FORK_FLAGS | 0x8000, PRIVATE]),  # CLONE_PARENT: a child of the server
    ("clone", ALL, EPERM, [f | b for f in (THREAD, FORK_FLAGS) for b in BITS if b & NAMESPACES or b >= HIGH]),
    ("clone", ALL, EPERM, [PRIVATE | b for b in BITS if b & NAMESPACES & ~SESSION_FLAGS or b >= HIGH]),
    *((name, ALL, ENOSYS, [0, ONES]) for name in ("clone3", "openat2")),
    *((name, (*GATED, "ungated"), EPERM, [0, ONES]) for name in ("fork", "vfork")),
    *((name, FREELY, ALLOW, [0, ONES]) for name in ("fork", "vfork")),
    *((name, (*GATED, "ungated", "forks"), EPERM, [0, ONES]) for name in ("execve", "execveat")),
    *((name, ("exec",), ALLOW, [0, ONES]) for name in ("execve", "execveat")),
    # processes; the kernel reads ints, so the high word does not count
    *((name, OWN, ALLOW, [PID, PID | 7 << 32]) for name in ("kill", "tkill", "tgkill")),
    *((name, OWN, EPERM, [0, 1, -1, -PID, PID + 1, PID + HIGH + 1]) for name in ("kill", "tkill", "tgkill")),
    *((name, BOUNDED, ALLOW, [0, 1, -1, PID]) for name in ("kill", "tkill", "tgkill")),
    *((name, OWN, ALLOW, [0, PID]) for name in ("getpgid", "sched_getaffinity", "prlimit64")),
    *((name, OWN, EPERM, [1, PID + 1, -1]) for name in ("getpgid", "sched_getaffinity", "prlimit64")),
    ("prlimit64", BOUNDED, EPERM, [1, PID]),
    ("prlimit64", ALL, ALLOW, [(0, resource.RLIMIT_CORE, 0), (0, resource.RLIMIT_NOFILE, 1)]),
    ("prlimit64", ALL, EPERM, [(0, resource.RLIMIT_CORE, 1), (0, resource.RLIMIT_CORE, HIGH)]),
    ("setrlimit", ALL, ALLOW, [resource.RLIMIT_NOFILE]),
    ("setrlimit", ALL, EPERM, [resource.RLIMIT_CORE]),
    ("getpriority", ALL, ALLOW, [(os.PRIO_PROCESS, 0)]),
    ("getpriority", ALL, EPERM, [(os.PRIO_PROCESS, 1), (os.PRIO_USER, 0)]),
    ("clock_gettime", ALL, ALLOW, [time.CLOCK_MONOTONIC, time.CLOCK_PROCESS_CPUTIME_ID]),
    *((name, OWN, EPERM, [-6, 0xFFFF_FFFA]) for name in ("clock_gettime", "timer_create")),
    ("futex", ALL, ALLOW, [(0, command | more) for command in (0, 1, 3, 4, 5, 9, 10) for more in (0, 128, 384)]),
    ("futex", ALL, ENOSYS, [(0, command | more) for command in (6, 7, 8, 11, 12, 13) for more in (0, 128)]),
    ("socketpair", ALL, ALLOW, [socket.AF_UNIX]),
    ("socketpair", ALL, EPERM, [socket.AF_INET, socket.AF_INET6, 16, 38, 40]),
    ("sendto", ALL, ALLOW, [(3, 0x1000, 10, 0, 0, 0)]),
    ("sendto", ALL, EPERM, [(3, 0x1000, 10, 0, address, 16) for address in BITS]),
    *((name, ALL, ALLOW, [0, ONES]) for name in ("recvmsg", "capset")),
    ("getsockopt", ALL, ALLOW, [(3, 1, 3), (3, 1, 4), (3, 1, 8)]),
    ("getsockopt", ALL, EPERM, [(3, 1, 17), (3, 1, 26), (3, 1, 59), (3, 1, 77), (3, 6, 8)]),  # PEERCRED .. PEERPIDFD
    ("setsockopt", ALL, ALLOW, [(3, 1, 7), (3, 1, 8), (3, 1, 20)]),
    ("setsockopt", ALL, EPERM, [(3, 1, 16), (3, 1, 26), (3, 1, 50), (3, 1, 51), (3, 6, 8)]),  # PASSCRED, filters
    ("open", ALL, ALLOW, [(0, flags) for flags in (0, 1 | TRUNC | os.O_CREAT, 2 | TRUNC, os.O_CLOEXEC, 3)]),
    ("openat", ALL, ALLOW, [(0, 0, flags) for flags in (0, 1 | TRUNC | os.O_CREAT, 2 | TRUNC, os.O_CLOEXEC, 3)]),
    *((name, ALL, EPERM, [(0, TRUNC, TRUNC), (0, 3 | TRUNC, 3 | TRUNC)]) for name in ("open", "openat")),
    ("fcntl", ALL, ALLOW, [(3, command) for command in (*range(8), 36, 37, 38, 1030, 1032)]),
    ("fcntl", ALL, EPERM, [(3, command) for command in (8, 10, 15, 1024, 1026, 1031, 1033, 0x7FFF_FFFF)]),
    ("ioctl", ALL, ALLOW, [(3, request) for request in (0x5401, 0x541B, 0x5450, 0x5451, 0x5421)]),
    # TIOCSTI TIOCLINUX TIOCSPGRP FIOSETOWN FICLONE
    ("ioctl", ALL, seccomp.ERRNO | errno.EOPNOTSUPP, [(3, r) for r in (0x5412, 0x541C, 0x5410, 0x8901, 0x4004_9409)]),
    ("fadvise64", ALL, EPERM, [(3, 0, 0, 4)]),
    ("pipe2", ALL, ALLOW, [(0, os.O_CLOEXEC | os.O_NONBLOCK)]),
    ("pipe2", ALL, EPERM, [(0, os.O_EXCL)]),  # a notification pipe
    *((name, BOUNDED, ALLOW, [0]) for name in ("chmod", "fchmod", "utime", "utimensat", "fchmodat2", "truncate")),
    *((name, OWN, QUIET, [0]) for name in ("chmod", "fchmod", "utime", "utimensat", "fchmodat2")),
    ("truncate", OWN, EPERM, [0]),
    *((name, ALL, seccomp.ERRNO | errno.ENOTSUP, [0]) for name in ("setxattr", "fremovexattr")),
    ("mmap", ALL, ALLOW, [(0, 4096, 3, 0x22)]),
    ("mmap", ALL, seccomp.ERRNO | errno.ENOMEM, [(0, 4096, 3, 0x40022)]),  # MAP_HUGETLB
    ("madvise", ALL, ALLOW, [(0, 0, advice) for advice in (4, 8, 14, 23)]),
    ("madvise", ALL, EPERM, [(0, 0, advice) for advice in (12, 100, 101)]),
    ("prctl", ALL, ALLOW, [(1, signal.SIGKILL), (4, 0), (4, 1), 15, 16, 40, 0x5356_4D41]),
    ("prctl", ALL, EPERM, [(1, 0), (1, 15), *((1, signal.SIGKILL | bit) for bit in BITS[32:]), (4, 2), (4, 1 | HIGH)]),
    # SET_SECCOMP CAPBSET_DROP SECUREBITS SET_MM SUBREAPER AMBIENT SYSCALL_DISPATCH SCHED_CORE MEMORY_MERGE PTRACER
    ("prctl", ALL, EPERM, [22, 24, 28, 35, 36, 47, 59, 62, 67, 0x5961_6D61]),
    ("arch_prctl", ALL, ALLOW, [0x1002]),
    ("arch_prctl", ALL, EPERM, [0x2001]),
)  # fmt: skip


def test_arguments_are_checked() -> None:
    for name, variants, want, cases in RULES:
        for variant in variants:
            for case in cases:
                args = case if isinstance(case, tuple) else (case,)
                got = run(VARIANTS[variant], CHECKED[name], *args)
                assert got == want, f"{name}{args} at {variant}: {got:#x}"
    closed = [number for number in range(500) if run(seccomp.closing_filter(), number) != ALLOW]
    assert closed == [CHECKED["sendmsg"], CHECKED["seccomp"]]


# ------------------------------------------------------------------------------------------------ live


def forked(body: Callable[[], Any]) -> Any:
    """What `body` returns in a forked child, as JSON carries it; its error is this test's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(10)
            os.write(writer, json.dumps({"value": body()}).encode())
        except BaseException as e:
            os.write(writer, json.dumps({"error": f"{type(e).__name__}: {e}"}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answer = json.loads(text or json.dumps({"error": f"the child ended with {status}"}))
    assert "error" not in answer, answer["error"]
    return answer["value"]


def error_of(call: Callable[..., Any], *args: Any) -> int:
    """The errno that it fails with, 0 if it works."""
    try:
        call(*args)
    except OSError as e:
        return e.errno or -1
    return 0


def confine(own_pid: bool = True, **options: bool) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.load(seccomp.session_filter(os.getpid() if own_pid else None, gate=False, **options))
    seccomp.load(seccomp.closing_filter())


def restrict(rules: landlock.Ruleset) -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    rules.restrict_self()


@pytest.fixture(scope="module")
def filters() -> None:
    if why := seccomp.available():
        pytest.skip(f"seccomp: {why}")


@pytest.fixture(scope="module")
def listeners() -> None:
    if why := seccomp.listener_available():
        pytest.skip(f"seccomp listener: {why}")


@pytest.fixture(scope="module")
def landlocked() -> int:
    assert [landlock.handled(version) for version in (1, 2, 3, 5, 9)] == [2**n - 1 for n in (13, 14, 15, 16, 16)]
    if why := landlock.available():
        pytest.skip(f"Landlock: {why}")
    return landlock.abi()


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        forked(lambda: os.waitpid(syscalls.clone(SESSION_FLAGS) or os._exit(0), 0)[1])
    except AssertionError as e:
        pytest.skip(f"user, pid and mount namespaces: {str(e).splitlines()[0]}")


@pytest.mark.usefixtures("filters")
def test_a_confined_process(tmp_path: Path) -> None:
    parent, path = os.getpid(), str(tmp_path / "file")
    Path(path).write_text("x")
    os.chmod(path, 0o640)

    def body() -> list[Any]:
        confine()
        os.chmod(path, 0)
        os.utime(path, (0, 0))
        status = os.stat(path)
        raw = {error_of(syscalls.syscall, name, number, *(0,) * 6) for name, number in REFUSED.items()}
        refused = [
            error_of(call, *args)
            for call, *args in (
                (os.truncate, path, 0), (os.open, path, os.O_RDONLY | os.O_TRUNC), (socket.socket,), (os.fork,),
                (os.execv, "/bin/true", ["true"]), (subprocess.run, ["/bin/true"]), (syscalls.clone, NEWUSER),
                (os.kill, parent, 0), (os.kill, -1, 0), (resource.prlimit, parent, resource.RLIMIT_NOFILE),
                (fcntl.fcntl, 0, fcntl.F_SETOWN, parent), (syscalls.prctl, syscalls.PR_SET_PDEATHSIG, 0),
                (syscalls.syscall, "x32 getpid", 39 | 1 << 30), (seccomp.load, seccomp.closing_filter()),
                (socket.send_fds, socket.socketpair()[0], [b"N"], [0]),
            )
        ]  # fmt: skip
        works = [error_of(os.kill, os.getpid(), 0), error_of(syscalls.clear_capabilities)]
        return [oct(status.st_mode & 0o777), status.st_mtime > 1e9, sorted(raw), sorted(set(refused)), works]

    assert forked(body) == ["0o640", True, [errno.EPERM], [errno.EPERM], [0, 0]]
    assert Path(path).read_text() == "x"


@pytest.mark.usefixtures("filters")
def test_the_32_bit_gate() -> None:
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000 cd80 c3"))  # getpid there, writev here
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    try:
        assert forked(lambda: call() == os.getpid())
    except AssertionError:
        pytest.skip("the kernel runs no 32-bit system calls (CONFIG_IA32_EMULATION)")
    assert forked(lambda: (confine(), call())[1]) == -errno.EPERM


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize("own_pid", [True, False])
def test_ordinary_use_passes(own_pid: bool, tmp_path: Path) -> None:
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")

    def body() -> list[Any]:
        confine(own_pid)
        os.chdir(tmp_path)
        tempfile.tempdir = str(tmp_path)
        image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).resize((8, 8)).save("a.png")
        shutil.copy("a.png", "b.png")
        shutil.copy2("a.png", "c.png")
        shutil.copytree(".", "d")
        with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory():
            file.write(b"x")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            numbers = list(pool.map(abs, [-1, -2, -3]))
        asyncio.run(asyncio.sleep(0.001))
        signal.signal(signal.SIGUSR1, lambda *_: numbers.append(0))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        numbers.append(int(np.linalg.matrix_rank(np.eye(64) @ np.eye(64))))
        left, right = socket.socketpair()
        left.settimeout(1)
        left.sendall(b"hello")
        return [
            numbers,
            image.open("c.png").size,
            right.recv(5).decode(),
            sorted(os.listdir("d")),
            os.isatty(left.fileno()),
        ]

    assert forked(body) == [[1, 2, 3, 0, 0, 64], [8, 8], "hello", ["a.png", "b.png", "c.png"], False]


@pytest.mark.usefixtures("filters")
def test_programs_where_they_are_allowed() -> None:
    def body() -> list[int]:
        confine(allow_fork=True, allow_exec=True)
        done = subprocess.run(["/bin/sh", "-c", "ls / | wc -l; exit 3"], capture_output=True)
        return [done.returncode, int(done.stdout) > 0, error_of(syscalls.clone, NEWUSER)]

    assert forked(body) == [3, True, errno.EPERM]


@pytest.mark.usefixtures("listeners", "namespaces")
def test_forks_are_asked_for() -> None:
    receive, send, let_through = 0xC050_2100, 0xC018_2101, 1

    def session(channel: socket.socket) -> list[int]:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        fd = seccomp.load(seccomp.session_filter(None, gate=True), listener=True)
        socket.send_fds(channel, [b"N"], [fd or -1])
        seccomp.load(seccomp.closing_filter())
        got = [error_of(os.fork)]
        for flags in (0, SESSION_FLAGS):
            pid = syscalls.clone(flags)
            if pid == 0:
                os._exit(7 if (os.getpid() == 1) == bool(flags) else 8)
            got.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return got

    def body() -> list[Any]:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                theirs.sendall(json.dumps(session(theirs)).encode())
            finally:
                os._exit(0)
        (gate,), seen = socket.recv_fds(ours, 1, 1)[1], []
        for answer in (False, True, True):
            poll = select.poll()
            poll.register(gate, select.POLLIN)
            assert poll.poll(5000)
            question = bytearray(80)
            fcntl.ioctl(gate, receive, question)
            ident, _, _, number, _, _, flags = struct.unpack_from("<QIIiIQQ", question)
            seen.append([number, flags])
            reply = (0, let_through) if answer else (-errno.EPERM, 0)
            fcntl.ioctl(gate, send, bytearray(struct.pack("<QqiI", ident, 0, *reply)))
        return [seen, json.loads(ours.recv(100))]

    assert forked(body) == [[[56, FORK_FLAGS], [56, FORK_FLAGS], [56, PRIVATE]], [errno.EPERM, 7, 7]]


@pytest.mark.usefixtures("listeners")
def test_one_listener_only() -> None:
    def body() -> list[Any]:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        everything = seccomp.Program(struct.pack("<HBBI", 6, 0, 0, ALLOW))
        assert seccomp.load(everything, listener=True) is not None
        return [error_of(seccomp.load, everything, True), seccomp.listener_available(), seccomp.available()]

    assert forked(body) == [errno.EBUSY, "a filter around this process has a listener already", ""]


# ------------------------------------------------------------------------------------------------ clone and the rest


def test_clone_is_a_fork() -> None:
    def body() -> list[Any]:
        ran: list[str] = []
        note = [lambda name=name: ran.append(name) for name in ("before", "child", "parent")]
        os.register_at_fork(before=note[0], after_in_child=note[1], after_in_parent=note[2])
        reader, writer = os.pipe()
        pid = syscalls.clone()
        if pid == 0:
            # The C library's cached id is the child's: else the signal would name a thread of the parent.
            signal.raise_signal(signal.SIGCHLD)
            mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
            same = os.getpid() == syscalls.syscall("gettid", 186)
            os.write(writer, json.dumps([same, os.getpid(), ran, mask]).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        same, child, in_child, mask = json.loads(os.read(reader, 1000))
        refused = error_of(syscalls.clone, syscalls.CLONE_THREAD)  # after it the interpreter's locks are free again
        return [same, child == pid, in_child, mask, refused, ran]

    assert forked(body) == [True, True, ["before", "child"], [], errno.EINVAL, ["before", "parent"] * 2]


@pytest.mark.usefixtures("namespaces")
def test_mounts_and_a_new_root() -> None:
    def body() -> list[Any]:
        uid, gid, bind = os.getuid(), os.getgid(), syscalls.MS_BIND
        syscalls.unshare(NEWUSER | NEWNS)
        for name, text in (("setgroups", "deny"), ("gid_map", f"0 {gid} 1"), ("uid_map", f"0 {uid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        safe = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount(None, "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
        syscalls.mount("tmpfs", "/tmp", "tmpfs", safe, "size=1m,mode=755")
        os.mkdir("/tmp/inner")
        syscalls.mount("/tmp/inner", "/tmp/inner", None, bind)
        syscalls.mount(None, "/tmp/inner", None, bind | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | safe)
        read_only = error_of(os.mkdir, "/tmp/inner/x")
        syscalls.umount("/tmp/inner")
        writable = error_of(os.mkdir, "/tmp/inner/x")
        syscalls.pivot_root("/tmp")
        return [read_only, writable, os.listdir("/"), os.getcwd(), error_of(syscalls.umount, "/nowhere")]

    assert forked(body) == [errno.EROFS, 0, ["inner"], "/", errno.ENOENT]


def test_capabilities_descriptors_and_errors() -> None:
    def body() -> list[Any]:
        for fd in (200, 201, 205):
            os.dup2(0, fd)
        syscalls.close_range(200, 201)
        syscalls.mallopt(syscalls.M_TOP_PAD, 1 << 20)
        syscalls.drop_capabilities()
        kinds = "Inh|Prm|Eff|Amb" + ("|Bnd" if os.getuid() == 0 else "")
        sets = re.findall(rf"Cap(?:{kinds}):\s*(\w+)", Path("/proc/self/status").read_text())
        return [*(error_of(os.fstat, fd) for fd in (200, 201, 205)), *set(sets)]

    assert forked(body) == [errno.EBADF, errno.EBADF, 0, "0" * 16]
    for call, *args in ((syscalls.setns, -1, 0), (syscalls.prctl, 4, 9), (syscalls.mount, None, "/no", None, 4096)):
        with pytest.raises(OSError, match=call.__name__):
            call(*args)


# ------------------------------------------------------------------------------------------------ Landlock


@pytest.mark.usefixtures("landlocked")
def test_landlock_files(tmp_path: Path) -> None:
    for name in ("read", "list", "home", "home2", "other"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    read, shown, home1, home2, other = (str(tmp_path / name) for name in ("read", "list", "home", "home2", "other"))
    alone, new, write = f"{other}/file", "/not/there", os.O_WRONLY | os.O_CREAT
    rules = landlock.Ruleset([read, alone, new, "/dev/null/x"], [shown], [], ["/dev/null"])

    def body(home: str, foreign: str) -> list[list[int]]:
        rules.add_write(home)
        restrict(rules)
        allowed = (
            (os.open, f"{read}/file", os.O_RDONLY), (os.listdir, f"{read}/sub"), (os.listdir, f"{shown}/sub"),
            (os.open, alone, os.O_RDONLY), (os.open, "/dev/null", os.O_RDWR), (os.open, f"{home}/new", write),
            (os.truncate, f"{home}/new", 5), (os.rename, f"{home}/new", f"{home}/renamed"), (os.listdir, home),
        )  # fmt: skip
        refused = (
            (os.open, f"{read}/file", os.O_WRONLY), (os.open, f"{read}/new", write), (os.unlink, f"{read}/file"),
            (os.open, f"{shown}/file", os.O_RDONLY), (os.listdir, other), (os.open, alone, os.O_WRONLY),
            (os.open, "/etc/passwd", os.O_RDONLY), (os.open, f"{foreign}/file", write), (os.listdir, "/"),
            (os.mkfifo, f"{shown}/fifo"), (os.execv, f"{home}/file", ["file"]),
        )  # fmt: skip
        return [[error_of(call, *args) for call, *args in calls] for calls in (allowed, refused)]

    for pair in ((home1, home2), (home2, home1)):  # what one process adds is not the next one's
        os.chmod(f"{pair[0]}/file", 0o755)
        assert forked(lambda pair=pair: body(*pair)) == [[0] * 9, [errno.EACCES] * 11]
    rules.close()


@pytest.mark.usefixtures("landlocked")
def test_landlock_running_is_a_choice() -> None:
    def body(execute: bool) -> int:
        restrict(landlock.Ruleset(["/usr", "/lib", "/lib64", "/bin"], execute=execute))
        return error_of(subprocess.run, ["/bin/true"])

    assert [forked(lambda: body(True)), forked(lambda: body(False))] == [0, errno.EACCES]


def test_landlock_sockets_and_signals(landlocked: int) -> None:
    if landlocked < landlock.ABI_WITH_TCP:
        pytest.skip(f"Landlock {landlocked} governs no TCP (version 4, Linux 6.7)")
    parent, scopes = os.getpid(), landlocked >= landlock.ABI_WITH_SCOPES

    def body() -> list[int]:
        restrict(landlock.Ruleset())
        tcp, unix = socket.socket(), socket.socket(socket.AF_UNIX)
        got = [error_of(tcp.bind, ("127.0.0.1", 0)), error_of(tcp.connect, listener.getsockname())]
        scoped = [error_of(unix.connect, abstract.getsockname()), error_of(os.kill, parent, 0)]
        return [*got, *(scoped if scopes else []), error_of(os.kill, os.getpid(), 0)]

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0pyvision-{parent}")
        abstract.listen()
        assert forked(body) == [errno.EACCES, errno.EACCES, *([errno.EPERM, errno.EPERM] if scopes else []), 0]


# ------------------------------------------------------------------------------------------------ control groups


def test_where_the_own_group_lies() -> None:
    unified, memory = cgroup.mounts(
        "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
        "31 24 0:27 /docker/ab /sys/fs/c\\040g/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    )
    assert memory == cgroup.Mount("/sys/fs/c g/memory", "/docker/ab", frozenset({"rw", "memory"}), False)
    table = "12:memory:/docker/ab/x\n1:name=systemd:/no\n0::/user.slice/a.scope\n"
    assert cgroup.own_folder(unified, table) == "/sys/fs/cgroup/user.slice/a.scope"
    assert cgroup.own_folder(unified, "0::/\n") == "/sys/fs/cgroup"
    assert cgroup.own_folder(memory, table) == "/sys/fs/c g/memory/x"
    for outside in ("12:memory:/docker/abc\n", "12:memory:/\n", "3:pids:/docker/ab\n", "0::/../b\n", ""):
        assert cgroup.own_folder(memory, outside) is cgroup.own_folder(unified, outside) is None


def test_groups_limit_freeze_kill_and_go() -> None:
    groups = cgroup.find()
    if not groups:
        with pytest.raises(OSError):
            groups.create("pyvision-none", 1 << 26, 16)
        pytest.skip(f"control groups: {groups.why}")
    group = groups.create(f"pyvision-test-{os.getpid()}", 48 << 20, 16)
    reader, writer = os.pipe()
    children = []
    for size in (1 << 30, 1 << 10):  # the first is ended by the limit
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(10)
            os.read(reader, 1)
            bytearray(size)
            signal.pause()
            os._exit(0)
        group.add(children[-1])
    try:
        assert sorted(group.pids()) == sorted(children)
        os.write(writer, b"xx")
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == -signal.SIGKILL
        assert group.oom_kills() == 1 and 0 < group.memory() <= 48 << 20
        group.freeze(True)
        group.kill()
        assert os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1]) == -signal.SIGKILL
    finally:
        group.kill()
        group.remove()
        groups.close()
    assert groups.why == "closed"
