"""The trajectories that a report shows: a mix of right and wrong, with and without a call, and how each is laid out."""

from __future__ import annotations

import base64
import io
import math
import re
from collections import deque
from pathlib import Path
from typing import Any

from PIL import Image

from pyvision_jax.report import reader
from pyvision_jax.report.numbers import accuracy_of, is_evaluation
from pyvision_jax.report.reader import Run, StoredTrajectory

MAX_SIDE = 640  # pixels of a picture in the report
MAX_TEXT = 12_000  # characters of one span or output
_SPECIAL = re.compile(r"<\|[\w./-]+\|>(?:\*\d+)?")
_PAD = re.compile(r"<\|(?:image|video)_pad\|>(?:\*(\d+))?")


def choose(run: Run, count: int) -> list[dict[str, Any]]:
    """`count` rows of the index (all, if there are fewer): the kinds take turns, at most one trajectory of a group.

    A kind is (where in the run, right or wrong, with or without a call); the end of training comes first, evaluations
    next, its start last. Deterministic.
    """
    kinds: dict[tuple[int, bool, bool], deque[dict[str, Any]]] = {}
    span = _step_ranges(run)
    for row in run.index:
        kind = (_when(row, span), (accuracy_of(row) or 0.0) > 0.5, row["calls"] > 0)
        kinds.setdefault(kind, deque()).append(row)
    for (when, _, _), rows in kinds.items():
        ordered = sorted(rows, key=lambda row: (-row["step"] if when < 2 else row["step"], row["dropped"] is not None))
        rows.clear()
        rows.extend(ordered)
    order = sorted(kinds, key=lambda kind: (kind[0], not kind[2], kind[1]))
    chosen: list[dict[str, Any]] = []
    for alone in (True, False):  # a second pass takes siblings, where there are too few groups
        taken: set[tuple[Any, ...]] = set()
        shown = {id(row) for row in chosen}
        queues = {kind: deque(row for row in kinds[kind] if id(row) not in shown) for kind in order}
        while len(chosen) < count and any(queues.values()):
            for kind in order:
                queue = queues[kind]
                while alone and queue and _group(queue[0]) in taken:
                    queue.popleft()
                if queue and len(chosen) < count:
                    row = queue.popleft()
                    taken.add(_group(row))
                    chosen.append(row)
    return chosen


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["phase"], row["step"], row["group"] or row["id"]


def _step_ranges(run: Run) -> dict[str, tuple[int, int]]:
    ranges: dict[str, tuple[int, int]] = {}
    for row in run.index:
        low, high = ranges.get(row["phase"], (row["step"], row["step"]))
        ranges[row["phase"]] = (min(low, row["step"]), max(high, row["step"]))
    return ranges


def _when(row: dict[str, Any], ranges: dict[str, tuple[int, int]]) -> int:
    """0 the last third of training, 1 evaluations, 2 before."""
    if is_evaluation(row["phase"]):
        return 1
    low, high = ranges[row["phase"]]
    return 0 if row["step"] >= high - (high - low) / 3 else 2


def card(run: Run, row: dict[str, Any], place: int, anchors: dict[tuple[str, str], str]) -> dict[str, Any]:
    """What the page shows of one trajectory. `anchors`: (file, id) of the shown trajectories -> anchor on the page."""
    full = reader.load(row)
    pictures = deque(enumerate(full.images))
    spans = [_span(run, full, span, pictures) for span in full.spans]
    siblings = [
        {**other, "right": accuracy_of(other), "anchor": anchors.get((str(other["path"]), other["id"]))}
        for other in run.index
        if row["group"] and _group(other) == _group(row)
    ]
    return {
        "anchor": f"t{place}",
        "place": place,
        "row": row,
        "right": accuracy_of(row),
        "spans": spans,
        "rest": [_picture(run, full, index) for index, _ in pictures],  # pictures without a placeholder in the text
        "calls": [_call(run, call) for call in full.calls],
        "rewards": sorted(full.rewards.items()),
        "facts": _facts(full),
        "reference": full.reference,
        "answer": full.answer,
        "extras": sorted(full.extras.items()),
        "siblings": siblings,
    }


def _facts(full: StoredTrajectory) -> list[tuple[str, str]]:
    arrays = full.arrays
    mask = [span for span in full.spans if span["kind"] == "policy" and span["learn"]]
    picked = [value for span in mask for value in arrays["policy_logprobs"][span["start"] : span["end"]]]
    versions = [int(value) for span in mask for value in arrays["versions"][span["start"] : span["end"]]]
    facts = [
        ("tokens in all", f"{len(arrays['ids']):,}"),
        ("tokens learned", f"{len(picked):,}"),
        ("seed", str(full.seed)),
    ]
    if picked:
        facts.append(("mean log-probability", f"{sum(map(float, picked)) / len(picked):.3f}"))
        first, last = min(versions), max(versions)
        facts.append(("weights version", str(first) if first == last else f"{first} to {last}"))
    if full.parent is not None:
        facts.append(("branched from", f"{full.parent[0]} at {full.parent[1]}"))
    return facts


def _span(run: Run, full: StoredTrajectory, span: dict[str, Any], pictures: deque[tuple[int, str]]) -> dict[str, Any]:
    pieces: list[dict[str, Any]] = []
    text, cut = _shorten(span["text"])
    at = 0
    for found in _SPECIAL.finditer(text):
        if found.start() > at:
            pieces.append({"text": text[at : found.start()]})
        at = found.end()
        pad = _PAD.fullmatch(found.group())
        if pad and pictures:
            index, _ = pictures.popleft()
            pieces.append({"picture": _picture(run, full, index)})
        else:
            pieces.append({"special": found.group()})
    if at < len(text):
        pieces.append({"text": text[at:]})
    return {**span, "pieces": pieces, "cut": cut, "tokens": span["end"] - span["start"]}


def _call(run: Run, call: dict[str, Any]) -> dict[str, Any]:
    result = call["result"]
    error = result.get("error")
    outputs = [(name, *_shorten(str(result[name]))) for name in ("stdout", "stderr", "repr") if result.get(name)]
    if isinstance(error, dict):
        said = error.get("traceback") or f"{error.get('name', 'error')}: {error.get('message', '')}"
        outputs.append(("error", *_shorten(str(said))))
    return {
        "code": call["code"],
        "status": str(result.get("status", "unknown")),
        "seconds": call["seconds"],
        "outputs": outputs,
        "pictures": [_encode(run, digest) for digest in call["images"]],
    }


def _shorten(text: str) -> tuple[str, int]:
    """(text, characters left out in the middle)."""
    if len(text) <= MAX_TEXT:
        return text, 0
    half = MAX_TEXT // 2
    return f"{text[:half]} […] {text[-half:]}", len(text) - MAX_TEXT


def _picture(run: Run, full: StoredTrajectory, index: int) -> dict[str, Any]:
    grid = full.image_grids[index] if index < len(full.image_grids) else None
    return {**_encode(run, full.images[index]), "number": index, "grid": grid}


def _encode(run: Run, digest: str) -> dict[str, Any]:
    """A stored picture as a data URI, scaled down to at most MAX_SIDE; `uri` is None where there is no whole file."""
    shown: dict[str, Any] = {"digest": digest, "uri": None, "size": None, "number": None, "grid": None}
    path = reader.picture_path(run, digest)
    if path is None:
        return shown
    try:
        data, size = _small(path)
    except (OSError, ValueError):  # what Pillow raises on a file that is no whole picture
        return shown
    return {**shown, "uri": f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}", "size": size}


def _small(path: Path) -> tuple[bytes, tuple[int, int]]:
    with Image.open(path) as image:
        size = image.size
        image.load()
        scale = MAX_SIDE / max(size)
        if scale >= 1:
            return path.read_bytes(), size
        buffer = io.BytesIO()
        shape = tuple(max(1, math.floor(side * scale)) for side in size)
        image.resize((shape[0], shape[1]), Image.Resampling.BOX).save(buffer, format="PNG", optimize=True)
        return buffer.getvalue(), size
