"""What the probes try inside a session: short cells, the weakest level that promises each, and how it is judged.

Each does no harm where nothing stops it: signal 0, a descriptor opened and closed, a child that ends at once, address
space that is never touched. `bait` (see bait.py) is a variable of the session. The value of a cell is what was
possible: [] is good.
"""

from collections.abc import Callable

from .bait import FOREIGN
from .result import Result

Judge = Callable[[Result], bool]

START = """
import ctypes, importlib.util, mmap, os, socket, tempfile, threading, time
probe = 41
def possible(attempt, places):
    done = []
    for place in places:
        try:
            attempt(place)
        except OSError:
            continue
        done.append(place)
    return done
"""
_OWN_FILES = """
with tempfile.TemporaryFile() as f:
    f.write(b"x")
with open("probe", "w") as f:
    f.write("mine")
with open("probe") as f:
    text = f.read()
os.remove("probe")
text
"""
_PACKAGES = "[name for name in bait['foreign'] if importlib.util.find_spec(name)]"
_READING = """
def read(place):
    with open(place, "rb") as f:
        f.read(1)
possible(read, bait["files"])
"""
_WRITING = """
possible(lambda place: os.close(os.open(place, os.O_WRONLY)), [bait["canary"], np.__file__]) + possible(
    lambda place: os.close(os.open(place, os.O_WRONLY | os.O_CREAT)), [bait["new"]])
"""
_ENVIRONMENTS = """
found = [name for name, value in os.environ.items() if value == bait["token"]]
def search(pid):
    with open(f"/proc/{pid}/environ", "rb") as f:
        if bait["token"].encode() in f.read():
            found.append(pid)
possible(search, [bait["victim"], bait["pool"]])
possible(lambda folder: possible(search, [n for n in os.listdir(folder) if n.isdigit()][:1000]), ["/proc"])
found
"""
_DEVICE_FILES = "possible(lambda place: os.close(os.open(place, os.O_RDONLY | os.O_NONBLOCK)), bait['devices'])"
_NETWORK = """
def connect(target):
    with socket.socket(socket.AddressFamily[target[0]]) as s:
        s.settimeout(0.2)
        s.connect(target[1])
possible(connect, bait["listeners"])
"""
_SIGNALS = "possible(lambda pid: os.kill(pid, 0), [bait['victim']])"
# A program that is not there: "not permitted" tells that the call is refused, "not found" that it is not.
PROGRAM = "os.execv('/no/such/program', ['x'])"
CHILD = """
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
_NAMESPACES = "ctypes.CDLL(None).unshare(0x10000000)"  # CLONE_NEWUSER
_MEMORY = "mmap.mmap(-1, bait['too_much']).close()"
SPIN = """
spinning = True
def spin(end):
    while spinning and time.monotonic() < end:
        pass
spinner = threading.Thread(target=spin, args=(time.monotonic() + 2,))
spinner.start()
"""
SPUN = "spinning = False\nspinner.join()"


def _gives(value: str) -> Judge:
    return lambda result: result.repr == value


def _raises(*names: str) -> Judge:
    return lambda result: result.error is not None and result.error["name"] in names


# (what is promised, the weakest level that promises it, cell, whether it held)
CELLS: tuple[tuple[str, str, str, Judge], ...] = (
    ("variables live over cells", "none", "probe + 1", _gives("42")),
    ("it has files of its own", "none", _OWN_FILES, _gives("'mine'")),
    (f"packages of the trainer ({', '.join(FOREIGN)}) cannot be imported", "none", _PACKAGES, _gives("[]")),
    ("files outside cannot be read, whatever their mode", "landlock", _READING, _gives("[]")),
    ("files outside and packages cannot be written", "landlock", _WRITING, _gives("[]")),
    ("the environment of other processes cannot be read", "landlock", _ENVIRONMENTS, _gives("[]")),
    ("accelerators and other devices cannot be opened", "landlock", _DEVICE_FILES, _gives("[]")),
    ("listeners of this machine cannot be reached", "seccomp", _NETWORK, _gives("[]")),
    ("other processes cannot be signalled", "seccomp", _SIGNALS, _gives("[]")),
    ("programs cannot be started", "seccomp", PROGRAM, _raises("PermissionError")),
    ("no second process can be made", "seccomp", CHILD, _raises("PermissionError")),
    ("no namespaces can be made", "seccomp", _NAMESPACES, _gives("-1")),
    ("the memory limit holds", "none", _MEMORY, _raises("OSError", "MemoryError")),
)
