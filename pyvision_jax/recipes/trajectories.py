"""Trajectories on disk: one JSON line each, pictures once per hash, written by a thread of their own.

trajectories/PHASE/step_0003.jsonl   every field of `rollout.trajectory.Trajectory`, arrays packed exactly
trajectories/PHASE/step_0003.idx     one light row each, so that a report need not read the text
images/HASH.png                      the pictures as the policy saw them
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pyvision_jax.data.records import Answer
from pyvision_jax.recipes.plain import plain
from pyvision_jax.report import reader
from pyvision_jax.rollout.trajectory import EndReason, Span, ToolCall, Trajectory

ARRAYS = ("ids", "logprobs", "policy_logprobs", "states", "temperatures", "versions", "positions")
_REPEATED_PAD = re.compile(r"(<\|(?:image|video)_pad\|>)(?:\1)+")
_PAD = re.compile(r"<\|(?:image|video)_pad\|>")


@dataclasses.dataclass
class _Step:
    path: Path
    phase: str
    step: int
    trajectories: list[Trajectory]
    pictures: dict[str, np.ndarray]
    advantages: Mapping[str, float]
    dropped: Mapping[str, str]
    references: Mapping[str, Answer | str]
    extras: Mapping[str, Mapping[str, Any]]


class TrajectoryWriter:
    """Writes whole steps in the background; a step's file appears at once or not at all.

    Args:
        root: the run directory.
        decode: ids -> text, special tokens kept (`Tokenizer.decode`); called on the writer's thread.
        picture: hash -> uint8 [H, W, 3] (of `Trajectory.images` and `ToolCall.images`), called on the caller's thread,
            once per hash; a KeyError leaves that picture out.
        depth: steps that may wait before `write` blocks.

    A failure to write (a full disk) is raised by the next call of any method. A value that JSON cannot hold is no
    failure: it is marked (`recipes.plain`).
    """

    def __init__(
        self,
        root: Path | str,
        decode: Callable[[list[int]], str],
        picture: Callable[[str], np.ndarray] | None = None,
        depth: int = 4,
    ):
        self.root = Path(root)
        self._decode = decode
        self._picture = picture
        self._depth = depth
        self._pending: collections.deque[Future[None]] = collections.deque()
        (self.root / "images").mkdir(parents=True, exist_ok=True)
        self._stored = {path.stem for path in (self.root / "images").glob("*.png")}
        # One thread, in order; the interpreter waits for it at exit, so that a run that ends by an error loses nothing.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectory-writer")

    def write(
        self,
        phase: str,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        advantages: Mapping[str, float] | None = None,
        dropped: Mapping[str, str] | None = None,
        references: Mapping[str, Answer | str] | None = None,
        extras: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Queues one step, in place of an earlier one of the same phase and number.

        `advantages`, `dropped` (the filter's name) and `extras` are keyed by trajectory id, `references` by record id.
        Arrays are held by reference until written: make new ones rather than write into them.
        """
        self._raise_failed()
        held = [_snapshot(trajectory) for trajectory in trajectories]
        path = self.root / "trajectories" / phase / f"step_{step:04d}.jsonl"
        pictures = self._new_pictures(held)
        by_trajectory = (dict(advantages or {}), dict(dropped or {}))
        job = _Step(path, phase, step, held, pictures, *by_trajectory, dict(references or {}), dict(extras or {}))
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, job))

    def rewind(self, phase: str, step: int) -> None:
        """Removes the phase's steps at or after `step`: they will be made again after a resume."""
        self.flush()
        for path in reader.step_files(self.root / "trajectories" / phase):
            if reader.step_of(path) >= step:
                path.with_suffix(".idx").unlink(missing_ok=True)
                path.unlink()

    def flush(self) -> None:
        """Waits until everything queued is on disk."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Writes what is queued and ends the thread; a second call does nothing."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_failed(self) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def _new_pictures(self, trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
        pictures: dict[str, np.ndarray] = {}
        if self._picture is None:
            return pictures
        for trajectory in trajectories:
            for digest in (*trajectory.images, *(name for call in trajectory.calls for name in call.images)):
                if digest not in self._stored:
                    self._stored.add(digest)
                    try:
                        pictures[digest] = self._picture(digest)
                    except KeyError:
                        continue  # the store let it go: the report says that the picture is not there
        return pictures

    def _write(self, job: _Step) -> None:
        for digest, pixels in job.pictures.items():
            target = self.root / "images" / f"{digest}.png"
            partial = target.with_suffix(".part")
            Image.fromarray(np.asarray(pixels, np.uint8)).save(partial, format="PNG", compress_level=1)
            os.replace(partial, target)
        job.path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[bytes] = []
        index: list[bytes] = []
        offset = 0
        for trajectory in job.trajectories:
            line = self._line(trajectory, job)
            lines.append(_json_line(line))
            index.append(_json_line(reader.index_row(line, offset)))
            offset += len(lines[-1])
        for target, content in ((job.path, lines), (job.path.with_suffix(".idx"), index)):
            partial = target.with_suffix(target.suffix + ".part")
            partial.write_bytes(b"".join(content))
            os.replace(partial, target)

    def _line(self, trajectory: Trajectory, job: _Step) -> dict[str, Any]:
        ids = np.asarray(trajectory.ids)
        arrays = {name: np.asarray(vars(trajectory)[name]) for name in ARRAYS}
        entropy = None
        if trajectory.entropies is not None:
            arrays["entropies"] = np.asarray(trajectory.entropies)
            mask = trajectory.policy_mask
            entropy = float(arrays["entropies"][mask].mean()) if mask.any() else None
        if trajectory.top_entropies is not None:
            arrays["top_entropies"] = np.asarray(trajectory.top_entropies)
        reference = job.references.get(trajectory.record_id)
        return {
            "format": reader.FORMAT,
            "id": trajectory.id,
            "record_id": trajectory.record_id,
            "phase": job.phase,
            "step": job.step,
            "group": trajectory.group,
            "seed": plain(trajectory.seed),
            "parent": plain(trajectory.parent),
            "spans": [
                [s.kind, int(s.start), int(s.end), int(s.turn), bool(s.learn), self._text(ids[s.start : s.end])]
                for s in trajectory.spans
            ],
            "images": list(trajectory.images),
            "image_grids": plain(trajectory.image_grids),
            "videos": plain(trajectory.videos),
            "calls": [plain(call) for call in trajectory.calls],
            "events": plain(trajectory.events),
            "end_reason": plain(trajectory.end_reason),
            "rewards": plain(trajectory.rewards),
            "advantage": plain(job.advantages.get(trajectory.id)),
            "dropped": job.dropped.get(trajectory.id),
            "answer": plain(trajectory.answer),
            "reference": reference.value if isinstance(reference, Answer) else plain(reference),
            "extras": plain(job.extras.get(trajectory.id, {})),
            "entropy": plain(entropy),  # nats per learned token
            "arrays": reader.encode_arrays(arrays),
        }

    def _text(self, ids: np.ndarray) -> str:
        """Decoded text of a span; a run of picture placeholders is written once with its count, `<|image_pad|>*36`."""
        text = self._decode(ids.tolist())
        return _REPEATED_PAD.sub(lambda run: f"{run.group(1)}*{len(_PAD.findall(run.group()))}", text)


def _json_line(row: dict[str, Any]) -> bytes:
    # ASCII: a lone surrogate from a tool's output is no UTF-8, but escapes well.
    return json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _snapshot(trajectory: Trajectory) -> Trajectory:
    """Shallow copy: the caller may go on to change rewards and lists, not arrays."""
    return dataclasses.replace(
        trajectory,
        spans=list(trajectory.spans),
        images=list(trajectory.images),
        image_grids=list(trajectory.image_grids),
        videos=list(trajectory.videos),
        calls=list(trajectory.calls),
        events=list(trajectory.events),
        rewards=dict(trajectory.rewards),
    )


def read_trajectories(path: Path | str) -> list[Trajectory]:
    """The trajectories of one step file as they were handed to `write`, arrays bit for bit."""
    return [_trajectory(stored) for stored in reader.read_trajectories(path)]


def _trajectory(stored: reader.StoredTrajectory) -> Trajectory:
    arrays = stored.arrays
    return Trajectory(
        id=stored.id,
        record_id=stored.record_id,
        spans=[Span(s["kind"], s["start"], s["end"], s["turn"], s["learn"]) for s in stored.spans],
        **{name: arrays[name] for name in ARRAYS},
        entropies=arrays.get("entropies"),
        top_entropies=arrays.get("top_entropies"),
        images=stored.images,
        image_grids=stored.image_grids,
        videos=stored.videos,
        calls=[ToolCall(**call) for call in stored.calls],
        events=stored.events,
        end_reason=None if stored.end_reason is None else EndReason(stored.end_reason),
        rewards=stored.rewards,
        answer=stored.answer,
        group=stored.group,
        parent=stored.parent,
        seed=stored.seed,
    )
