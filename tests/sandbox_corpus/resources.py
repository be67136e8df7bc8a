"""D. Memory, disk and CPU."""

from __future__ import annotations

import re
import time

from .case import CONFINED_FILES, Case, Step
from .trial import Trial

SOFT = 0.3  # seconds that the cells of this section get where they hang


def _number(trial: Trial, word: str, most: float) -> None:
    found = re.search(rf"{word} (\d+)", trial.result.stdout)
    trial.expect(
        found is not None and int(found[1]) <= most, f"{trial.result.stdout[-80:]!r}, at most {most:.0f} is right"
    )


def _memory(trial: Trial) -> None:
    trial.expect(trial.result.status == "memory", f"it ended as {trial.result.status}")


def _taken(share: float = 1.0):
    return lambda trial: _number(trial, "taken", trial.policy.memory_mb * share)


def _written(word: str = "written"):
    """Where there is no file system of its own the pool watches from outside: what it has not seen yet may be more."""
    return lambda trial: _number(trial, word, trial.policy.tmp_mb * (1 if trial.level == "namespaces" else 4) + 1)


def _overrun(trial: Trial) -> None:
    wall, limit = trial.result.usage.wall_s, SOFT + trial.policy.grace
    trial.expect(SOFT * 0.95 <= wall < limit + 1.0, f"it took {wall:.2f} s of {limit:.2f} s")


def _x_survives(trial: Trial) -> None:
    _overrun(trial)
    trial.expect(trial.run("x").repr == "7", "the variables are lost")


def _text_cut(trial: Trial) -> None:
    result, limit = trial.result, trial.policy.max_text
    trial.expect(result.status == "ok", f"it ended as {result.status}")
    trial.expect(len(result.repr or "") < 2 * limit and result.dropped.get("repr", 0) > 10**6, "the repr is not cut")


def _output_cut(trial: Trial) -> None:
    result, limit = trial.result, trial.policy.max_text
    trial.expect(len(result.stdout) < 2 * limit, f"{len(result.stdout)} characters came back")
    trial.expect(result.dropped.get("stdout", 0) > 10**5, f"no count of what was cut: {result.dropped}")
    trial.expect("cut" in result.stdout, "the cut is not marked")


def _no_core(trial: Trial) -> None:
    core = trial.core_limit
    # With a piped core_pattern a limit of 0 still calls the host's handler; 1 does not, nor does a process that may
    # not be dumped.
    trial.expect(core in ("0", "1"), f"a core file of {core} bytes is allowed")


def _idle(trial: Trial) -> None:
    before = trial.cpu_ticks()
    time.sleep(1.0)
    after = trial.cpu_ticks()
    trial.expect(after - before <= 1, f"{after - before} ticks of CPU in 1 s between turns")


def _goes_on(trial: Trial) -> None:
    first = int(trial.run("time.sleep(0.05); len(found)").repr or 0)
    second = int(trial.run("time.sleep(0.05); len(found)").repr or 0)
    trial.expect(second > first > 0, f"the thread does not go on: {first}, {second}")


CHILDREN_OF_100_MB = """
r, w = os.pipe()
for _ in range(12):
    try:
        pid = os.fork()
    except OSError:
        continue
    if pid == 0:
        try:
            block = bytearray(100 << 20)
            for i in range(0, len(block), 4096):
                block[i] = 1
            time.sleep(0.7)
            os.write(w, b'x')  # those that say so were there at the same time
        finally:
            os._exit(0)
time.sleep(1.2)
os.close(w)
os.set_blocking(r, False)
try:
    n = len(os.read(r, 100))
except BlockingIOError:
    n = 0
print('taken', n * 100)
"""


def many_files(count: int, each: int, folder: str = ".", keep: bool = True) -> str:
    """Writes files until one fails; prints the MiB written. keep=False: they are unlinked while they stay open."""
    unlink = "" if keep else "os.unlink(path)"
    return f"""
import itertools
block, total, kept_open = bytes({each} << 20), 0, []
for i in range({count}):
    path = os.path.join({folder!r}, f'{{TAG}}-{{i}}')
    try:
        f = open(path, 'wb', buffering=0)
        kept_open.append(f)
        {unlink}
        n = f.write(block)
        total += n
        if n < len(block):
            raise OSError('short')
    except OSError as e:
        print(type(e).__name__, e)
        break
print('written', total >> 20)
"""


CASES = (
    Case("T31", "4 GiB at once", "limited", ("bytearray(4 << 30)",), check=_memory),
    Case(
        "T32",
        "arrays of 64 MiB until refused",
        "limited",
        (
            """
import numpy as np
blocks = []
try:
    while len(blocks) < 40:
        blocks.append(np.ones(8 << 20))
except MemoryError:
    pass
n = len(blocks)
del blocks
print('taken', n * 64)
""",
        ),
        check=_taken(),
    ),
    Case(
        "T33",
        "shared anonymous mappings of 8 x 256 MiB",
        "limited",
        (
            """
import mmap
maps = []
try:
    for _ in range(8):
        maps.append(mmap.mmap(-1, 256 << 20))
except (OSError, MemoryError) as e:
    print(e)
print('taken', len(maps) * 256)
del maps
""",
        ),
        check=_taken(),
    ),
    Case("T34", "children of 100 MiB each", "limited", (CHILDREN_OF_100_MB,), check=_taken()),
    Case(
        "T34f",
        "children of 100 MiB each where forks are allowed",
        "typed",
        (CHILDREN_OF_100_MB,),
        policy={"allow_fork": True},
        check=lambda trial: trial.result.status == "ok" and _taken()(trial),
    ),
    Case(
        "T35",
        "one large file",
        "typed",
        (
            "total = 0\nwith open(TAG, 'wb', buffering=0) as f:\n    try:\n        for _ in range(64):\n"
            "            total += f.write(bytes(16 << 20))\n    except OSError as e:\n        print(e)\n"
            "print('written', total >> 20)",
        ),
        check=_written(),
    ),
    Case("T35n", "1000 files of 1 MiB", "typed", (many_files(1000, 1),), levels=("namespaces",), check=_written()),
    Case(
        "T35w",
        "1000 files of 1 MiB where the pool has to watch from outside",
        "typed",
        # Slowly, so that a pool that looks ten times a second sees it; 300 MiB at most.
        (many_files(300, 1).replace("    try:\n", "    time.sleep(0.004)\n    try:\n", 1),),
        levels=("landlock", "seccomp"),
        check=lambda trial: trial.result.status == "ok" and _written()(trial),
    ),
    Case(
        "T35s",
        "the same in /dev/shm",
        "typed",
        (many_files(200, 1, "/dev/shm"),),
        levels=CONFINED_FILES,
        check=_written(),
        harmless=False,
    ),
    Case("T36", "a busy loop", "timeout, soft", ("x = 7", Step("while True: pass", timeout=SOFT)), check=_x_survives),
    Case("T37", "a long sleep", "timeout, soft", ("x = 7", Step("time.sleep(10**6)", timeout=SOFT)), check=_x_survives),
    Case(
        "T38",
        "a loop that catches everything",
        "timeout, hard",
        (
            "x = 7",
            Step(
                "end = time.time() + 20\nwhile time.time() < end:\n    try: time.sleep(1)\n"
                "    except BaseException: pass",
                timeout=SOFT,
            ),
        ),
        check=_overrun,
    ),
    Case(
        "T39",
        "infinite recursion without a limit",
        "typed",
        (Step("sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", timeout=1.0),),
    ),
    Case(
        "T39c",
        "infinite recursion on the C stack",
        "typed",
        (
            Step(
                "sys.setrecursionlimit(10**9)\nclass R:\n    def __repr__(self): return repr(self)\nrepr(R())",
                timeout=1.0,
            ),
        ),
    ),
    Case("T40", "a string of 1 GB as the value", "limited", ("'x' * 10**9",), check=_memory),
    Case("T40b", "a string of 40 MB as the value", "works", ("'x' * (4 * 10**7)",), check=_text_cut),
    Case(
        "T41",
        "printing for ever",
        "timeout, soft",
        (Step("while True: print('x' * 1000)", timeout=SOFT),),
        check=_output_cut,
    ),
    Case(
        "T42",
        "a core dump",
        "dead",
        (
            "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))",
            "for value in (1, 2):\n    try: call(157, 4, value, 0, 0, 0)  # may be dumped\n"
            "    except OSError as e: print(e)",
            "os.abort()",
        ),
        check=_no_core,
    ),
    Case(
        "T43",
        "a thread that spins after the cell",
        "contained",
        (
            """
import threading
end = time.time() + 20
def spin():
    while time.time() < end:
        pass
for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
""",
        ),
        check=_idle,
    ),
    Case(
        "T44",
        "a thread that goes on with the session",
        "works",
        (
            """
import threading
found, end = [], time.time() + 20
def work():
    while time.time() < end:
        found.append(1)
        time.sleep(0.002)
threading.Thread(target=work, daemon=True).start()
""",
        ),
        check=_goes_on,
    ),
)
