"""Bodies of `pyvision doctor` and `pyvision sandbox`: what this machine offers, and the tool tried out by hand."""

from __future__ import annotations

import collections
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from pyvision_jax.data.media import open_image
from pyvision_sandbox import Policy, SandboxError, SandboxPool

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy", "pillow")
TRIAL = "import numpy as np\nfrom PIL import Image\nprint(6 * 7)\nImage.fromarray(np.full((4, 6, 3), 9, np.uint8))"


class Broken(SandboxError):
    """The sandbox started but did not give back what the trial cell makes."""


def try_sandbox(min_level: str) -> str:
    """Runs one cell that prints and returns a picture; the sandbox's report. Raises `SandboxError`, `ValueError`."""
    with SandboxPool(Policy(), min_level=min_level, workers=1) as pool, pool.session(seed=0) as session:
        result = session.run(TRIAL)
        if not result.ok or result.stdout.strip() != "42":
            raise Broken(f"the trial cell ended as {result.status}: {result.error or result.stdout!r}")
        if [image.shape for image in result.images] != [(4, 6, 3)]:
            raise Broken(f"the trial cell gave back pictures {[image.shape for image in result.images]}")
        return f"{pool.report}\n  trial cell: ok in {1000 * result.usage.wall_s:.1f} ms"


def run_file(code: str, images: Sequence[Path], out: Path | None, timeout: float, seed: int) -> bool:
    """Runs `code` as one cell with the pictures bound; prints what it printed. True if it ended well.

    Raises `SandboxError`, and `MediaError` for a picture that cannot be opened.
    """
    inputs = {f"image_clue_{i}": open_image(path) for i, path in enumerate(images)}
    with (
        SandboxPool(Policy(cell_timeout=timeout), workers=1) as pool,
        pool.session(seed=seed, images=inputs) as session,
    ):
        result = session.run(code)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    if result.repr is not None:
        print(result.repr)
    if result.error is not None:
        print(result.error["traceback"] or f"{result.error['name']}: {result.error['message']}", file=sys.stderr)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(result.images):
        height, width = image.shape[:2]
        where = ""
        if out is not None:
            path = out / f"image_{i}.png"
            Image.fromarray(np.asarray(image)).save(path)
            where = f" -> {path}"
        print(f"[image {i}: {width} x {height}{where}]", file=sys.stderr)
    print(f"[{result.status} in {result.usage.wall_s:.3f} s]", file=sys.stderr)
    return result.ok


def examine() -> bool:
    """Prints versions, devices, memory and the sandbox's report; True if a run could start here."""
    problems = _packages()
    problems += _devices()
    print(f"host: {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.1f} GiB of memory")
    try:
        print(try_sandbox("none"))
    except SandboxError as error:
        problems.append(f"sandbox: {error}")
    for problem in problems:
        print(f"problem: {problem}")
    print("fit to run" if not problems else f"{len(problems)} problem(s)")
    return not problems


def _packages() -> list[str]:
    problems = []
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
    print(f"Python {platform.python_version()}; {', '.join(found)}")
    problems += [f"{name} {have} is installed, {want} is pinned" for name, have, want in _pins() if have != want]
    return problems


def _pins() -> list[tuple[str, str, str]]:
    """(name, installed, wanted) of requirements pinned to one version; empty where the package is not installed."""
    try:
        lines = importlib.metadata.requires("pyvision-jax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    pinned = [match.groups() for line in lines if (match := re.fullmatch(r"([\w.-]+)==([\w.]+)", line))]
    return [(name, importlib.metadata.version(name), version) for name, version in pinned]


def _devices() -> list[str]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # what jax raises when a platform that was asked for cannot start
        return [f"jax finds no device: {' '.join(str(error).split())}"]
    kinds = collections.Counter(f"{device.platform} ({device.device_kind})" for device in devices)
    asked = os.environ.get("JAX_PLATFORMS")
    shown = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    print(f"devices: {shown}" + (f"; JAX_PLATFORMS={asked}" if asked else ""))
    return []


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
