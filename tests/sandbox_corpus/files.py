"""A. Secrets and files."""

from __future__ import annotations

import json

from .case import CONFINED_FILES, Case, Step
from .trial import Trial

# Names that a session may have, MALLOC_*, MPL*, PYTHON*, OPENCV_*, DECORD_* and *_NUM_THREADS besides. OpenCV sets
# LD_LIBRARY_PATH when it is imported.
_ENVIRONMENT = {
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "HOME",
    "TMPDIR",
    "PWD",
    "USER",
    "LOGNAME",
    "TZ",
    "LD_LIBRARY_PATH",
}
_PREFIXES = ("MALLOC_", "MPL", "PYTHON", "OPENCV_", "DECORD_", "XDG_")


def _environment(trial: Trial) -> None:
    found = json.loads(trial.result.stdout.splitlines()[0])
    for name in found:
        known = name in _ENVIRONMENT or name.startswith(_PREFIXES)
        trial.expect(known or name.endswith("_NUM_THREADS"), f"the variable {name} of the host is visible")


def _later_server(trial: Trial) -> None:
    """A server that starts now must not have imported anything that was planted."""
    with trial.open_pool() as pool, trial.session(pool) as session:
        result = session.run("import builtins, numpy, PIL, json; print([n for n in dir(builtins) if 'PLANTED' in n])")
        trial.expect(result.stdout.strip() == "[]", f"a later server imported it: {result.stdout} {result.error}")


def _own_home(trial: Trial) -> None:
    for result in trial.results[1:]:
        trial.expect("x.txt" not in result.stdout and "hidden" not in result.stdout, f"another sees {result.stdout}")


CASES = (
    Case(
        "T01",
        "the password file",
        "blocked",
        (
            """
for path in ('/etc/shadow', '/etc/gshadow', '/etc/ssh/ssh_host_ed25519_key'):
    attempt(path, size, path)
""",
        ),
        attempts=3,
        levels=CONFINED_FILES,
    ),
    Case(
        "T02",
        "the environment of other processes",
        "blocked",
        (
            """
def search():
    for name in os.listdir('/proc'):
        if name.isdigit():
            for path in (f'/proc/{name}/environ', f'/proc/{name}/cmdline'):
                try:
                    data = open(path, 'rb').read()
                except OSError:
                    continue
                if b'CANARY' in data:
                    return data[data.find(b'CANARY'):][:100]
    raise PermissionError('not found')
attempt('search', search)
for pid in (POOL, VICTIM, SERVER, os.getppid() or 1):
    for name in ('environ', f'task/{pid}/environ', 'mem', 'maps', 'root/etc/passwd', 'auxv'):
        attempt(f'{pid}/{name}', read, f'/proc/{pid}/{name}')
    for name in ('cwd', 'fd', 'root'):
        attempt(f'{pid}/{name}', os.listdir, f'/proc/{pid}/{name}')
""",
        ),
        attempts=37,
        levels=CONFINED_FILES,
    ),
    Case(
        "T03",
        "a world-readable file outside",
        "blocked",
        (
            """
import mmap, shutil
folder, name = os.path.split(SECRET)
attempt('open', read, SECRET)
for depth in (1, 2, 3, 5, 8, 20):
    attempt(f'{depth} x ../', read, os.path.join(os.getcwd(), '../' * depth + SECRET.lstrip('/')))
def by_link():
    os.symlink(SECRET, 'link')
    return read('link')
attempt('symlink', by_link)
def by_folder_link():
    os.symlink(folder, 'folder')
    return read('folder/' + name)
attempt('symlink of its folder', by_folder_link)
def by_descriptor():
    return os.read(os.open(name, os.O_RDONLY, dir_fd=os.open(folder, os.O_PATH)), 100)
attempt('openat', by_descriptor)
def by_hard_link():
    os.link(SECRET, 'hard')
    return read('hard')
attempt('hard link', by_hard_link)
def by_empty_path():
    fd, here = os.open(SECRET, os.O_PATH), os.open('.', os.O_RDONLY)
    call(265, fd, b'', here, b'hard2', 0x1000)  # linkat with AT_EMPTY_PATH
    return read('hard2')
attempt('linkat of a path descriptor', by_empty_path)
def by_chdir():
    here = os.getcwd()
    os.chdir(folder)
    try:
        return read(name)
    finally:
        os.chdir(here)
attempt('chdir', by_chdir)
attempt('/proc/self/root', read, '/proc/self/root' + SECRET)
attempt('/proc/1/root', read, '/proc/1/root' + SECRET)
def by_fd_path():
    return read('/dev/fd/%d' % os.open(SECRET, os.O_PATH))
attempt('/dev/fd', by_fd_path)
attempt('copy', lambda: (shutil.copy(SECRET, 'copy'), read('copy')))
attempt('rename', lambda: (os.rename(SECRET, 'moved'), read('moved')))
attempt('write', lambda: open(SECRET, 'ab').close())
attempt('truncate', lambda: os.truncate(SECRET, os.stat(SECRET).st_size))
attempt('openat2', lambda: call(437, -100, SECRET.encode(), (ctypes.c_uint64 * 3)(0, 0, 0x10), 24))
""",
        ),
        attempts=20,
        levels=CONFINED_FILES,
    ),
    Case(
        "T04",
        "the own environment",
        "contained",
        (
            """
import json
print(json.dumps(dict(os.environ)))
table = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
i = 0
while table[i]:
    print(table[i])
    i += 1
""",
        ),
        check=_environment,
    ),
    Case(
        "T05",
        "the trainer's checkout, keys and tokens by the host's real paths",
        "blocked",
        (
            """
known = {part for path in [*sys.path, *PREFIXES] for part in path.split('/')}
def list_host(path):
    names = set(os.listdir(path)) - known
    if not names:
        raise PermissionError('nothing but the way to the interpreter')
    return sorted(names)
for path in (REPO, REPO + '/tests', REPO + '/.git', REAL_HOME, HOST_HOME, HOST_HOME + '/.ssh', HOST_HOME + '/.cache'):
    attempt('list ' + path, list_host, path)
for name in ('README.md', 'pyproject.toml', 'pyvision_jax/__init__.py', '.git/HEAD', 'tests/conftest.py'):
    attempt(name, read, f'{REPO}/{name}')
for name in ('.ssh/id_ed25519', '.netrc', '.cache/huggingface/token'):
    attempt(name, read, f'{HOST_HOME}/{name}')
    attempt('real ' + name, size, f'{REAL_HOME}/{name}')
""",
        ),
        attempts=18,
        levels=CONFINED_FILES,
    ),
    Case(
        "T06",
        "changing the installed packages",
        "blocked",
        (
            """
import PIL, numpy, json
for module in (PIL, numpy, json):
    path = module.__file__
    attempt('append ' + path, lambda: open(path, 'ab').close())
    attempt('truncate ' + path, lambda: os.truncate(path, os.stat(path).st_size))
    real = os.path.realpath(path)
    attempt('append ' + real, lambda: open(real, 'ab').close())
    attempt('beside ' + real, create, os.path.join(os.path.dirname(real), TAG + '.py'))
for folder in dict.fromkeys([*(p for p in sys.path if os.path.isabs(p)), *SITE]):
    if folder != os.environ.get('HOME') and not folder.startswith(os.getcwd()):
        for name in ('.pth', '_sitecustomize.py'):
            attempt('create in ' + folder, create, os.path.join(folder, TAG + name))
""",
        ),
        attempts=14,
        levels=CONFINED_FILES,
    ),
    Case(
        "T07",
        "planting compiled or shadowing modules for a later server",
        "blocked",
        (
            """
import importlib.util, numpy, PIL.Image, json, statistics
for module in (numpy, PIL.Image, json, statistics, sys.modules['pyvision_sandbox.runner']):
    path = importlib.util.cache_from_source(module.__file__)
    attempt('change ' + path, lambda: open(path, 'r+b').close())
    attempt('beside ' + path, create, os.path.join(os.path.dirname(path), TAG + '.pyc'))
    real = importlib.util.cache_from_source(os.path.realpath(module.__file__))
    attempt('change ' + real, lambda: open(real, 'r+b').close())
# In the session's own folders it may plant what it likes.
for name in ('numpy.py', 'json.py', 'PIL.py', 'sitecustomize.py', 'usercustomize.py', 'msgpack.py', 'x.pth'):
    with open(name, 'w') as f:
        f.write('import builtins; builtins.PLANTED = 1')
for folder in ('.config/matplotlib', '.local/lib/python3.11/site-packages'):
    os.makedirs(folder, exist_ok=True)
""",
            Step("import builtins; print('PLANTED' in dir(builtins))", who="new"),
        ),
        attempts=15,
        levels=CONFINED_FILES,
        check=_later_server,
    ),
    Case(
        "T08",
        "creating files outside",
        "blocked",
        (
            """
for folder in ('/', '/etc', '/usr', '/usr/lib', '/usr/bin', '/dev', '/home', '/opt', '/run', '/srv', '/root', *PREFIXES,
               PUBLIC, HOST_HOME, REPO, SCRATCH):
    attempt(folder, create, os.path.join(folder, TAG))
    attempt('folder in ' + folder, lambda: (os.mkdir(folder + '/' + TAG), os.rmdir(folder + '/' + TAG)))
    attempt('link in ' + folder, lambda: (os.symlink('x', folder + '/' + TAG), os.unlink(folder + '/' + TAG)))
for folder in ('/tmp', '/var/tmp', '/dev/shm'):  # the session's own where it has namespaces
    attempt('own ' + folder, lambda: open(os.path.join(folder, TAG), 'x').close())
""",
            Step("import os; print([p for p in ('/tmp', '/var/tmp', '/dev/shm') if TAG in listing(p)])", who="sibling"),
        ),
        attempts=48,
        levels=CONFINED_FILES,
        check=lambda trial: trial.expect(trial.result.stdout.strip() in ("[]", ""), "the sibling sees the file"),
    ),
    Case(
        "T09",
        "memory and block devices",
        "blocked",
        (
            """
for path in ('/proc/self/mem', '/proc/thread-self/mem', '/dev/mem', '/dev/port', '/dev/kmsg', '/dev/vda', '/dev/sda',
             '/dev/nvme0n1', '/dev/loop-control', '/dev/fuse', '/dev/kvm', '/dev/net/tun', '/dev/ptmx', '/dev/tty',
             '/dev/userfaultfd', '/dev/vhost-net', '/dev/uinput', '/dev/mapper/control', '/dev/shm/../mem'):
    for mode in (os.O_RDONLY, os.O_RDONLY if path[5:7] in ('vd', 'sd', 'nv') else os.O_RDWR):
        attempt(f'{path} {mode}', lambda: os.close(os.open(path, mode | os.O_NONBLOCK | os.O_NOCTTY)))
""",
        ),
        attempts=38,
        levels=CONFINED_FILES,
    ),
    Case(
        "T10",
        "accelerators",
        "blocked",
        (
            """
import stat
for path in ('/dev/nvidia0', '/dev/nvidiactl', '/dev/nvidia-uvm', '/dev/dri/renderD128', '/dev/accel0', '/dev/kfd',
             '/dev/vfio/vfio', *DEVICES):
    attempt(path, lambda: os.close(os.open(path, os.O_RDWR)))
for kind, major, minor in ((stat.S_IFCHR, 195, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 254, 0)):
    def node():
        os.mknod('node', kind | 0o600, os.makedev(major, minor))
        try:
            os.close(os.open('node', os.O_RDONLY))
        finally:
            os.unlink('node')
    attempt(f'mknod {major}:{minor}', node)
""",
        ),
        attempts=10,
        levels=CONFINED_FILES,
    ),
    Case(
        "T11",
        "files left in home",
        "isolated",
        (
            "open('x.txt', 'w').write('left'); open('.hidden', 'w').close(); os.mkdir('hidden_folder')",
            Step("import os; print(os.listdir('.'), os.listdir(os.environ['HOME']))", who="new"),
            Step("import os; print(os.listdir('.'), os.listdir(os.environ['HOME']))", who="sibling"),
        ),
        check=_own_home,
    ),
)
