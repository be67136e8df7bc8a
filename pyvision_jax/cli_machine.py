"""Body of `pyvision doctor`: what this machine offers."""

from __future__ import annotations

import collections
import importlib.metadata
import os
import platform
import re

from pyvision_sandbox import SandboxError
from pyvision_sandbox.__main__ import check

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy", "pillow")


def examine() -> bool:
    """Prints versions, devices, memory and the sandbox's report; True if a run could start here."""
    problems = _packages()
    problems += _devices()
    print(f"host: {platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.1f} GiB of memory")
    try:
        if not check():
            problems.append("sandbox: it confines less than a run needs (see above)")
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
