"""Multimodal rotary positions (temporal, height, width) of a token sequence, on the host, in numpy.

One function serves the prompt, every appended observation and the trainer: called on the new ids alone with
`start=next_position` it gives what a call on the whole sequence gives, and padding never enters it.

Sources: Qwen2-VL (arXiv 2409.12191, section 2.1) for the scheme; `get_rope_index` in huggingface/transformers
`models/qwen2_5_vl/modeling_qwen2_5_vl.py` (4.57 and 5.24) and in volcengine/verl `verl/models/transformers/qwen2_vl.py`
for the three video rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from pyvision_jax.models.config import ModelSpec

VideoMode = Literal["hf5", "hf4", "verl"]
Grid = Sequence[int]  # (frames, rows, columns) in patches, before merging


def mrope_positions(
    ids: np.ndarray | Sequence[int],
    image_grids: Sequence[Grid],
    video_grids: Sequence[Grid],
    cfg: ModelSpec,
    start: int = 0,
    video_mode: VideoMode = "hf5",
    second_per_grid: Sequence[float] = (),
) -> tuple[np.ndarray, int]:
    """Positions of `ids` (int[T]) as int32 [3, T], and the position of the id that would follow.

    Text counts all three axes up by one. A picture holds its temporal axis at its first position p and sets height
    and width to p + row and p + column of the merged grid; what follows starts at the largest of them + 1. Grids are
    (t, h, w) in patches and are taken in the order of the runs of picture (video) placeholders in `ids`, so a run
    must be whole: an observation is appended with its picture, never half of it.

    Frame k of a video sits at p + trunc(k * seconds * `tokens_per_second`), where seconds is its entry in
    `second_per_grid` (seconds from one temporal patch to the next; empty means 1.0 for all). `video_mode` names whose
    rule that is:

    - `hf5` (transformers 5.24): float product; the next id follows the frame's height and width and ignores time,
      so later text may lie inside the video's time range.
    - `hf4` (transformers 4.54 to 4.57): seconds are cut to a whole number first (0.5 becomes 0, time stands still);
      the next id follows the largest position of any axis.
    - `verl`: float product; the next id follows the largest position of any axis.

    Products are taken in float32, as there. transformers 5.24 decodes after a video from the largest position + 1
    although its own pass over the whole sequence does not; here decode follows the whole-sequence rule.

    Raises:
        ValueError: the placeholders of a picture and its grid disagree, grids are missing or left over, a grid does
            not divide by the merge size, or `second_per_grid` has another length than `video_grids`.
    """
    if video_mode not in get_args(VideoMode):
        raise ValueError(f"video_mode {video_mode!r} is none of {', '.join(get_args(VideoMode))}")
    if len(second_per_grid) not in (0, len(video_grids)):
        raise ValueError(f"second_per_grid has {len(second_per_grid)} entries for {len(video_grids)} videos")
    ids = np.asarray(ids)
    if ids.ndim != 1:
        raise ValueError(f"ids must have one axis, got shape {ids.shape}")

    out = np.empty((3, len(ids)), np.int32)
    runs = {
        "picture": _runs(ids == cfg.image_token),
        "video": _runs(ids == cfg.video_token),
    }
    grids = {"picture": image_grids, "video": video_grids}
    for kind in grids:
        if len(runs[kind]) != len(grids[kind]):
            raise ValueError(
                f"ids hold placeholders for {len(runs[kind])} {kind}s but {len(grids[kind])} {kind} grids were given"
            )

    spans = [(begin, end, kind, k) for kind in runs for k, (begin, end) in enumerate(runs[kind])]
    position, at = start, 0
    for begin, end, kind, k in sorted(spans):
        out[:, at:begin] = np.arange(position, position + begin - at)
        position += begin - at
        frames, rows, cols = _merged_grid(grids[kind][k], cfg.vision.merge_size, f"{kind} {k}")
        if end - begin != frames * rows * cols:
            raise ValueError(
                f"{kind} {k}: {end - begin} placeholder tokens at ids[{begin}:{end}] but its grid "
                f"{tuple(int(n) for n in grids[kind][k])} makes {frames * rows * cols} merged tokens"
            )
        if kind == "picture":
            times = np.zeros(frames, np.int32)
        else:
            seconds = second_per_grid[k] if len(second_per_grid) else 1.0
            times = _frame_times(frames, seconds, cfg.vision.tokens_per_second, video_mode)
        grid = np.stack(np.meshgrid(times, np.arange(rows), np.arange(cols), indexing="ij")).reshape(3, -1) + position
        out[:, begin:end] = grid
        if kind == "picture" or video_mode == "hf5":
            position += max(rows, cols)
        else:
            position = int(grid.max()) + 1
        at = end
    out[:, at:] = np.arange(position, position + len(ids) - at)
    return out, position + len(ids) - at


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of the runs of True in a bool [T] array."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _merged_grid(grid: Grid, merge: int, name: str) -> tuple[int, int, int]:
    frames, rows, cols = (int(n) for n in grid)
    if name.startswith("picture") and frames != 1:
        raise ValueError(
            f"{name}: a still picture has one temporal patch, its grid {(frames, rows, cols)} has {frames}"
        )
    if min(frames, rows, cols) < 1 or rows % merge or cols % merge:
        raise ValueError(f"{name}: rows and columns of grid {(frames, rows, cols)} must be multiples of {merge}")
    return frames, rows // merge, cols // merge


def _frame_times(frames: int, seconds: float, tokens_per_second: int, mode: VideoMode) -> np.ndarray:
    k = np.arange(frames)
    if mode == "hf4":
        return (k * int(seconds) * tokens_per_second).astype(np.int32)
    seconds32, rate32 = np.float32(seconds), np.float32(tokens_per_second)
    # The two multiply in another order; in float32 that can move a frame by one position.
    product = (
        k.astype(np.float32) * (rate32 * seconds32) if mode == "hf5" else k.astype(np.float32) * seconds32 * rate32
    )
    return product.astype(np.int32)
