"""More of the same kind as the rows: system calls that no picture needs."""

from __future__ import annotations

from .case import CONFINED_FILES, Case, Step
from .trial import Trial

# Number and name of calls that a session has no business with, on x86-64. Their arguments are useless on purpose.
FORBIDDEN = {
    135: "personality", 154: "modify_ldt", 163: "acct", 167: "swapon", 168: "swapoff", 171: "setdomainname",
    173: "ioperm", 176: "delete_module", 179: "quotactl", 246: "kexec_load", 248: "add_key",
    249: "request_key", 250: "keyctl", 278: "vmsplice", 303: "name_to_handle_at", 304: "open_by_handle_at",
    313: "finit_module",
    317: "seccomp", 319: "memfd_create", 320: "kexec_file_load", 321: "bpf", 323: "userfaultfd", 425: "io_uring_setup",
    426: "io_uring_enter", 427: "io_uring_register", 428: "open_tree", 429: "move_mount", 430: "fsopen",
    431: "fsconfig",
    432: "fsmount", 433: "fspick", 442: "mount_setattr", 443: "quotactl_fd", 447: "memfd_secret",
    448: "process_mrelease",
    237: "mbind", 238: "set_mempolicy", 151: "mlockall", 103: "syslog", 139: "sysfs", 180: "nfsservctl", 134: "uselib",
    227: "clock_settime", 164: "settimeofday", 212: "lookup_dcookie", 298: "perf_event_open", 216: "remap_file_pages",
}  # fmt: skip
# acct(NULL), swapoff(NULL) and the like do nothing without a right path; -1 is no valid pointer, descriptor or command.
FORBIDDEN_CALLS = "\n".join(
    f"attempt_call('{name}', {number}, -1, -1, -1, -1, -1)" for number, name in FORBIDDEN.items()
)


def _not_run(trial: Trial) -> None:
    trial.expect("ran" not in trial.result.stdout, f"the code of another architecture runs: {trial.result.stdout!r}")
    after = trial.run("1 + 1")
    trial.expect(after.repr == "2", f"the next call ends as {after.status}")


CASES = (
    Case("K01", "calls that no picture needs", "blocked", (FORBIDDEN_CALLS,), attempts=len(FORBIDDEN)),
    Case(
        "K02",
        "32-bit calls through int 0x80",
        "typed",
        (
            """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('53b814000000cd805bc3'))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
pid = run()
print('ran' if pid == os.getpid() else 'refused', pid)
""",
        ),
        check=_not_run,
    ),
    Case(
        "K03",
        "x32 calls",
        "typed",
        ("try:\n    print('ran', call(0x40000000 | 39))\nexcept OSError as e:\n    print(e)",),
        check=_not_run,
    ),
    Case(
        "K04",
        "children by other ways than fork",
        "blocked",
        (
            """
def child(number, *arguments):
    pid = call(number, *arguments)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
attempt('fork', child, 57)
attempt('clone', child, 56, 17, 0, 0, 0, 0)
attempt('clone as os.fork does it', child, 56, 17 | 0x01200000, 0, 0, ctypes.create_string_buffer(8), 0)
attempt('clone with PARENT', child, 56, 17 | 0x8000, 0, 0, 0, 0)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x30020000, 0x31220000):
    attempt(f'clone {flag:#x}', child, 56, 17 | flag, 0, 0, 0, 0)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    attempt(f'clone thread {flag:#x}', call, 56, 0x10f00 | flag, 0, 0, 0, 0)
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
attempt('clone3', child, 435, arguments, 88)
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
attempt('clone3 with a namespace', child, 435, arguments, 88)
attempt('os.fork', lambda: os.fork() or os._exit(0))
attempt('pty.fork', lambda: __import__('pty').fork()[0] or os._exit(0))
attempt('posix_spawn', lambda: os.posix_spawn('/bin/true', ['true'], {}))
attempt('system in C', lambda: libc.system(b'true') and os.close(-1))
""",
        ),
        attempts=20,
        harmless=False,  # a raw fork of a Python with hooks is not a tidy child
    ),
    Case("K05", "vfork", "blocked", ("attempt('vfork', lambda: call(58) or os._exit(0))",), attempts=1, harmless=False),
    Case(
        "K06",
        "settings of the process by prctl",
        "blocked",
        (
            """
for number, name, *arguments in (
    (1, 'no parent-death signal', 0), (1, 'another parent-death signal', 19), (36, 'subreaper', 1),
    (22, 'strict seccomp', 1), (28, 'securebits', 0), (8, 'keep caps', 1), (35, 'mm', 1, -1, 0, 0),
    (0x59616d61, 'ptracer', -1), (47, 'ambient', 2, 0, 0, 0), (33, 'mce', 1), (57, 'io flusher', 1),
    (62, 'core scheduling', 1, 0, 0), (59, 'syscall user dispatch', 1), (38, 'no_new_privs off', 0),
    (41, 'no THP', -1), (26, 'tsc', 2),
):
    attempt(name, call, 157, number, *arguments, reached=(errno.EFAULT,))
""",
        ),
        attempts=16,
        harmless=False,  # strict seccomp or no TSC would end the session
    ),
    Case(
        "K07",
        "priorities, affinity and limits of other processes",
        "blocked",
        (
            """
import resource
attempt('setpriority', os.setpriority, os.PRIO_PROCESS, VICTIM, 19)
attempt('affinity', os.sched_setaffinity, VICTIM, {0, 1})
attempt_call('ioprio_set', 251, 1, VICTIM, 3 << 13)
attempt('scheduler', os.sched_setscheduler, VICTIM, os.SCHED_BATCH, os.sched_param(0))
for pid in (VICTIM, POOL, SERVER, SIBLING):
    attempt(f'prlimit {pid}', resource.prlimit, pid, resource.RLIMIT_NOFILE)
# Of a user without processes: an answer that says so comes from behind the filter.
attempt('priority of a user', os.setpriority, os.PRIO_USER, 4000000, 19, reached=(errno.ESRCH,))
attempt('ioprio of a user', call, 251, 3, 4000000, 3 << 13, reached=(errno.ESRCH,))
import fcntl
r, w = os.pipe()
for name, command, value in (('F_SETOWN', 8, VICTIM), ('F_SETSIG', 10, 9), ('F_SETOWN_EX', 15, 0),
                             ('F_SETLEASE', 1024, 0), ('F_NOTIFY', 1026, 1)):
    attempt(name, fcntl.fcntl, r, command, value, reached=(errno.EFAULT, errno.EINVAL, errno.ENOTDIR))
for name, request in (('FIOASYNC', 0x5452), ('FIOSETOWN', 0x8901), ('SIOCSPGRP', 0x8902)):
    attempt(name, fcntl.ioctl, r, request, (VICTIM).to_bytes(4, 'little'))
event = (ctypes.c_int32 * 16)(0, 0, 9, 4, VICTIM)  # SIGEV_THREAD_ID
attempt('timer to a thread of another', lambda: call(222, 1, event, (ctypes.c_int32 * 2)()))
""",
        ),
        attempts=19,
    ),
    Case(
        "K08",
        "terminals",
        "blocked",
        (
            """
import fcntl
attempt('ptmx', lambda: os.close(os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)))
attempt('tty', lambda: os.close(os.open('/dev/tty', os.O_RDWR)))
attempt('console', lambda: os.close(os.open('/dev/console', os.O_RDWR | os.O_NOCTTY)))
for fd in (0, 1, 2):
    for name, request in (('TIOCSTI', 0x5412), ('TIOCSCTTY', 0x540e), ('TIOCLINUX', 0x541c), ('TIOCSETD', 0x5423)):
        attempt(f'{name} {fd}', fcntl.ioctl, fd, request, b'x' * 8)
""",
        ),
        attempts=15,
        levels=CONFINED_FILES,
    ),
    Case(
        "K09",
        "kernel settings, control groups and devices by path",
        "blocked",
        (
            """
for path in ('/proc', '/proc/self', '/proc/1', '/sys', '/sys/fs/cgroup', '/sys/kernel/security', '/sys/class/net',
             '/dev/pts', '/run', '/boot', '/var/log', '/var/lib', '/home', '/mnt', '/media', '/lost+found'):
    def list_all():
        names = set(os.listdir(path)) - {part for p in [*sys.path, *PREFIXES] for part in p.split('/')}
        return names or os.close(-1)
    attempt('list ' + path, list_all)
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/kernel/hostname',
             '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/tasks', '/sys/kernel/uevent_helper',
             '/proc/self/oom_score_adj', '/proc/self/uid_map',
             '/proc/self/coredump_filter', '/proc/self/attr/current', '/sys/power/state'):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
for path in ('/proc/cmdline', '/proc/mounts', '/proc/self/maps', '/proc/self/cgroup', '/proc/net/tcp', '/proc/kallsyms',
             '/etc/machine-id', '/etc/hostname', '/etc/resolv.conf', '/run/secrets/kubernetes.io/serviceaccount/token',
             '/var/run/docker.sock', '/sys/class/dmi/id/product_uuid', '/proc/keys'):
    attempt(path, size, path)
""",
        ),
        attempts=40,
        levels=CONFINED_FILES,
    ),
    Case(
        "K10",
        "programs without a path",
        "blocked",
        (
            """
def by_memory():
    fd = os.memfd_create('x')
    os.write(fd, open('/bin/true', 'rb').read())
    call(322, fd, b'', (ctypes.c_char_p * 2)(b'x'), None, 0x1000)
attempt('memfd', by_memory)
def by_home():
    with open('run.sh', 'w') as f:
        f.write('#!/bin/sh\\ntrue\\n')
    os.chmod('run.sh', 0o755)
    os.execv('./run.sh', ['run.sh'])
attempt('script in home', by_home)
def by_set_uid():
    with open('suid', 'w'):
        pass
    os.chmod('suid', 0o6755)
    mode = os.stat('suid').st_mode & 0o6000
    return mode if mode and os.stat('suid').st_uid == 0 else os.close(-1)
attempt('set-uid file of root', by_set_uid)
attempt('exec of a descriptor', lambda: os.execve(os.open('/bin/true', os.O_RDONLY), ['true'], {}))
attempt('loader', lambda: os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '/bin/true']))
""",
        ),
        attempts=5,
        harmless=False,  # an exec that works replaces the session
    ),
    Case(
        "K11",
        "kernel memory by pipes, socket buffers and locks",
        "typed",
        (
            """
import fcntl, socket
total, held = 0, []
try:
    for _ in range(200):
        r, w = os.pipe()
        held += [r, w]
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(w, False)
        try:
            while True:
                total += os.write(w, bytes(1 << 16))
        except BlockingIOError:
            pass
except OSError as e:
    print(e)
print('made', total >> 20)
for fd in held:
    os.close(fd)
""",
        ),
        check=lambda trial: trial.expect(
            int(trial.result.stdout.rsplit(" ", 1)[-1]) <= 256, f"{trial.result.stdout!r} MiB of pipe buffers"
        ),
    ),
    Case(
        "K12",
        "user ids and host names",
        "contained",
        (
            "import platform, socket\nprint(os.getuid(), os.getgid(), os.getgroups(), platform.node(), os.getcwd())",
            Step("kept"),
        ),
        check=lambda trial: trial.expect(
            trial.level == "seccomp"
            or not trial.results[0].stdout.startswith("0 0 [0]")
            or trial.level == "namespaces",
            f"it runs as {trial.results[0].stdout}",
        ),
    ),
)
