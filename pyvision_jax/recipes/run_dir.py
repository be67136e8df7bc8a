"""The run directory: everything that is needed to know what a run did, and with what.

run.json         when and how each start of the run was made
config.yaml      the configuration            versions.json    packages, devices, commit
sandbox.json     the sandbox's own report      manifest.json    the data that was read
skipped.jsonl    records that could not be used: id, file, row, reason
drops.jsonl      trajectories or groups that selection left out, by step and reason
summary.json     the final evaluation          report.html      made by `report.build`
metrics.csv, metrics.jsonl, tensorboard/, trajectories/, images/, checkpoints/
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import yaml

from pyvision_jax.recipes.metrics import MetricsWriter
from pyvision_jax.recipes.plain import plain
from pyvision_jax.recipes.trajectories import TrajectoryWriter, read_trajectories
from pyvision_jax.report.reader import read_json

__all__ = ["RunDir", "TrajectoryWriter", "read_trajectories", "versions"]

Mode = Literal["open", "new", "replace", "resume"]
WRITTEN = (
    *("run.json", "config.yaml", "versions.json", "sandbox.json", "manifest.json", "summary.json", "report.html"),
    *("skipped.jsonl", "drops.jsonl", "metrics.csv", "metrics.jsonl", "tensorboard", "trajectories", "images"),
    "checkpoints",
)
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "pillow", "transformers", "tokenizers"),
    *("safetensors", "decord", "matplotlib", "jinja2", "tensorboardX", "math-verify", "msgpack", "torch"),
)


class RunDir:
    """Opens `path` for writing.

    Args:
        path: made if absent.
        mode: `open` takes what is there (a stage that adds to a directory); `new` raises FileExistsError if it already
            holds a run; `replace` removes an earlier run's files (only names that a run writes, only if `run.json` says
            that it is one); `resume` goes on with one and keeps every row before the resumed step.
        command: how the run was started; the process's own arguments by default.
    """

    def __init__(self, path: Path | str, mode: Mode = "open", command: str = ""):
        self.path = Path(path)
        self.mode: Mode = mode
        self._lock = threading.Lock()
        marker = self.path / "run.json"
        if mode == "new" and marker.is_file():
            raise FileExistsError(f"{self.path} already holds a run: resume it, replace it, or name another run_dir")
        if mode == "replace" and self.path.is_dir():
            self._clear(marker)
        self.path.mkdir(parents=True, exist_ok=True)
        starts = read_json(marker).get("starts", [])
        start = {"time": _now(), "command": command or _command(), "mode": mode, "process": os.getpid()}
        self._json("run.json", {"starts": [*starts, start]})

    def _clear(self, marker: Path) -> None:
        if not marker.is_file():
            if any(self.path.iterdir()):
                raise FileExistsError(f"{self.path} is not empty and no run: nothing there is removed")
            return
        for name in WRITTEN:
            target = self.path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    # ------------------------------------------------------------ what the run was made of

    def write_config(self, config: Any) -> Path:
        """config.yaml from a dataclass or a mapping; an earlier, different one is kept as config.N.yaml."""
        text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
        path = self.path / "config.yaml"
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            number = len(list(self.path.glob("config.*.yaml"))) + 1
            path.rename(self.path / f"config.{number}.yaml")
        _write(path, text)
        return path

    def write_versions(self) -> Path:
        """versions.json; on a resume under other versions the earlier ones are kept under `earlier`."""
        now = versions()
        before = read_json(self.path / "versions.json")
        earlier = before.pop("earlier", [])
        if before and before != now:
            earlier.append(before)
        return self._json("versions.json", {**now, "earlier": earlier} if earlier else now)

    def write_sandbox(self, report: Mapping[str, Any]) -> Path:
        """sandbox.json: the level reached and whatever else the sandbox says of itself."""
        return self._json("sandbox.json", report)

    def write_manifest(self, name: str, **facts: Any) -> Path:
        """Adds one source to manifest.json: `write_manifest("train", path=..., records=1000)`.

        A `path` of a file is completed with its size and SHA-256.
        """
        manifest = read_json(self.path / "manifest.json")
        if "path" in facts and Path(facts["path"]).is_file():
            facts |= {"bytes": Path(facts["path"]).stat().st_size, "sha256": _sha256(Path(facts["path"]))}
        return self._json("manifest.json", {**manifest, name: facts})

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """summary.json: `accuracy.NAME = {mean, low, high, n, greedy}`, `tool_calls`, `seconds`, `seed`, `chance`."""
        return self._json("summary.json", summary)

    # ------------------------------------------------------------ what happened

    def skip(self, id: str, reason: str, file: str = "", row: int | None = None, **more: Any) -> None:
        """Lists a record that cannot be used; the run goes on. May be called from any thread."""
        self._append("skipped.jsonl", {"id": id, "file": file, "row": row, "reason": reason, **more})

    def drop(self, phase: str, step: int, reasons: Mapping[str, int], **more: Any) -> None:
        """Lists how many groups or trajectories each filter took out of a step."""
        self._append("drops.jsonl", {"phase": phase, "step": step, "reasons": dict(reasons), **more})

    def rewind(self, phase: str, step: int) -> None:
        """Removes rows of drops.jsonl that a resumed run writes again (metrics, trajectories: their writers do)."""
        path = self.path / "drops.jsonl"
        if not path.is_file():
            return
        keep = []
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                if row["phase"] != phase or row["step"] < step:
                    keep.append(line)
        _write(path, "".join(keep))

    def metrics(self, phase: str, resume_step: int | None = None, tensorboard: bool = True) -> MetricsWriter:
        """A metrics writer of one phase; rows of other phases in this directory stay."""
        return MetricsWriter(self.path, tensorboard, phase, resume_step)

    def trajectories(
        self, decode: Callable[[list[int]], str], picture: Callable[[str], np.ndarray] | None = None
    ) -> TrajectoryWriter:
        """A trajectory writer into this directory."""
        return TrajectoryWriter(self.path, decode, picture)

    def _json(self, name: str, value: Any) -> Path:
        path = self.path / name
        _write(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
        return path

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        line = json.dumps(plain(row), allow_nan=False) + "\n"
        with self._lock, (self.path / name).open("a", encoding="ascii") as file:
            file.write(line)


def versions() -> dict[str, Any]:
    """Python, packages, devices, machine and git commit of this process."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices: dict[str, int] = {}
    for device in jax.devices():
        kind = f"{device.platform}: {device.device_kind}"
        devices[kind] = devices.get(kind, 0) + 1
    return {
        "python": platform.python_version(),
        "jax": packages.get("jax"),
        "pillow": packages.get("pillow"),  # pictures are resized by it: pixels depend on its version
        "packages": packages,
        "devices": devices,
        "processes": jax.process_count(),
        "machine": {"system": platform.system(), "arch": platform.machine(), "cpus": os.cpu_count()},
        "flags": {key: value for key, value in sorted(os.environ.items()) if key.startswith(("JAX_", "XLA_FLAGS"))},
        "commit": git_commit(),
    }


def git_commit(root: Path | None = None) -> str | None:
    """Commit of the checkout that holds this file, with `+changes` if tracked files differ; None outside a checkout."""
    root = root or Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
