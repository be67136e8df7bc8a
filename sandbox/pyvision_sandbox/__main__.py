"""`python -m pyvision_sandbox check | run FILE --image X`: what confines code here; a script run as a policy's is."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from .policy import LEVELS, Policy, Report, SandboxError
from .pool import SandboxPool
from .profiles import PROFILES
from .text import observation_text

SELECTABLE = LEVELS[1:]  # `none` is for tests, and only in code
# (what is shown, code, statuses that pass, text that must be in the observation)
_BEHAVIOUR = (
    ("state lives over turns", "x = 41", ("ok",), ""),
    ("the last expression is returned", "x + 1", ("ok",), "42"),
    ("an error keeps the output before it", "print('before')\n1/0", ("error",), "before"),
    ("input() does not wait", "input('?')", ("error",), "EOFError"),
    ("sys.exit keeps the session", "import sys; sys.exit(3)", ("error",), "exit(3)"),
    ("the memory limit holds", "b = bytearray(1 << 40)", ("memory",), "memory limit"),
    ("a picture comes back", "Image.new('RGB', (32, 16), 'red')", ("ok",), ""),
    ("a sleeping cell is interrupted", "import time; time.sleep(30)", ("soft_timeout",), "time limit"),
    ("the state is kept after that", "x", ("ok",), "41"),
    (
        "a cell that ignores the interrupt is killed",
        "import time\nwhile True:\n    try:\n        time.sleep(30)\n    except BaseException:\n        pass",
        ("hard_timeout",),
        "killed",
    ),
    ("the next call gets a fresh session", "print('back')", ("ok",), "back"),
    ("a crash is told", "import os; os.abort()", ("crashed",), "ended by SIG"),
)


def check(profile: str = "vision", min_level: str = "landlock", max_level: str = "namespaces") -> bool:
    """Print the report of the strongest level that works here, and a dozen calls in a session. True: all as promised.

    False as well if the machine reaches less than `min_level`: the report says what is missing. Raises ValueError for a
    level that cannot be asked for, SandboxUnavailable if not even seccomp works.
    """
    for level in (min_level, max_level):
        if level not in SELECTABLE:
            raise ValueError(f"the sandbox level must be one of {', '.join(SELECTABLE)}, not {level!r}")
    policy = Policy(profile=profile, cell_timeout=0.5, grace=0.5)
    lowest = min((min_level, max_level, "seccomp"), key=LEVELS.index)
    with SandboxPool(policy, lowest, max_level=max_level) as pool:
        print(pool.report)
        held = _enough(pool.report, min_level) and pool.report.held
        with pool.session(seed=0, trusted=True) as session:
            for name, code, statuses, text in _BEHAVIOUR:
                result = session.run(code, timeout=None if "time" in code else 5.0)
                good = result.status in statuses and text in observation_text(result)
                held &= good
                print(
                    f"  [{'held' if good else 'FAILED'}] {name} ({result.status}, {result.usage.wall_s * 1e3:.1f} ms)"
                )
    return held


def _enough(report: Report, min_level: str) -> bool:
    if LEVELS.index(report.level) >= LEVELS.index(min_level):
        return True
    print(f"  BELOW {min_level}: a pool with min_level={min_level!r} refuses to start here, for the reasons above")
    return False


def run_file(
    path: Path,
    images: Sequence[Path] = (),
    out: Path | None = None,
    timeout: float = 10.0,
    profile: str = "vision",
    *,
    videos: Sequence[Path] = (),
    min_level: str = "landlock",
    mended: bool = False,
) -> bool:
    """Run a script as one cell, as a policy's is, pictures as image_clue_0, ..., videos as video_clue_0, ...

    Prints the observation; returned pictures go to `out` as PNG, or only their sizes are printed. mended: trivial
    faults are mended first, and each mend is printed. True if it ran without error. Raises OSError for a file that
    cannot be read, SandboxError if the sandbox fails.
    """
    try:
        code = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(f"{path}: {error}") from error
    pictures = {f"image_clue_{i}": _open(name) for i, name in enumerate(images)}
    films = {f"video_clue_{i}": str(name) for i, name in enumerate(videos)}
    if mended:
        from .mend import mend

        changed = mend(code, {name: (picture.height, picture.width) for name, picture in pictures.items()})
        code = changed.code
        for one in changed.mends:
            print(f"[mended, line {one.line}, {one.rule}: {one.before!r} -> {one.after!r}]")
    policy = Policy(profile=profile, cell_timeout=timeout)
    # A script that its owner names is trusted; the level is still what was asked for.
    with SandboxPool(policy, min_level) as pool, pool.session(images=pictures, videos=films, trusted=True) as session:
        result = session.run(code)
    print(f"[{result.status}, {result.usage.wall_s:.3f} s, {pool.report.summary}]")
    print(observation_text(result, 64_000))
    for i, pixels in enumerate(result.images):
        place = "not saved: no --out"
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(out / f"{path.stem}_{i}.png")
            place = str(out / f"{path.stem}_{i}.png")
        print(f"[picture {i}: {pixels.shape[1]}x{pixels.shape[0]}, {place}]")
    return result.ok


def _open(name: Path) -> Image.Image:
    try:
        with Image.open(name) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(f"{name}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pyvision_sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser("check", help="print what confines the sessions on this machine, and try it")
    checker.add_argument("--max-level", choices=SELECTABLE, default="namespaces", help="try this level first")
    runner = commands.add_parser("run", help="run a script as a policy's code is run")
    runner.add_argument("file", type=Path)
    runner.add_argument(
        "--image", type=Path, action="append", default=[], help="becomes image_clue_0, image_clue_1, ..."
    )
    runner.add_argument("--video", type=Path, action="append", default=[], help="becomes video_clue_0, ...")
    runner.add_argument("--out", type=Path, help="folder for the pictures that come back")
    runner.add_argument("--timeout", type=float, default=10.0, help="seconds")
    runner.add_argument("--mend", action="store_true", help="mend trivial faults first, and say which")
    for command in (checker, runner):
        command.add_argument("--profile", choices=list(PROFILES), default="vision")
        command.add_argument("--min-level", choices=SELECTABLE, default="landlock", help="weakest isolation accepted")
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            held = check(args.profile, args.min_level, args.max_level)
        else:
            held = run_file(
                args.file, args.image, args.out, args.timeout, args.profile, videos=args.video,
                min_level=args.min_level, mended=args.mend,
            )  # fmt: skip
    except (SandboxError, OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
