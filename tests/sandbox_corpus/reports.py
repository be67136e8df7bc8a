"""What users of other systems reported, as far as the code of a policy is concerned (U12, U40 to U49)."""

from __future__ import annotations

from pyvision_sandbox import observation_text

from .case import Case, Step
from .trial import Trial

SOFT = 0.4


def _reads(*words: str):
    """The model reads all of these words after the last step."""

    def check(trial: Trial) -> None:
        seen = observation_text(trial.result)
        for word in words:
            trial.expect(word in seen, f"{word!r} is not in what the model reads: {seen[-300:]!r}")

    return check


def _capped(trial: Trial) -> None:
    for result in trial.results:
        trial.expect(len(result.stdout) + len(result.stderr) < 5 * trial.policy.max_text, "the output is not capped")
        result.stdout.encode()  # valid UTF-8
        seen = observation_text(result, 8000)
        trial.expect(len(seen) <= 8000 and "\0" not in seen, f"the model reads {len(seen)} characters")


def _within(seconds: float):
    def check(trial: Trial) -> None:
        for result in trial.results:
            trial.expect(result.usage.wall_s < seconds, f"a step took {result.usage.wall_s:.1f} s")

    return check


def _no_large_picture(trial: Trial) -> None:
    for result in trial.results:
        pixels = [i.shape[0] * i.shape[1] for i in result.images]
        trial.expect(sum(pixels) <= trial.policy.max_total_pixels, f"pictures of {pixels} pixels")
        trial.expect(
            all(max(i.shape[:2]) <= trial.policy.max_ratio * min(i.shape[:2]) for i in result.images), "a strip"
        )


def _white(trial: Trial) -> None:
    for result in trial.results:
        trial.expect(len(result.images) == 1, f"{len(result.images)} pictures, {result.error}")
        for image in result.images:
            trial.expect(tuple(map(int, image[0, 0])) == (255, 255, 255), f"{image[0, 0]} where nothing is painted")


CASES = (
    Case(
        "U12",
        "palettes, alpha and frames",
        "works",
        (
            "from PIL import Image\nImage.new('RGBA', (30, 30), (255, 0, 0, 0))",
            "Image.new('LA', (30, 30), (0, 0))",
            "p = Image.new('P', (30, 30), 1); p.putpalette([0, 0, 0, 255, 0, 0]); p.info['transparency'] = 1; p",
            "import io\nb = io.BytesIO()\nImage.new('RGB', (30, 30), 'white').save(b, 'GIF', save_all=True, "
            "append_images=[Image.new('RGB', (30, 30), 'black')])\nImage.open(io.BytesIO(b.getvalue()))",
        ),
        check=_white,
    ),
    Case(
        "U40",
        "sys.exit, exit and a raised interrupt",
        "contained",
        (
            Step("print('x'); sys.exit(0)", status=("error",)),
            Step("exit()", status=("error",)),
            Step("raise KeyboardInterrupt", status=("error", "soft_timeout")),
            "print('after', kept)",
        ),
        check=_reads("after 41"),
    ),
    Case(
        "U41",
        "harmless words are not refused",
        "works",
        ("def user_input(x): return x\nuser_input('call input() and os.system() and subprocess')",),
        check=_reads("call input()"),
    ),
    Case(
        "U41b",
        "the text says what was refused",
        "limited",
        ("__import__('subprocess').run(['ls'])",),
        check=_reads("PermissionError"),
    ),
    Case(
        "U42",
        "output before the error",
        "limited",
        ("print('USEFUL 42')\n\n1/0",),
        check=_reads("USEFUL 42", "line 3", "ZeroDivision"),
    ),
    Case(
        "U43",
        "megabytes of output",
        "contained",
        (
            "print('a' * 5_000_000)",
            "for i in range(100_000): print(i)",
            "print('e' * 3_000_000, file=sys.stderr)",
            r"print('\0' * 1000, '\ud800' * 1000, '\x1b[31m' * 1000)",
            r"for i in range(10_000): print(i, end='\r')",
            "os.write(1, b'\\xff' * 3_000_000); os.write(2, b'x' * 3_000_000); None",
        ),
        check=_capped,
    ),
    Case(
        "U47",
        "loops that do not look at the interrupt",
        "typed",
        (
            Step("9 ** 9 ** 9", timeout=SOFT, status=("hard_timeout", "soft_timeout", "memory")),
            Step(
                "import re; re.match('(a+)+$', 'a' * 40 + 'b')", timeout=SOFT, status=("hard_timeout", "soft_timeout")
            ),
            Step("import itertools; sum(itertools.repeat(0, 10**10))", timeout=SOFT),
        ),
        check=_within(2.5),
    ),
    Case("U48", "input()", "limited", ("input('n? ')",), check=_reads("EOFError")),
    Case(
        "U48b",
        "a debugger",
        "limited",
        (
            Step("import pdb; pdb.set_trace()\nx = 1", status=("error", "ok")),
            Step("breakpoint()\nx = 1", status=("error", "ok")),
            "kept",
        ),
        check=_within(5),
    ),
    Case(
        "U49",
        "an array of 80 GB",
        "limited",
        ("import numpy as np; np.zeros((10**5, 10**5))",),
        check=_reads("memory limit"),
    ),
    Case(
        "U49b",
        "figures and pictures that are too large",
        "limited",
        (
            Step(
                "import matplotlib.pyplot as plt; plt.figure(figsize=(5000, 5000)); plt.show()",
                status=("ok", "error", "memory"),
            ),
            Step("from PIL import Image; Image.new('L', (20000, 20000))", status=("ok", "memory")),
            Step("from PIL import Image; Image.new('L', (1, 5000))"),
        ),
        check=_no_large_picture,
    ),
    Case(
        "U49c",
        "thousands of open figures",
        "typed",
        (
            Step(
                "import matplotlib.pyplot as plt, warnings; warnings.simplefilter('ignore')\n"
                "for i in range(10_000): plt.figure()",
                timeout=1.0,
            ),
        ),
        check=_within(3.5),
    ),
)
