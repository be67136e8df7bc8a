"""What a case is, and the helpers that its code finds in the session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trial import Trial

ALL = ("namespaces", "landlock", "seccomp")
# The `seccomp` level leaves the host's files to the code: what a case says of files holds only above it.
CONFINED_FILES = ("namespaces", "landlock")
# kind -> (statuses that the last step may have, must the session and its variables live on; None: it may)
VERDICTS: dict[str, tuple[tuple[str, ...], bool | None]] = {
    "blocked": (("ok",), True),
    "limited": (("ok", "error", "memory"), True),
    "timeout, soft": (("soft_timeout",), True),
    "timeout, hard": (("hard_timeout",), False),
    "dead": (("crashed", "protocol_error"), False),
    "contained": (("ok",), True),
    "isolated": (("ok",), True),
    "works": (("ok",), True),
    # Any typed end is right, as long as the pool and the others do not notice.
    "typed": (("ok", "error", "memory", "soft_timeout", "hard_timeout", "crashed", "protocol_error"), None),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One cell. who: "main", "sibling", or "new" (a session of its own, closed after it)."""

    code: str
    who: str = "main"
    timeout: float = 10.0  # generous: only cases about time use a short one
    status: tuple[str, ...] = ("ok",)  # of steps before the last; the verdict speaks about the last one


@dataclasses.dataclass(frozen=True)
class Case:
    id: str
    title: str
    verdict: str | Mapping[str, str]  # a key of VERDICTS, or one for each level
    steps: tuple[str | Step, ...]
    attempts: int = 0  # how many `attempt`s the steps must have made, so that a broken snippet does not pass
    levels: tuple[str, ...] = ALL
    harmless: bool = True  # bounded enough to run where nothing confines it
    policy: Mapping[str, object] = dataclasses.field(default_factory=dict)
    check: Callable[[Trial], None] | None = None  # more than the verdict says

    def verdict_at(self, level: str) -> str:
        return self.verdict if isinstance(self.verdict, str) else self.verdict[level]


# The first cell of each session. `attempt` prints one line for each try; a try that got through prints "@worked".
# A name that begins with "own " may work: it must then only be seen by nobody else.
PRELUDE = '''
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
kept = 41

def call(number, *arguments):
    """A raw system call, so that no library stands between."""
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if value < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))
    return value

def attempt(name, function, *arguments, reached=()):
    """`reached`: errors that only come when the kernel has let the call through."""
    try:
        value = function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        through = isinstance(e, OSError) and e.errno in reached
        print(f"@{'worked' if through else 'blocked'} {name}: {type(e).__name__}: {str(e)[:200]!r}")
    else:
        print(f"@worked {name}: {repr(value)[:200]}")

def attempt_call(name, number, *arguments):
    attempt(name, call, number, *arguments, reached=(errno.EFAULT, errno.EBADF, errno.EINVAL))

def read(path):
    with open(path, 'rb') as f:
        return f.read(100)

def size(path):
    """Of files whose content must not stand in a log."""
    return len(read(path))

def listing(path):
    try:
        return os.listdir(path)
    except OSError:
        return []

def create(path):
    with open(path, 'xb'):
        os.unlink(path)
    return path
'''
# Errors that say that the snippet itself is wrong, not that something was refused.
BROKEN = ("NameError", "TypeError", "AttributeError", "ValueError", "SyntaxError", "IndexError", "KeyError",
          "ArgumentError", "UnboundLocalError", "ImportError", "AssertionError")  # fmt: skip
