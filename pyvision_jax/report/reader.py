"""Reads a run directory: trajectories, metrics, summary and the lists of what was skipped.

Needs nothing of the training stack, so that a report can be built anywhere the directory was copied to. Everything here
is tolerant: a missing file is an empty answer, and a line cut short by a crash is counted, not raised.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1  # of one trajectory line
STEP_FILE = re.compile(r"step_(\d+)\.jsonl$")


# ---------------------------------------------------------------- values that JSON has no word for


def restore(value: Any) -> Any:
    """Undoes `recipes.plain.plain`: marked values become what they were; what could not be held stays a marked dict."""
    if isinstance(value, list):
        return [restore(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, held),) = value.items()
        if key == "__float__":
            return float(held)
        if key == "__bytes__":
            return base64.b64decode(held)
        if key == "__set__":
            return {_hashable(item) for item in restore(held)}
        if key == "__array__":
            return decode_arrays({"layout": [["", *held[:2]]], "zlib": held[2]})[""]
        if key == "__escaped__":  # a user's dict that itself looked like a mark
            return {name: restore(item) for name, item in held.items()}
    return {name: restore(item) for name, item in value.items()}


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def encode_arrays(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Packs arrays into one compressed text: `{"layout": [[name, dtype, shape], ...], "zlib": base64}`; exact."""
    layout, buffers = [], []
    for name, array in arrays.items():
        array = np.asarray(array)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        layout.append([name, array.dtype.str, list(array.shape)])
        buffers.append(array.tobytes())
    return {"layout": layout, "zlib": base64.b64encode(zlib.compress(b"".join(buffers), 1)).decode("ascii")}


def decode_arrays(packed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inverse of `encode_arrays`; the arrays may be written to."""
    data = zlib.decompress(base64.b64decode(packed["zlib"]))
    arrays, at = {}, 0
    for name, dtype_name, shape in packed["layout"]:
        dtype = np.dtype(dtype_name)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        arrays[name] = array.astype(dtype.newbyteorder("="))
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError(f"packed arrays hold {len(data)} bytes, their layout {at}")
    return arrays


# ---------------------------------------------------------------- JSONL


@dataclasses.dataclass
class Lines:
    """Rows of a JSONL file, with the number of lines that could not be read."""

    rows: list[dict[str, Any]]
    broken: int = 0


def read_jsonl(path: Path) -> Lines:
    """All whole lines of a file; an absent file has none. A broken line (a crash's last one) is counted."""
    if not path.is_file():
        return Lines([])
    out = Lines([])
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if row is None:
                out.broken += bool(line.strip())
            else:
                out.rows.append(row)
    return out


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object with its marks restored; `{}` where the file is absent or broken."""
    if not path.is_file():
        return {}
    return restore(_parse(path.read_bytes()) or {})


# ---------------------------------------------------------------- trajectories


@dataclasses.dataclass
class StoredTrajectory:
    """One line of `trajectories/PHASE/step_NNNN.jsonl`; fields as in `rollout.trajectory.Trajectory`.

    Beyond those: where it came from (`phase`, `step`), the decoded text of every span, `advantage` (None if it never
    got one), `dropped` (the filter that took it out of training, None if kept), `reference` (the record's answer) and
    `extras`. `arrays` unpacks at each use.
    """

    id: str
    record_id: str
    phase: str
    step: int
    group: str
    seed: int
    parent: tuple[str, int] | None
    spans: list[dict[str, Any]]  # kind, start, end, turn, learn, text
    images: list[str]
    image_grids: list[tuple[int, int, int]]
    videos: list[str]
    calls: list[dict[str, Any]]  # code, result, seconds, images
    events: list[dict[str, Any]]
    end_reason: str | None
    rewards: dict[str, float]
    advantage: float | None
    dropped: str | None
    answer: str | None
    reference: Any
    extras: dict[str, Any]
    packed: dict[str, Any]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """ids, logprobs, policy_logprobs, states, temperatures, versions [T], positions [3, T], maybe entropies and
        top_entropies [T]."""
        return decode_arrays(self.packed)

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> StoredTrajectory:
        if line.get("format") != FORMAT:
            raise ValueError(f"trajectory line of format {line.get('format')!r}; this reader knows {FORMAT}")
        fields = {f.name: restore(line[f.name]) for f in dataclasses.fields(cls) if f.name not in ("packed", "spans")}
        names = ("kind", "start", "end", "turn", "learn", "text")
        fields["spans"] = [dict(zip(names, span, strict=True)) for span in line["spans"]]
        fields["packed"] = line["arrays"]
        if fields["parent"] is not None:
            fields["parent"] = tuple(fields["parent"])
        fields["image_grids"] = [tuple(grid) for grid in fields["image_grids"]]
        return cls(**fields)


def read_trajectories(path: Path | str) -> list[StoredTrajectory]:
    """All trajectories of one step file, in the order they were written."""
    return [StoredTrajectory.from_line(row) for row in read_jsonl(Path(path)).rows]


def index_row(line: dict[str, Any], offset: int) -> dict[str, Any]:
    """What the report needs of every trajectory, without its text: one row of `step_NNNN.idx`. `offset` is in bytes."""
    learned = sum(end - start for kind, start, end, _, learn, _ in line["spans"] if kind == "policy" and learn)
    statuses = [call["result"].get("status") for call in line["calls"]]
    row = {name: line[name] for name in ("id", "record_id", "phase", "step", "group", "end_reason", "rewards")}
    row |= {"advantage": line["advantage"], "dropped": line["dropped"], "answer": line["answer"], "offset": offset}
    row |= {
        "tokens": sum(end - start for kind, start, end, *_ in line["spans"] if kind == "policy"),
        "learned": learned,
        "calls": len(statuses),
        "calls_ok": sum(status == "ok" for status in statuses),
        "images": len(line["images"]),
        "entropy": line["entropy"],
    }
    return row


def read_index(phase_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Light rows of every trajectory below `trajectories/PHASE`, in step order, and the number of broken lines.

    A step whose index is absent (the run was killed between the two files) is scanned instead.
    """
    rows: list[dict[str, Any]] = []
    broken = 0
    for path in step_files(phase_dir):
        index = path.with_suffix(".idx")
        if index.is_file():
            lines = read_jsonl(index)
            step_rows, bad = lines.rows, lines.broken
        else:
            step_rows, bad = _scan(path)
        broken += bad
        for row in step_rows:
            rows.append({**restore(row), "path": path})
    return rows, broken


def _scan(path: Path) -> tuple[list[dict[str, Any]], int]:
    rows, broken, offset = [], 0, 0
    with path.open("rb") as file:
        for line in file:
            parsed = _parse(line)
            if parsed is not None and parsed.get("format") == FORMAT:
                rows.append(index_row(parsed, offset))
            else:
                broken += bool(line.strip())
            offset += len(line)
    return rows, broken


def step_files(phase_dir: Path) -> list[Path]:
    """The step files of a phase, by step number."""
    found = [path for path in phase_dir.glob("step_*.jsonl") if STEP_FILE.search(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Step number in a step file's name."""
    match = STEP_FILE.search(path.name)
    if match is None:
        raise ValueError(f"{path.name}: not a step file")
    return int(match.group(1))


def load(row: dict[str, Any]) -> StoredTrajectory:
    """The whole trajectory behind a row of `read_index`."""
    with row["path"].open("rb") as file:
        file.seek(row["offset"])
        return StoredTrajectory.from_line(json.loads(file.readline()))


# ---------------------------------------------------------------- a whole run


@dataclasses.dataclass
class Run:
    """A run directory, read. `parts` are the directory itself and sub-directories that hold a stage of their own."""

    path: Path
    parts: list[Path]
    config: dict[str, str]  # text of config.yaml by part ("" for the directory itself)
    versions: dict[str, Any]
    sandbox: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]  # by phase, rows in step order
    index: list[dict[str, Any]]  # light rows of all trajectories
    skipped: list[dict[str, Any]]
    drops: list[dict[str, Any]]
    missing: list[str]  # sentences: what is absent or broken


EXPECTED = {
    "config.yaml": "the configuration",
    "versions.json": "versions of packages and devices",
    "metrics.jsonl": "metrics",
    "summary.json": "the final evaluation (the run did not reach it, or still runs)",
}


def read_run(path: Path | str) -> Run:
    """Reads all that is there. Raises FileNotFoundError only if the directory itself is absent."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no run directory at {path}")
    parts = [path, *(sub for sub in sorted(path.iterdir()) if sub.is_dir() and _is_part(sub))]
    run = Run(path, parts, {}, {}, {}, {}, {}, {}, [], [], [], [])
    for name, meaning in EXPECTED.items():
        if not any((part / name).is_file() for part in parts):
            run.missing.append(f"{name} is missing: {meaning}.")
    broken = 0
    for part in parts:
        prefix = "" if part == path else part.name
        config = part / "config.yaml"
        if config.is_file():
            run.config[prefix] = config.read_text(encoding="utf-8", errors="replace")
        for name, held in (("versions", run.versions), ("sandbox", run.sandbox), ("manifest", run.manifest)):
            for key, value in read_json(part / f"{name}.json").items():
                held.setdefault(key, value)
        if prefix == "" or not run.summary:
            run.summary = read_json(part / "summary.json") or run.summary
        for name, rows in (("skipped", run.skipped), ("drops", run.drops)):
            lines = read_jsonl(part / f"{name}.jsonl")
            rows.extend(restore(row) for row in lines.rows)
            broken += lines.broken
        broken += _read_metrics(part, prefix, run.metrics)
        for phase_dir in _phase_dirs(part):
            rows, bad = read_index(phase_dir)
            run.index.extend(rows)
            broken += bad
    if (path / "summary.json").is_file() and not run.summary:
        run.missing.append("summary.json cannot be read.")
    if not run.index:
        run.missing.append("trajectories/ is missing or empty: no trajectory can be shown.")
    if broken:
        run.missing.append(f"{broken} broken line(s) in JSONL files were passed over (a write was cut short).")
    return run


def _is_part(path: Path) -> bool:
    return any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "trajectories"))


def _phase_dirs(part: Path) -> Iterator[Path]:
    root = part / "trajectories"
    if root.is_dir():
        yield from sorted(sub for sub in root.iterdir() if sub.is_dir())


def _read_metrics(part: Path, prefix: str, into: dict[str, list[dict[str, Any]]]) -> int:
    lines = read_jsonl(part / "metrics.jsonl")
    for row in lines.rows:
        if not isinstance(row.get("step"), int):
            lines.broken += 1
            continue
        into.setdefault(str(row.get("phase") or prefix or "train"), []).append(restore(row))
    for rows in into.values():
        rows.sort(key=lambda row: row.get("step", 0))
    return lines.broken


def picture_path(run: Run, digest: str) -> Path | None:
    """File of a stored picture, or None; a digest that is no plain file name is never followed."""
    if not re.fullmatch(r"[\w.-]+", digest):
        return None
    for part in run.parts:
        path = part / "images" / f"{digest}.png"
        if path.is_file():
            return path
    return None
