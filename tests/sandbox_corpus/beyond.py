"""More of the same kind as the rows: files, clean-up, branches, descriptors, signals."""

from __future__ import annotations

from pathlib import Path

from pyvision_sandbox import BranchUnsafe

from .case import CONFINED_FILES, Case, Step
from .trial import Trial

# How a step may end that plays with its own process.
MAY_END = ("ok", "error", "soft_timeout", "hard_timeout", "crashed", "protocol_error")


def _branch(code: str, private: bool = True, refused: bool = False):
    """Branches the session, runs `code` there, and wants every attempt of it blocked."""

    def check(trial: Trial) -> None:
        try:
            branch = trial.main.branch(private=private)
        except BranchUnsafe as e:
            trial.expect(refused, f"the branch was refused: {e}")
            return
        with branch:
            result = branch.run(code, timeout=10)
            trial.seen.append(result)
            trial.expect(result.status == "ok", f"the branch ends as {result.status}, {result.error}")
            trial.expect("@worked" not in result.stdout, f"in the branch: {result.stdout}")
            trial.expect(trial.run("kept").repr == "41", "the parent is disturbed")

    return check


def _untouched_outside(trial: Trial) -> None:
    trial.main.close()
    trial.expect(Path(trial.secret).read_text() == trial.token, "a file outside was changed by the clean-up")
    trial.expect(Path(trial.names["PUBLIC"]).is_dir() and Path("/etc/passwd").exists(), "a folder outside is gone")


def _link_not_followed(trial: Trial) -> None:
    """The clean-up of a home that has become a link must not touch what the link names."""
    _settled(trial)
    trial.main.close()
    trial.expect(Path(trial.secret).stat().st_mode & 0o777 == 0o644, "the clean-up changed rights outside")
    trial.expect(
        Path(trial.secret).exists() and Path(trial.secret).read_text() == trial.token, "a file outside is gone"
    )


def _alone(trial: Trial) -> None:
    trial.expect(trial.run("kept").repr == "41", "the variables are lost")
    trial.expect(trial.sibling.run("keep + 1", timeout=10).repr == "42", "the sibling is disturbed")


def _settled(trial: Trial) -> None:
    """After whatever the code did to itself the next call answers, by the same session or by a new one that says so."""
    after = trial.run("1 + 1")
    trial.expect(after.repr == "2", f"the next call ends as {after.status}, {after.error}")


def _few_mib(trial: Trial) -> None:
    written = int(trial.result.stdout.rsplit(" ", 1)[-1] or 0) if "written" in trial.result.stdout else 0
    most = trial.policy.tmp_mb * (1 if trial.level == "namespaces" else 8)
    trial.expect(written <= most, f"{written} MiB were written, at most {most} are right")


CASES = (
    Case(
        "B01",
        "rights, times, owners and attributes of files outside",
        "blocked",
        (
            """
import fcntl, json
times = (ctypes.c_int64 * 4)(1, 0, 1, 0)
def changes(path, action):
    # An answer alone proves nothing: a sandbox may say yes and do nothing.
    def look():
        info = os.stat(path)
        return info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns
    before = look()
    action()
    after = look()
    if after == before:
        raise PermissionError('nothing has changed')
    os.chmod(path, before[0] & 0o7777)
    os.utime(path, ns=(before[3], before[3]))
    return before, after
for name, path in (('secret', SECRET), ('library', os.path.realpath(json.__file__)),
                   ('package', os.path.realpath(sys.modules['PIL'].__file__))):
    mode = os.stat(path).st_mode & 0o7777 ^ 0o001 if os.path.exists(path) else 0o644
    attempt(name + ' chmod', changes, path, lambda: os.chmod(path, mode))
    attempt(name + ' fchmodat', changes, path, lambda: call(268, -100, path.encode(), mode))
    attempt(name + ' fchmodat2', changes, path, lambda: call(452, -100, path.encode(), mode, 0))
    attempt(name + ' utime', changes, path, lambda: os.utime(path, (1, 1)))
    attempt(name + ' utimes', changes, path, lambda: call(235, path.encode(), times))
    attempt(name + ' futimesat', changes, path, lambda: call(261, -100, path.encode(), times))
    attempt(name + ' chown', os.chown, path, -1, -1)
    attempt(name + ' lchown', os.lchown, path, -1, -1)
    attempt(name + ' setxattr', lambda: (os.setxattr(path, 'user.x', b'1'), os.removexattr(path, 'user.x')))
    attempt(name + ' hard link', lambda: (os.link(path, TAG), os.unlink(TAG)))
    def by_descriptor(change):
        fd = os.open(path, os.O_RDONLY)
        try:
            return change(fd)
        finally:
            os.close(fd)
    attempt(name + ' fchmod', by_descriptor, lambda fd: changes(path, lambda: os.fchmod(fd, mode)))
    attempt(name + ' futimens', by_descriptor, lambda fd: changes(path, lambda: os.utime(fd, (1, 1))))
    attempt(name + ' fchown', by_descriptor, lambda fd: os.fchown(fd, -1, -1))
    attempt(name + ' fsetxattr', by_descriptor,
            lambda fd: (os.setxattr(fd, 'user.x', b''), os.removexattr(fd, 'user.x')))
    attempt(name + ' lease', by_descriptor, lambda fd: fcntl.fcntl(fd, 1024, 1))
    attempt(name + ' dnotify', by_descriptor, lambda fd: fcntl.fcntl(fd, 1026, 1))
    attempt(name + ' inode flags', by_descriptor, lambda fd: call(16, fd, 0x40086602, (ctypes.c_long * 1)(0x40)))
attempt('setxattr of home', lambda: os.setxattr('.', 'user.x', bytes(1000)))
attempt_call('inotify', 254, -1, b'/', 2)
attempt_call('inotify_init', 294, 0)
attempt_call('fanotify', 300, 0, 0)
""",
        ),
        attempts=55,
        levels=CONFINED_FILES,
    ),
    Case(
        "B02",
        "the pool's own folder, the server's log and the sibling's home",
        "blocked",
        (
            """
home = os.environ['HOME']
parent = os.path.dirname(os.path.realpath(home))
if SIBLING_HOME != '/none':  # else the folder above is the session's own
    attempt('list the folder above home', os.listdir, parent)
    attempt('rmdir above', os.rmdir, parent)
for path in (SCRATCH, SIBLING_HOME):
    attempt('list ' + path, os.listdir, path)
    attempt('create in ' + path, create, os.path.join(path, TAG))
    attempt('rename ' + path, os.rename, path, path)
for name in ('server.log', 'log', 'matplotlib/fontlist.json'):
    attempt(name, lambda: open(os.path.join(SCRATCH, name), 'ab').close())
attempt('sibling file', read, os.path.join(SIBLING_HOME, 'diary.txt'))
""",
        ),
        attempts=10,
        levels=CONFINED_FILES,
    ),
    Case(
        "B03",
        "directory descriptors and descriptors of others",
        "blocked",
        (
            """
import stat, socket
found = []
for fd in range(1024):
    try:
        info = os.fstat(fd)
    except OSError:
        continue
    found.append((fd, oct(info.st_mode)))
    if stat.S_ISDIR(info.st_mode):
        attempt(f'folder {fd}', os.listdir, fd)
        attempt(f'out of {fd}', lambda: os.open('../../../../../../etc/passwd', os.O_RDONLY, dir_fd=fd))
print(found)
attempt('few descriptors', lambda: None if len(found) > 8 else os.close(-1))
a, b = socket.socketpair()
attempt('sendmsg', lambda: socket.send_fds(a, [b'x'], [0]))
attempt('sendmmsg', lambda: call(307, a.fileno(), (ctypes.c_char * 64)(), 1, 0))
def steal(fd):
    s = socket.socket(fileno=os.dup(fd))
    data, ancillary, flags, address = s.recvmsg(1, 1000, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return ancillary or os.close(-1)
for fd, mode in found:
    if fd > 2 and mode.startswith('0o14'):
        attempt(f'descriptors from {fd}', steal, fd)
        def names():
            s = socket.socket(fileno=os.dup(fd))
            return s.getpeername() or s.getsockname() or os.close(-1)
        attempt(f'names of {fd}', names)
for number, name in ((424, 'pidfd_send_signal'), (438, 'pidfd_getfd')):
    for fd, _ in found:
        attempt_call(f'{name} {fd}', number, fd, 0, None, 0)
""",
        ),
        attempts=8,
    ),
    Case(
        "B04",
        "trees that are hard to remove",
        # A pool that counts files from outside may refuse what it cannot count.
        {"namespaces": "contained", "landlock": "limited", "seccomp": "limited"},
        (
            """
os.makedirs('locked/in/side'); open('locked/in/side/x', 'w').close()
os.chmod('locked/in', 0); os.chmod('locked', 0)
for name in ('a\\nb', '-rf', '~', '*', '; rm x', ' ', '\\x01', 'e\\u0301', '\\udcff\\udcfe', 'x' * 255, '$HOME', '...'):
    open(name, 'w').close()
os.symlink(HOST_HOME, 'home'); os.symlink(PUBLIC, 'public'); os.symlink('loop', 'loop')
os.symlink(os.path.dirname(SECRET), 'out')
os.symlink(SECRET, 'secret')
for i in range(1000):
    os.mkdir('d'); os.chdir('d')
os.chdir(os.environ['HOME'])
for i in range(2000):
    os.close(os.open(f'n{i}', os.O_CREAT | os.O_WRONLY))
try:
    os.mkfifo('fifo')
except OSError as e:
    print(e)
""",
        ),
        check=_untouched_outside,
    ),
    Case(
        "B05",
        "the own home removed, renamed or replaced",
        "typed",
        (
            """
import shutil
home = os.environ['HOME']
os.makedirs('a/b'); open('a/b/c', 'w').close()
for name, action in (('rmdir', lambda: os.rmdir(home)),
                     ('rename', lambda: (os.rename(home, home + 'x'), os.rename(home + 'x', home))),
                     ('rmtree', lambda: os.listdir(home) == ['a'] and shutil.rmtree(home)),
                     ('link', lambda: os.symlink(PUBLIC, home))):
    try:
        action()
    except OSError as e:
        print(name, e)
    else:
        print(name, 'done')
""",
        ),
        check=_link_not_followed,
    ),
    Case(
        "B06",
        "links in a private branch",
        "contained",
        (
            """
os.mkdir('real'); open('real/name', 'w').write('mine')
os.symlink(SECRET, 'secret'); os.symlink('/etc/shadow', 'shadow'); os.symlink('/', 'everything')
os.symlink('loop', 'loop')
os.symlink('/proc/self/environ', 'environ'); os.symlink('../../../../..' + SECRET, 'dots')
for path in ('fifo', ):
    try: os.mkfifo(path)
    except OSError as e: print(e)
open('sparse', 'wb').truncate(15 << 20)
os.chmod('real', 0)
""",
        ),
        check=_branch(
            "for name in ('secret', 'shadow', 'environ', 'dots'):\n    attempt(name, read, name)\n"
            "attempt('everything', read, 'everything' + SECRET)\nos.chmod('real', 0o700)\nprint(read('real/name'))"
        ),
        levels=CONFINED_FILES,
    ),
    Case(
        "B07",
        "a branch with threads is refused or replayed",
        "contained",
        (
            "import threading\nend = time.time() + 15\ndef spin():\n    while time.time() < end: time.sleep(0.01)\n"
            "threading.Thread(target=spin, daemon=True).start()",
        ),
        check=_branch("kept", refused=True),
    ),
    Case(
        "B08",
        "a branch has no more rights than its session",
        "contained",
        ("x = 7",),
        check=_branch(
            "attempt('fork', lambda: os.fork() or os._exit(0))\nattempt('secret', read, SECRET)\n"
            "attempt('victim', os.kill, VICTIM, 0)\nattempt('exec', os.execv, '/bin/true', ['true'])\n"
            "import socket\nattempt('socket', lambda: socket.socket().close())\n"
            "attempt_call('unshare', 272, 0x10000000)\n"
            "attempt('mount', call, 165, b'none', b'/nonexistent', b'tmpfs', 0, None, reached=(errno.ENOENT,))\n"
            "attempt('setuid', os.setuid, 0)\n"
            "a, b = socket.socketpair()\nattempt('sendmsg', lambda: socket.send_fds(a, [b'x'], [0]))"
        ),
        levels=CONFINED_FILES,
    ),
    Case(
        "B09",
        "a branch that runs the code of a session that lies about its process",
        "typed",
        ("import os\nos.getpid = lambda: 1\nos.fork = lambda: 0\nsys.modules['os'] = None",),
        check=_settled,
    ),
    Case(
        "B10",
        "every descriptor taken",
        "limited",
        (
            "held = []\ntry:\n    while len(held) < 5000: held.append(os.open('/dev/null', os.O_RDONLY))\n"
            "except OSError as e: print(e)",
            "print(len(held) < 5000)",
            "[os.close(fd) for fd in held]; None",
        ),
        check=lambda trial: trial.expect(trial.results[1].stdout == "True\n", "no limit on descriptors"),
    ),
    Case(
        "B11",
        "large sparse files",
        "limited",
        (
            """
made = 0
for i in range(10):
    try:
        with open(f'sparse{i}', 'wb') as f:
            f.truncate(1 << 40)
        made += 1
    except OSError as e:
        print(e)
try:
    fd = os.open('fallocated', os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 256 << 20)
    made += 1
except OSError as e:
    print(e)
print('made', made)
""",
        ),
        check=lambda trial: trial.expect("made 0" in trial.result.stdout, f"{trial.result.stdout[-60:]!r}"),
    ),
    Case(
        "B12",
        "files that were unlinked while they are open",
        "typed",
        (
            """
block, held, total = bytes(1 << 20), [], 0
try:
    for i in range(300):
        f = open('u', 'wb', buffering=0)
        os.unlink('u')
        held.append(f)
        total += f.write(block)
        time.sleep(0.004)
except OSError as e:
    print(e)
print('written', total >> 20)
""",
        ),
        levels=CONFINED_FILES,
        check=_few_mib,
    ),
    Case(
        "B13",
        "SIGSTOP, SIGTSTP and signals of every harmless kind to oneself",
        "typed",
        (
            "import signal\n"
            "for n in (signal.SIGURG, signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT): os.kill(os.getpid(), n)",
            *(
                Step(f"import os, signal; os.kill(os.getpid(), signal.{name})", timeout=0.4, status=MAY_END)
                for name in ("SIGTSTP", "SIGTTOU", "SIGSTOP")
            ),
            "1",
        ),
        check=_settled,
    ),
    Case(
        "B14",
        "every signal to oneself",
        "typed",
        ("os.kill(0, 0)\nfor n in range(1, 65):\n    if n not in (2, 9, 19, 32, 33): os.kill(os.getpid(), n)",),
        check=_settled,
    ),
    Case(
        "B15",
        "storms of timers",
        "typed",
        (
            "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
            "signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\nx = 7",
            Step("import time; time.sleep(0.1)", timeout=0.5, status=MAY_END),
            Step(
                "import time, signal\nsignal.signal(signal.SIGALRM, signal.SIG_DFL); time.sleep(0.1)",
                timeout=0.5,
                status=MAY_END,
            ),
            Step("1", status=MAY_END),
        ),
        check=_settled,
    ),
    Case(
        "B16",
        "handlers that outlive their cell",
        "typed",
        (
            "import signal\ndef handler(*a):\n    raise RuntimeError('late')\nsignal.signal(signal.SIGALRM, handler)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)",
            Step("time.sleep(0.1)", status=("ok", "error", "crashed", "protocol_error")),
            Step("signal.setitimer(signal.ITIMER_REAL, 0)", status=("ok", "error", "crashed", "protocol_error")),
            Step("1", status=("ok", "error", "crashed", "protocol_error")),
        ),
        check=_settled,
    ),
    Case(
        "B17",
        "the limit's interrupt ignored, blocked or handled",
        "typed",
        (
            Step(
                "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(20)",
                timeout=0.3,
                status=("hard_timeout",),
            ),
            Step(
                "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(20)",
                timeout=0.3,
                status=("hard_timeout",),
            ),
            Step("import signal, time; signal.signal(signal.SIGINT, lambda *a: None); time.sleep(20)", timeout=0.3),
        ),
        check=_settled,
    ),
    Case(
        "B18",
        "words on the channel between turns",
        "dead",
        (
            "import threading\ndef late():\n    time.sleep(0.05)\n    for fd in range(3, 1024):\n"
            "        try: os.write(fd, b'PVS1' + bytes(60))\n"
            "        except OSError: pass\nthreading.Thread(target=late, daemon=True).start()",
            "time.sleep(0.3)",
        ),
    ),
    Case(
        "B19",
        "the channel read, shut or replaced",
        "typed",
        (
            Step(
                "import select\nfor fd in range(3, 1024):\n    if select.poll and os.path.exists('.'):\n"
                "        try: os.set_blocking(fd, False); os.read(fd, 10)\n        except OSError: pass",
                status=("ok", "crashed", "protocol_error", "hard_timeout"),
                timeout=1.0,
            ),
            Step(
                "import os\nr, w = os.pipe()\nfor fd in range(3, 1024):\n    try: os.fstat(fd)\n"
                "    except OSError: continue\n"
                "    if fd not in (r, w): os.dup2(w, fd)",
                status=("crashed", "protocol_error", "hard_timeout"),
                timeout=1.0,
            ),
            Step(
                "import os\nfor fd in range(3, 1024):\n    try: os.fstat(fd); os.dup2(0, fd)\n    except OSError: pass",
                timeout=1.0,
                status=("crashed", "protocol_error", "hard_timeout"),
            ),
            Step("1", timeout=1.0),
        ),
        check=_settled,
    ),
    Case(
        "B20",
        "a server or sibling signalled by freezing oneself",
        "contained",
        (
            "import threading\nend = time.time() + 15\ndef spin():\n    while time.time() < end: pass\n"
            "[threading.Thread(target=spin, daemon=True).start() for _ in range(8)]; None",
            "kept",
        ),
        check=_alone,
    ),
)
