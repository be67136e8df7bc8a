"""F. The protocol and the runner."""

from __future__ import annotations

import os

from pyvision_sandbox import observation_text

from .case import Case, Step
from .trial import Trial

REDUCED = """
class Evil(Exception):
    def __reduce__(self):
        return (exec, ("import os; os.environ['PWNED'] = '1'",))
    def __repr__(self): return 'evil'
evil = Evil('x')
"""


def _never_unpickled(trial: Trial) -> None:
    trial.expect("PWNED" not in os.environ, "the pool ran the session's code")
    trial.expect(trial.results[1].repr == "evil", f"the repr is {trial.results[1].repr!r}")
    error = trial.results[2].error
    trial.expect(error is not None and error["name"] == "Evil", f"the error is {error}")


def _code(status: str, text: str):
    def check(trial: Trial) -> None:
        seen = observation_text(trial.result)
        trial.expect(
            trial.result.status == status and text in seen, f"{trial.result.status}: the model reads {seen[-200:]!r}"
        )

    return check


def _prints_again(trial: Trial) -> None:
    for i, result in enumerate(trial.results):
        if i % 2:
            trial.expect(result.stdout.strip() == "fine" and result.repr == "2", f"after step {i}: {result.to_dict()}")


def _not_disturbed(trial: Trial) -> None:
    normal, new = trial.results[1], trial.results[2]
    trial.expect(normal.stdout.strip().endswith("fine"), f"the next cell prints {normal.stdout!r}")
    right = "0.3333333333333333333333333333 28 0o77 True"
    trial.expect(new.stdout.strip() == right, f"a new session prints {new.stdout!r}")


def _stripped(trial: Trial) -> None:
    seen = observation_text(trial.result)
    trial.expect("red" in trial.result.stdout, f"stdout is {trial.result.stdout!r}")
    trial.expect(
        not any(ord(c) < 32 and c not in "\n\t" for c in seen) and "\x1b" not in seen, f"the model reads {seen!r}"
    )


# code -> (status, error name, line) that it must end with
SOURCES: tuple[tuple[str, str, str | None, int | None], ...] = (
    ("x = 1\ny = = 2", "error", "SyntaxError", 2),
    ("def f():\nreturn 1", "error", "IndentationError", 2),
    ("if True:\n\tx = 5\nx", "ok", None, None),
    ("if True:\n        x = 1\n\tx = 2", "error", "TabError", 3),
    ("x = 1\r\nif x:\r\n    x = 2\r\nprint(x)", "ok", None, None),
    ("\ufeffx = 3", "ok", None, None),
    ("x = 1\0", "error", None, None),
    ("from __future__ import annotations\ndef f(a: nowhere): pass\nf.__annotations__", "ok", None, None),
    ("import asyncio\nawait asyncio.sleep(0, 5)", "any", None, None),
    ("s = '\ud800'", "error", None, None),
    ("", "ok", None, None),
    ("# only a comment", "ok", None, None),
    ("return 1", "error", "SyntaxError", 1),
    ("x = 1\n\n\n1/0", "error", "ZeroDivisionError", 4),
    ("(" * 3000, "error", None, None),
    ("x = " + "-" * 20000 + "1", "any", None, None),
)


def _own_lines(trial: Trial) -> None:
    for result, (code, status, name, line) in zip(trial.results, SOURCES, strict=True):
        what = f"{code[:40]!r} ends as {result.status}, {result.error}"
        # A byte-order mark and a lone surrogate may be accepted or be told: both are right, a lost session is not.
        exact = status != "any" and not any(c in code for c in "\ufeff\ud800")
        trial.expect(result.status == status if exact else result.status in ("ok", "error", "memory"), what)
        if name is not None:
            trial.expect(result.error is not None and result.error["name"] == name, what)
            trial.expect(result.error is not None and result.error["line"] == line, f"{what}: line {line} is right")


def _before_a_normal_cell(*codes: str) -> tuple[str, ...]:
    return tuple(step for code in codes for step in (f"import os, sys\n{code}", "print('fine'); 1 + 1"))


CASES = (
    Case(
        "T51",
        "random bytes to every descriptor",
        "dead",
        (
            "for fd in range(3, 1024):\n    try: os.write(fd, os.urandom(64))\n    except OSError: pass\n"
            "time.sleep(0.2)",
        ),
    ),
    Case("T52", "closing every descriptor", "dead", ("os.closerange(0, 256)",)),
    Case("T53", "os._exit", "dead", ("os._exit(0)",), check=_code("crashed", "exited with code 0")),
    Case(
        "T53b",
        "sys.exit",
        "contained",
        (Step("print('x'); sys.exit(3)", status=("error",)), "print('after')"),
        check=lambda trial: trial.expect(trial.result.stdout == "after\n", "the next cell does not run"),
    ),
    Case(
        "T53c",
        "SystemExit and exit()",
        "contained",
        (Step("raise SystemExit", status=("error",)), Step("exit()", status=("error",)), "1"),
    ),
    Case("T54", "a wild pointer", "dead", ("ctypes.string_at(0)",), check=_code("crashed", "SIGSEGV")),
    Case(
        "T55",
        "the output streams replaced or closed",
        "contained",
        _before_a_normal_cell(
            "sys.stdout = None",
            "sys.stdout.close()",
            "sys.stdout = sys.stderr = sys.__stdout__ = open('x', 'w')",
            "import io; sys.stdout = io.StringIO()",
            "sys.stdout.reconfigure(encoding='ascii', errors='strict')",
            "del sys.stdout, sys.stderr, sys.stdin",
        ),
        check=_prints_again,
    ),
    Case(
        "T55c",
        "the output streams detached, their descriptors closed, their modules forgotten",
        "contained",
        _before_a_normal_cell(
            "sys.stderr.close(); sys.stdout.detach()",
            "sys.stdout.buffer.detach()",
            "os.close(1); os.close(2)",
            "os.dup2(0, 1); os.dup2(0, 2)",
            "sys.displayhook = sys.excepthook = None; sys.modules.pop('io', None)\n"
            "sys.modules.pop('sys', None); import sys",
        ),
        check=_prints_again,
    ),
    Case(
        "T55b",
        "print replaced",
        "contained",
        ("print = None", Step("print('x')", status=("error",)), "del print", "print('fine')"),
        check=lambda trial: trial.expect(trial.result.stdout == "fine\n", "print does not come back"),
    ),
    Case(
        "T56",
        "objects whose unpickling runs code",
        "contained",
        (
            REDUCED,
            "evil",
            Step("raise evil", status=("error",)),
            Step("raise ValueError(evil, Evil)", status=("error",)),
            "kept",
        ),
        check=_never_unpickled,
    ),
    Case(
        "T57",
        "trace functions and import hooks",
        "contained",
        (
            """
import threading
count = 0
def trace(*a):
    global count
    count += 1
    return trace
class Hook:
    def find_spec(self, name, path, target=None):
        raise RuntimeError('no imports')
sys.settrace(trace); sys.setprofile(trace); threading.setprofile(trace); threading.settrace(trace)
sys.addaudithook(lambda *a: None)
sys.meta_path.insert(0, Hook())
sys.path_hooks.clear(); sys.path_importer_cache.clear()
""",
            "x = 20\nx + 22",
            "1/1",
        ),
        check=lambda trial: trial.expect(trial.results[1].repr == "42", "the next cell is disturbed"),
    ),
    Case(
        "T57b",
        "the runner's own tools replaced",
        "typed",
        (
            "import builtins, json, struct\n"
            "os.write = os.read = os.readv = os._exit = time.perf_counter = lambda *a, **k: 0",
            "builtins.len = builtins.isinstance = builtins.memoryview = lambda *a: 0",
        ),
    ),
    Case(
        "T58",
        "settings of the process",
        "isolated",
        (
            "import locale, decimal\ntry: locale.setlocale(locale.LC_ALL, 'tr_TR.UTF-8')\nexcept locale.Error: pass\n"
            "decimal.getcontext().prec = 1; os.umask(0); os.chdir('/'); os.environ.clear(); sys.path.clear()",
            "print('fine')",
            Step(
                "import decimal, os\nmask = os.umask(0o77); os.umask(mask)\n"
                "home = os.path.realpath(os.environ['HOME'])\n"
                "print(decimal.Decimal(1) / 3, decimal.getcontext().prec, oct(mask), os.getcwd() == home)",
                who="new",
            ),
        ),
        check=_not_disturbed,
    ),
    Case(
        "T59",
        "terminal escapes",
        "contained",
        (r"print('\x1b[31mred\x1b]0;title\x07', '\r', '\b\b', 'a\0b', '\x9b2J')",),
        check=_stripped,
    ),
    Case(
        "T60",
        "faulty and odd sources",
        "limited",
        tuple(Step(code, status=("ok", "error", "memory")) for code, *_ in SOURCES),
        check=_own_lines,
    ),
)
