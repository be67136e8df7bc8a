"""C. Processes and signals."""

from __future__ import annotations

import os
import re

from pyvision_sandbox import Mechanism, observation_text

from .case import Case
from .trial import Trial

CHILDREN = {"allow_fork": True}
PROGRAMS = {"allow_exec": True, "allow_fork": True}
with open("/proc/loadavg") as _file:
    _HOST_THREADS = int(_file.read().split()[3].split("/")[1])
_MOST_PROCESSES = 150  # and threads, of a session: Policy.threads and what the runner itself needs


def _few_processes(most: int):
    def check(trial: Trial) -> None:
        made = re.search(r"made (\d+)", trial.result.stdout)
        trial.expect(
            made is not None and int(made[1]) <= most, f"{trial.result.stdout[:80]!r}, at most {most} are right"
        )

    return check


def _user_ids(trial: Trial) -> Mechanism:
    return next(m for m in trial.pool.report.mechanisms if m.name == "user ids")


def _few_threads(trial: Trial) -> None:
    """Exact where a session has an id of its own; else its user's other threads must be let through as well."""
    own = trial.level == "namespaces" or _user_ids(trial).on
    _few_processes(_MOST_PROCESSES if own else 4 * _MOST_PROCESSES + _HOST_THREADS)(trial)


def _no_rights(trial: Trial) -> None:
    """What the host's kernel says of the session's process."""
    status = trial.host_status()
    # An ordinary user has no right to shrink the bounding set; without new privileges it bounds nothing.
    bounding = ("CapBnd",) if os.geteuid() == 0 or trial.level == "namespaces" else ()
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", *bounding):
        trial.expect(int(status[name], 16) == 0, f"{name} is {status[name]}")
    trial.expect(status["NoNewPrivs"] == "1", "no_new_privs is off")
    trial.expect(status["Seccomp"] == "2", "no seccomp filter is loaded")
    ids = _user_ids(trial)
    if trial.level == "namespaces" or ids.on or os.geteuid() != 0:
        trial.expect("0" not in status["Uid"].split(), f"it runs as the host's root: {status['Uid']}")
    elif trial.level == "landlock":  # only where no other user could read the interpreter, and the report says so
        trial.expect("cannot enter the folders of this interpreter" in ids.why, f"it runs as root: {ids.why}")


def _one_line(trial: Trial) -> None:
    if trial.result.status == "ok":
        trial.expect(trial.result.repr == "[1, 2]", f"it answers {trial.result.repr}")
    else:
        last = observation_text(trial.result).strip().splitlines()[-1]
        trial.expect("not permitted" in last.lower() or "permission" in last.lower(), f"the model reads {last!r}")


def fork_bomb(tries: int) -> str:
    return f"""
made = refused = 0
for _ in range({tries}):
    try:
        pid = os.fork()
    except OSError:
        refused += 1
        continue
    if pid == 0:
        time.sleep(1)
        os._exit(0)
    made += 1
print('made', made, 'refused', refused)
"""


TWENTY = """
for _ in range(20):
    try:
        pid = os.fork()
    except OSError:
        continue
    if pid == 0:
        os._exit(0)
time.sleep(0.05)
"""
POOL_OF_TWO = "import multiprocessing\nwith multiprocessing.Pool(2) as p: r = p.map(abs, [-1, -2])\nr"

CASES = (
    Case("T19", "a fork bomb", "limited", (fork_bomb(60),), check=_few_processes(0)),
    Case(
        "T19f",
        "a fork bomb where forks are allowed",
        "limited",
        (fork_bomb(200),),
        policy=CHILDREN,
        check=_few_processes(_MOST_PROCESSES),
    ),
    Case(
        "T20",
        "signals to other processes",
        "blocked",
        (
            """
import signal
def parent():
    if os.getppid() == 0:
        raise ProcessLookupError('no parent is visible')
    os.kill(os.getppid(), 0)
attempt('parent', parent)
others = (VICTIM, POOL, SERVER, SIBLING)
def everyone():
    os.kill(-1, 0)
    reached = []  # the kernel answers 0 even where it has refused each single one
    for pid in others:
        try: os.kill(pid, 0)
        except OSError: continue
        reached.append(pid)
    return reached or os.close(-1)
attempt('everyone', everyone)
for pid in others:
    attempt(f'kill {pid}', os.kill, pid, 0)
    attempt(f'killpg {pid}', os.killpg, pid, 0)
    attempt_call(f'tkill {pid}', 200, pid, 0)
    attempt_call(f'tgkill {pid}', 234, pid, pid, 0)
    info = (ctypes.c_char * 128)()
    info[8:12] = (-1 & 0xffffffff).to_bytes(4, 'little')  # SI_QUEUE
    attempt_call(f'rt_sigqueueinfo {pid}', 129, pid, 0, info)
    attempt_call(f'rt_tgsigqueueinfo {pid}', 297, pid, pid, 0, info)
    attempt_call(f'pidfd_open {pid}', 434, pid, 0)
attempt_call('pidfd_send_signal', 424, 0, 0, None, 0)
""",
        ),
        attempts=31,
    ),
    Case(
        "T21",
        "SIGKILL to oneself",
        "typed",
        ("import signal; os.kill(os.getpid(), 9); time.sleep(0.2); print('still here')",),
        check=lambda trial: trial.expect(
            trial.result.status == "crashed" or "still here" in trial.result.stdout,
            f"it ended as {trial.result.status}",
        ),
    ),
    Case(
        "T22",
        "ptrace and the memory of other processes",
        "blocked",
        (
            """
attempt_call('seize', 101, 0x4206, VICTIM, 0, 0)  # unlike ATTACH it does not stop the other
for pid in (VICTIM, POOL, SERVER, SIBLING):
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(16)), 16)
    remote = (ctypes.c_uint64 * 2)(4096, 16)
    for number, name in ((310, 'process_vm_readv'), (311, 'process_vm_writev')):
        attempt_call(f'{name} {pid}', number, pid, local, 1, remote, 1, 0)
    attempt_call(f'kcmp {pid}', 312, pid, pid, 0, 0, 0)
    attempt_call(f'pidfd_getfd {pid}', 438, 0, 0, 0)
    attempt_call(f'process_madvise {pid}', 440, 0, remote, 1, 20, 0)
    attempt_call(f'move_pages {pid}', 279, pid, 0, None, None, None, 0)
    attempt_call(f'migrate_pages {pid}', 256, pid, 0, None, None)
    attempt_call(f'get_robust_list {pid}', 274, pid, remote, remote)
    attempt_call(f'perf_event_open {pid}', 298, (ctypes.c_char * 128)(), pid, -1, -1, 0)
attempt_call('traceme', 101, 0, 0, 0, 0)
""",
        ),
        attempts=38,
    ),
    Case(
        "T23",
        "programs",
        "blocked",
        (
            """
import subprocess
def system():
    code = os.system('id > /dev/null')
    if code:
        raise OSError(errno.EPERM, f'os.system answers {code}')
attempt('os.system', system)
attempt('subprocess.run', lambda: subprocess.run(['ls'], stdout=subprocess.DEVNULL, check=True))
attempt('os.popen', lambda: os.popen('id').read())
attempt('posix_spawn', lambda: os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0))
attempt('spawnv', lambda: os.spawnv(os.P_WAIT, '/bin/true', ['true']))
attempt('execveat', lambda: call(322, -100, b'/nonexistent', None, None, 0), reached=(errno.ENOENT, errno.EFAULT))
attempt('execve', lambda: call(59, b'/nonexistent', None, None), reached=(errno.ENOENT, errno.EFAULT))
attempt('execv', lambda: os.execv('/bin/true', ['true']))
""",
        ),
        attempts=8,
    ),
    Case(
        "T23x",
        "programs where they are allowed are confined like the session",
        "contained",
        (
            """
import subprocess
print(subprocess.run(['sh', '-c', 'echo sum $((40 + 2))'], capture_output=True, text=True).stdout)
sleeper = subprocess.Popen(['sleep', MARK], start_new_session=False)
for command in (['cat', SECRET], ['wc', '-c', '/etc/shadow'], ['sh', '-c', 'cat /proc/*/environ'],
                ['sh', '-c', 'kill -0 %d' % VICTIM], ['sh', '-c', 'echo x > /etc/' + TAG],
                ['sh', '-c', 'echo x > %s/%s' % (PUBLIC, TAG)], ['unshare', '-Ur', 'true'],
                ['python3', '-c', 'import socket; socket.socket()']):
    def run():
        done = subprocess.run(command, capture_output=True, text=True, timeout=8)
        print(done.stdout[:300])
        if done.returncode:
            raise PermissionError(done.stderr[:80])
    attempt(' '.join(command), run)
""",
        ),
        attempts=8,
        policy=PROGRAMS,
        levels=("namespaces", "landlock"),
        check=lambda trial: trial.expect("sum 42" in trial.result.stdout, "no program runs"),
    ),
    Case(
        "T24",
        "set-uid programs gain nothing",
        "blocked",
        (
            """
import subprocess
def gain(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=8)
    if done.returncode:
        raise PermissionError(done.stderr[:80])
    return done.stdout
for command in (['/bin/su', '-c', 'id -u'], ['/usr/bin/newgrp', 'root'], ['/usr/bin/chage', '-l', 'root'],
                ['/usr/bin/sudo', '-n', 'id']):
    attempt(command[0], gain, command)
""",
        ),
        attempts=4,
        policy=PROGRAMS,
        harmless=False,  # run as root without a sandbox they do what they are asked
        levels=("namespaces", "landlock"),
    ),
    Case("T25", "children that nobody waits for", "contained", (TWENTY,)),
    Case("T25f", "children that nobody waits for, where forks are allowed", "contained", (TWENTY,), policy=CHILDREN),
    Case("T26", "multiprocessing.Pool is refused in one clear line", "limited", (POOL_OF_TWO,), check=_one_line),
    Case(
        "T26f",
        "multiprocessing.Pool where forks are allowed",
        "limited",
        (POOL_OF_TWO,),
        policy=CHILDREN,
        check=_one_line,
    ),
    Case(
        "T27",
        "threads",
        "works",
        (
            """
import concurrent.futures, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
called = threading.Event()
threading.Timer(0.01, called.set).start()
assert called.wait(2)
""",
        ),
    ),
    Case(
        "T28",
        "2000 threads",
        "limited",
        (
            """
import threading
made = 0
threading.stack_size(1 << 16)
try:
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=(0.8,), daemon=True).start()
        made += 1
except RuntimeError as e:
    print(e)
threading.stack_size(0)
print('made', made)
""",
        ),
        check=_few_threads,
    ),
    Case(
        "T29",
        "gaining rights",
        "blocked",
        (
            """
import resource
attempt('setuid', os.setuid, 0)
attempt('setgid', os.setgid, 0)
attempt('setresuid', os.setresuid, 0, 0, 0)
attempt('setreuid', os.setreuid, 0, 0)
attempt_call('setfsgid', 123, 0)
attempt('setgroups', os.setgroups, [0])
attempt('chroot', os.chroot, '.')
attempt('nice', os.nice, -10)
attempt('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
attempt_call('sched_setattr', 314, 0, (ctypes.c_char * 48)(48), 0)
for name in ('AS', 'NOFILE', 'NPROC', 'FSIZE', 'CPU', 'MEMLOCK'):
    more = (ctypes.c_uint64 * 2)(1 << 60, 1 << 60)
    attempt('more of ' + name, call, 302, 0, getattr(resource, 'RLIMIT_' + name), more, None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)
attempt('capset', lambda: call(126, header, data))
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    attempt_call(f'unshare {flag:#x}', 272, flag)
# Of paths that do not exist: an answer that says so comes from behind the filter.
attempt('mount', call, 165, b'none', b'/nonexistent', b'tmpfs', 0, None, reached=(errno.ENOENT,))
attempt('umount2', call, 166, b'/nonexistent', 2, reached=(errno.ENOENT,))
attempt('pivot_root', call, 155, b'/nonexistent', b'/nonexistent', reached=(errno.ENOENT,))
attempt_call('setns', 308, 0, 0)
attempt_call('sethostname', 170, -1, 1)
attempt_call('iopl', 172, 0)
attempt('setsid', os.setsid)
attempt('setpgid', os.setpgid, 0, 0)
""",
        ),
        attempts=32,
        harmless=False,  # unshare and chroot leave a session that cannot go on
        check=_no_rights,
    ),
    Case(
        "T30",
        "the trainer's own packages",
        "blocked",
        (
            """
import importlib.util
def origin(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(name)
    return read(spec.origin)
def with_site(name):
    sys.path[:0] = [*SITE, REPO]
    importlib.invalidate_caches()
    try:
        return origin(name)
    finally:
        del sys.path[:len(SITE) + 1]
        importlib.invalidate_caches()
for name in ('jax', 'jaxlib', 'torch', 'flax', 'transformers', 'orbax', 'pyvision_jax', 'pytest', 'pip', 'libtpu'):
    attempt(name, origin, name)
    attempt(name + ' by its folder', with_site, name)
""",
        ),
        attempts=20,
        levels=("namespaces", "landlock"),
    ),
)
