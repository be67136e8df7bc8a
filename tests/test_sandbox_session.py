"""One session: typed results, state over turns, output, errors with the code's own line numbers, the policy's text."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from PIL import Image

from pyvision_sandbox import LEVELS, Policy, Result, SandboxPool, Session, observation_text
from pyvision_sandbox.text import clean, shorten


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(Policy(profile="numpy_pil", cell_timeout=10, max_text=1000)) as pool:
        yield pool


@pytest.fixture
def session(pool: SandboxPool):
    with pool.session(seed=7) as session:
        yield session


def test_state_lives_over_turns(session: Session):
    assert session.run("import math\nx = 40\ndef f(a):\n    return a + x").ok
    assert session.run("x += 1").repr is None
    assert session.run("f(1)").repr == "42"
    assert session.run("_ * 2, math.floor(1.5)").repr == "(84, 1)"
    assert session.run("class A:\n    y = 3\nA().y").repr == "3"
    assert session.run("A.__module__, __name__").repr == "('__main__', '__main__')"


def test_output_before_an_error_is_kept_with_the_codes_own_line(session: Session):
    """U42."""
    result = session.run("print('USEFUL 42')\n\n1/0")
    assert (result.status, result.stdout, result.session_alive) == ("error", "USEFUL 42\n", True)
    assert result.error is not None
    assert result.error["name"] == "ZeroDivisionError" and result.error["line"] == 3
    assert "line 3, in <module>\n    1/0" in result.error["traceback"]
    assert "runner.py" not in result.error["traceback"]


def test_error_in_a_function_of_an_earlier_turn(session: Session):
    session.run("def f(a):\n    b = a\n    return b['k']")
    result = session.run("y = 1\nf({})")
    assert result.error is not None and result.error["line"] == 2
    assert "File \"<cell 1>\", line 3, in f\n    return b['k']" in result.error["traceback"]
    assert 'File "<cell 2>", line 2' in result.error["traceback"]


@pytest.mark.parametrize(
    ("code", "name", "line"),
    [
        ("x = 1\nfor", "SyntaxError", 2),
        ("if True:\nx = 1", "IndentationError", 2),
        ("if True:\n\tx = 1\n        y = 2", "TabError", 3),
        ("x = 1\nawait x", "TypeError", 2),
        ("\ufeffx = 1\nx / 0", "ZeroDivisionError", 2),
        ("\ufeffx =", "SyntaxError", 1),
        ("\nx = '\x00'", "SyntaxError", 2),
        ("x = 1\x0c\ny = '\u2028'\n1/0", "ZeroDivisionError", 3),
        ("if True:\n\tx = 1\n\t1/0", "ZeroDivisionError", 3),
        ("!pip install x", "SyntaxError", 1),
        ("x = '\ud800'", None, None),
        ("x = 1\r\ny = 1/0\r\n", "ZeroDivisionError", 2),
        ("from __future__ import annotations\ndef f(a: Nope): ...\nf.__annotations__['a']", None, None),
    ],
)
def test_source_oddities_are_ordinary_results(session: Session, code: str, name: str | None, line: int | None):
    result = session.run(code)
    assert result.session_alive and (None if result.error is None else result.error["name"]) == name
    if line is not None:
        assert result.error is not None and result.error["line"] == line
        assert f", line {line}" in result.error["traceback"]
    if name == "ZeroDivisionError":
        assert result.error is not None and result.error["traceback"].count("/") >= 1  # the line itself is shown


@pytest.mark.parametrize("code", ["print('x'); sys.exit(0)", "print('x'); exit()", "print('x'); quit(2)"])
def test_exit_returns_at_once_and_keeps_the_state(session: Session, code: str):
    """U40."""
    session.run("import sys; kept = 5")
    result = session.run(code)
    assert (result.status, result.stdout, result.session_alive) == ("error", "x\n", True)
    assert result.error is not None and result.error["name"] == "SystemExit"
    assert "session goes on" in observation_text(result)
    assert result.usage.wall_s < 5
    after = session.run("print('after', kept)")
    assert after.stdout == "after 5\n" and not after.restarted


def test_raised_keyboard_interrupt_is_an_error_not_a_timeout(session: Session):
    result = session.run("raise KeyboardInterrupt")
    assert result.status == "error" and result.error is not None and result.error["name"] == "KeyboardInterrupt"


def test_os_exit_is_a_crash_and_the_next_call_says_that_it_starts_anew(pool: SandboxPool):
    """U40."""
    image = np.zeros((4, 6, 3), np.uint8)
    with pool.session(images={"image_clue_0": image}) as session:
        session.run("kept = 5")
        result = session.run("import os; print('x'); os._exit(1)")
        assert (result.status, result.session_alive, session.alive) == ("crashed", False, False)
        assert "exited with code 1" in observation_text(result)
        after = session.run("print('kept' in globals(), image_clue_0.size)")
        assert (after.status, after.stdout, after.restarted) == ("ok", "False (6, 4)\n", True)
        assert "started again" in observation_text(after)
        assert not session.run("1").restarted


def test_without_restart_a_dead_session_stays_dead():
    with SandboxPool(Policy(profile="numpy_pil", restart=False)) as pool, pool.session() as session:
        assert session.run("import ctypes; ctypes.string_at(0)").status == "crashed"
        result = session.run("print('after')")
        assert (result.status, result.session_alive) == ("crashed", False)
        assert result.error is not None and result.error["name"] == "SessionDead"
        assert "SIGSEGV" in result.error["message"]


def test_megabytes_of_output_keep_head_and_tail(session: Session):
    """U43."""
    result = session.run("print('HEAD' + 'a' * 5_000_000 + 'TAIL')")
    assert result.stdout.startswith("HEADaaa") and result.stdout.endswith("aaaTAIL\n")
    assert result.dropped["stdout"] == 5_000_009 - 1000
    assert f"[{5_000_009 - 1000} bytes cut]" in result.stdout and len(result.stdout) < 1100
    lines = session.run("for i in range(100_000):\n    print(i)")
    assert lines.stdout.startswith("0\n1\n") and lines.stdout.endswith("99998\n99999\n")
    assert lines.dropped["stdout"] == sum(len(f"{i}\n") for i in range(100_000)) - 1000
    flood = session.run("import sys\nfor i in range(1000): sys.stderr.write('e' * 1000)")
    assert flood.dropped["stderr"] == 1_000_000 - 1000 and flood.stdout == ""
    long = session.run("'x' * 100_000")
    assert long.repr is not None and len(long.repr) < 1100 and long.dropped["repr"] == 100_002 - 1000


def test_odd_characters_reach_the_policy_as_valid_text(session: Session):
    """U43."""
    code = r"print('a\x00b \ud800 \x1b[31mred\x1b[0m é', end='\n'); print('10%\r50%\r100%\n', end='')"
    result = session.run(code)
    assert result.stdout.encode()  # valid UTF-8 in any case
    assert observation_text(result) == "ab \\ud800 red é\n100%"
    cut = session.run("print('é' * 5000)")  # a cut inside a character leaves no half of it
    assert "\ufffd" not in cut.stdout and cut.stdout.startswith("éé")
    raw = session.run(r"import sys; sys.stdout.buffer.write(b'\xff\xfeok')")
    assert raw.stdout == "\ufffd\ufffdok"


def test_reading_input_raises(session: Session):
    """U48."""
    result = session.run("input('n? ')")
    assert result.error is not None and result.error["name"] == "EOFError" and result.stdout == "n? "
    result = session.run("import pdb; pdb.set_trace()\nx = 1\ny = 2")
    assert result.error is not None and result.error["name"] == "EOFError"
    assert observation_text(result).endswith(
        "EOFError: there is nobody to answer: neither input() nor a debugger can be used"
    )
    result = session.run("import os, sys; os.read(0, 5), sys.stdin.read()")
    assert result.repr == "(b'', '')"


def test_await_at_the_top(session: Session):
    code = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\ny = await f(3)\nawait f(y + 1)"
    assert session.run(code).repr == "4"
    assert session.run("task = asyncio.ensure_future(f(5)); await asyncio.sleep(0.01); task.result()").repr == "5"
    assert session.run("async with asyncio.timeout(1): z = await f(8)\nz").repr == "8"
    result = session.run("async def g():\n    return 1 / 0\nx = 1\nawait g()")
    assert result.error is not None and (result.error["name"], result.error["line"]) == ("ZeroDivisionError", 2)
    assert "asyncio" not in result.error["traceback"]
    assert session.run("asyncio.run(f(6))").repr == "6"


def test_streams_survive_what_code_does_to_them(session: Session):
    for code in ("import sys; sys.stdout = None", "sys.stdout.close()", "sys.stdin = None"):
        session.run(code)
        assert session.run("import sys; print('alive'); sys.stdout.flush()").stdout == "alive\n", code
    session.run("import logging; logging.basicConfig(); log = logging.getLogger('x')")
    assert "WARNING:x:late" in session.run("log.warning('late')").stderr


def test_children_and_descriptors_are_captured():
    policy = Policy(profile="numpy_pil", max_text=1000)
    with SandboxPool(policy, "none", max_level="none", unsafe=True) as pool, pool.session(trusted=True) as session:
        _check_children(session)


def _check_children(session: Session):
    result = session.run(
        "import os, subprocess, sys\nprint('first')\nsubprocess.run(['echo', 'child'])\nos.write(2, b'raw error')"
    )
    assert result.stdout == "first\nchild\n" and result.stderr == "raw error"
    assert session.run("print('next')").stdout == "next\n"
    flood = session.run("subprocess.run(['sh', '-c', 'yes | head -c 300000'], check=True); print('end')")
    assert flood.dropped["stdout"] > 290_000 and len(flood.stdout) < 1100


def test_seed_decides_random_numbers(pool: SandboxPool):
    code = "import random; (random.random(), float(np.random.rand()), sorted({'a', 'b', 'c'}, key=hash))"
    drawn = []
    for seed in (3, 3, 4, None):
        with pool.session(seed=seed) as session:
            drawn.append(session.run(code).repr)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_environment_is_fixed_and_files_are_private(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("H6_CANARY", "secret")
    with SandboxPool(Policy(profile="numpy_pil")) as fresh, fresh.session() as session:
        assert "secret" not in (session.run("import os; str(dict(os.environ))").repr or "")
    with pool.session() as a, pool.session() as b:
        assert a.run("open('x.txt', 'w').write('1'); import os, tempfile; os.listdir()").repr == "['x.txt']"
        assert b.run("import os; os.listdir(), os.path.samefile(os.getcwd(), os.environ['HOME'])").repr == "([], True)"
        assert a.run("os.path.samefile(tempfile.gettempdir(), os.getcwd())").repr == "True"


def test_bad_calls_by_the_caller(pool: SandboxPool, session: Session):
    with pytest.raises(ValueError, match="name 'image 0' is no Python"):
        pool.session(images={"image 0": np.zeros((2, 2, 3), np.uint8)})
    with pytest.raises(ValueError, match=r"'a' has shape \(2, 2, 2\)"):
        pool.session(images={"a": np.zeros((2, 2, 2), np.uint8)})
    with pytest.raises(ValueError, match="float"):
        pool.session(images={"a": 0.5})
    with pytest.raises(ValueError, match="class"):
        session.run("1", bind=["class"])
    result = session.run("#" * 1_000_001)
    assert result.status == "error" and result.error is not None and result.error["name"] == "CodeTooLong"


def test_result_is_plain_data_without_pixels(session: Session):
    data = session.run("print(1)\nImage.new('RGB', (5, 3))").to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["images"] == [[3, 5]] and data["status"] == "ok" and data["level"] in LEVELS


# ------------------------------------------------------------------------------------------------ the policy's text
def test_observation_of_an_error_fits_and_keeps_its_message():
    error = {"name": "E", "message": "m", "traceback": "Traceback\n" + "  frame\n" * 500 + "E: the end", "line": 3}
    result = Result("error", stdout="head" + "o" * 5000 + "tail", stderr="w" * 900, error=error)
    for limit in (0, 10, 100, 400, 4000, 100_000):
        text = observation_text(result, limit)
        assert len(text) <= limit
        if limit >= 400:
            assert text.endswith("E: the end")
            assert ("characters cut" in text) == (limit < 100_000)
    assert observation_text(result, 4000).startswith("headooo")


def test_observation_names_dropped_pictures_and_timeouts():
    result = Result("soft_timeout", error={"name": "KeyboardInterrupt", "message": "", "traceback": "", "line": 7})
    result.dropped = {"images": 2, "reasons": ["20000x20000 has more than 100 pixels"] * 2}
    text = observation_text(result)
    assert "at line 7" in text and "variables are kept" in text
    assert "[2 pictures not shown: 20000x20000 has more than 100 pixels]" in text
    assert observation_text(Result("ok")) == ""
    assert observation_text(Result("ok", repr="<Line2D object at 0x7f12ab34cd56>")) == "<Line2D object>"


def test_cleaned_text_is_valid_for_any_input():
    rng = random.Random(0)
    for _ in range(300):
        pieces = ["a", "\n", "\r", "\x1b", "[", "0m", "]", "\x07", "\x00", "\ud83d", "é", "\x9b"]
        text = clean("".join(rng.choice(pieces) for _ in range(40)) + "\nlast line")
        text.encode()  # raises for a lone surrogate
        assert text.endswith("last line") and not set(text) & {"\r", "\x00", "\x1b", "\x07", "\x9b"}
        for limit in (0, 1, 25, 60, 1000):
            assert len(shorten(text * 20, limit)) <= limit


def test_pictures_are_variables_of_any_kind(pool: SandboxPool):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.new("P", (5, 2), 3)
    with pool.session(
        images={"a": grey, "b": np.dstack([grey] * 4), "c": palette, "d": Image.new("1", (9, 9))}
    ) as session:
        assert session.run("[(i.mode, i.size) for i in (a, b, c, d)]").repr == (
            "[('L', (4, 3)), ('RGBA', (4, 3)), ('RGB', (5, 2)), ('RGB', (9, 9))]"
        )
        assert session.run("np.asarray(a).tolist()").repr == str(grey.tolist())
