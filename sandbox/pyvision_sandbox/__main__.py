"""`python -m pyvision_sandbox check | run FILE --image X`: what the sandbox is here; a script run as a policy would."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from .policy import LEVELS, PROFILES, Policy, SandboxError
from .pool import SandboxPool
from .text import observation_text

# (what is shown, code, statuses that pass, text that must be in the observation)
_PROBES = (
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
    ("a crash is told", "import os; os.abort()", ("crashed",), "SIGABRT"),
)


def check(profile: str = "vision", min_level: str = "none") -> bool:
    """Print the report and a dozen probes run in a real session. True: all held. SandboxError: there is no sandbox."""
    policy = Policy(profile=profile, cell_timeout=0.5, grace=0.5)
    held = True
    with SandboxPool(policy, min_level) as pool:
        print(pool.report)
        with pool.session(seed=0) as session:
            for name, code, statuses, text in _PROBES:
                result = session.run(code, timeout=None if "time" in code else 5.0)
                good = result.status in statuses and text in observation_text(result)
                held &= good
                print(
                    f"  [{'held' if good else 'FAILED'}] {name} ({result.status}, {result.usage.wall_s * 1e3:.1f} ms)"
                )
    return held


def run_file(
    path: Path, images: Sequence[Path] = (), out: Path | None = None, timeout: float = 10.0, profile: str = "vision"
) -> bool:
    """Run a script as one cell, as a policy would, with the pictures as image_clue_0, image_clue_1 and so on.

    Prints the observation; returned pictures go to `out` as PNG, or only their sizes are printed. True if it ran
    without error. Raises OSError for a file that cannot be read, SandboxError if the sandbox fails.
    """
    try:
        code = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(f"{path}: {error}") from error
    inputs = {}
    for i, name in enumerate(images):
        try:
            with Image.open(name) as image:
                inputs[f"image_clue_{i}"] = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise OSError(f"{name}: {error}") from error
    with SandboxPool(Policy(profile=profile, cell_timeout=timeout)) as pool, pool.session(images=inputs) as session:
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pyvision_sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser("check", help="print what confines the sessions on this machine, and try it")
    checker.add_argument("--min-level", choices=LEVELS, default="none")
    runner = commands.add_parser("run", help="run a script as a policy would")
    runner.add_argument("file", type=Path)
    runner.add_argument(
        "--image", type=Path, action="append", default=[], help="becomes image_clue_0, image_clue_1, ..."
    )
    runner.add_argument("--out", type=Path, help="folder for the pictures that come back")
    runner.add_argument("--timeout", type=float, default=10.0, help="seconds")
    for command in (checker, runner):
        command.add_argument("--profile", choices=list(PROFILES), default="vision")
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            held = check(args.profile, args.min_level)
        else:
            held = run_file(args.file, args.image, args.out, args.timeout, args.profile)
    except (SandboxError, OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
