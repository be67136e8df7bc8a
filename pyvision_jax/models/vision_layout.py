"""Where the patches of a picture lie in the windows of the tower (host side, numpy)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyvision_jax.data.batch import VisionBatch
from pyvision_jax.models.config import VisionConfig

Grid = tuple[int, int, int]  # temporal patches, patch rows, patch columns


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement of n pictures in [n, w, s] slots.

    order: for each picture int32 [P], the slot (window * s + place) of each patch in the processor's order
    token_index: for each picture int32 [P // 4], merged token in reading order -> flat index into the tower's output
    """

    order: tuple[np.ndarray, ...]
    rows: np.ndarray  # int32 [n, w, s]
    cols: np.ndarray  # int32 [n, w, s]
    valid: np.ndarray  # bool [n, w, s]
    frames: np.ndarray  # int32 [n, w, s]
    token_index: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class _Picture:
    window: np.ndarray  # int32 [P]: window of each patch, in processor order
    place: np.ndarray  # int32 [P]: place inside the window
    row: np.ndarray
    col: np.ndarray
    frame: np.ndarray
    windows: int
    slots: int  # patches of the largest window


@functools.lru_cache(maxsize=4096)
def _picture(grid: Grid, window_tokens: int, merge: int) -> _Picture:
    """The processor lists patches merged token by merged token; windows are listed frame by frame, row by row."""
    t, h, w = grid
    if t < 1 or h < merge or w < merge or h % merge or w % merge:
        raise ValueError(f"grid {grid}: rows and columns must be positive multiples of {merge}")
    frame, y, x = (a.reshape(-1) for a in np.meshgrid(*map(np.arange, (t, h // merge, w // merge)), indexing="ij"))
    across = -(-(w // merge) // window_tokens)
    down = -(-(h // merge) // window_tokens)
    window = (frame * down + y // window_tokens) * across + x // window_tokens
    by_window = np.argsort(window, kind="stable")  # inside a window tokens stay in reading order
    counts = np.bincount(window, minlength=t * down * across)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.empty_like(window)
    place[by_window] = np.arange(len(window)) - starts[window[by_window]]
    unit = merge * merge
    inner = np.arange(unit)

    def patches(token_values: np.ndarray, step: int, offset: np.ndarray) -> np.ndarray:
        return (token_values[:, None] * step + offset).reshape(-1).astype(np.int32)

    return _Picture(
        window=patches(window, 1, 0 * inner),
        place=patches(place, unit, inner),
        row=patches(y, merge, inner // merge),
        col=patches(x, merge, inner % merge),
        frame=patches(frame, 1, 0 * inner),
        windows=len(counts),
        slots=int(counts.max()) * unit,
    )


def window_shape(grids: Sequence[Grid], cfg: VisionConfig) -> tuple[int, int]:
    """The smallest (w, s) that holds all these pictures: windows of a picture, patch slots of a window."""
    made = [_picture((int(t), int(h), int(w)), cfg.window_tokens, cfg.merge_size) for t, h, w in grids]
    return max((p.windows for p in made), default=1), max((p.slots for p in made), default=cfg.merge_size**2)


def layout(
    grids: Sequence[Grid],
    cfg: VisionConfig,
    windows: int | None = None,
    slots: int | None = None,
    pictures: int | None = None,
) -> Layout:
    """Place the patches of pictures with these (t, h, w) patch grids into `windows` x `slots` (the least that fit, if
    not given), padded to `pictures`. Raises ValueError, with both numbers, where a given size is too small."""
    unit = cfg.merge_size**2
    need_windows, need_slots = window_shape(grids, cfg)
    w = need_windows if windows is None else windows
    s = need_slots if slots is None else slots
    n = len(grids) if pictures is None else pictures
    for name, have, need in (("windows", w, need_windows), ("slots", s, need_slots), ("pictures", n, len(grids))):
        if have < need:
            raise ValueError(f"{name}={have} is too small: {need} needed by grids {list(grids)[:8]}")
    if s % unit:
        raise ValueError(f"slots={s} is not a multiple of {unit} (the patches of one merged token)")
    rows, cols, frames = (np.zeros((n, w * s), np.int32) for _ in range(3))
    valid = np.zeros((n, w * s), np.bool_)
    order, token_index = [], []
    for i, (t, gh, gw) in enumerate(grids):
        p = _picture((int(t), int(gh), int(gw)), cfg.window_tokens, cfg.merge_size)
        slot = p.window * s + p.place
        rows[i, slot], cols[i, slot], frames[i, slot], valid[i, slot] = p.row, p.col, p.frame, True
        order.append(slot)
        token_index.append((slot[::unit] // unit + i * (w * s // unit)).astype(np.int32))
    shape = (n, w, s)
    return Layout(
        order=tuple(order),
        rows=rows.reshape(shape),
        cols=cols.reshape(shape),
        valid=valid.reshape(shape),
        frames=frames.reshape(shape),
        token_index=tuple(token_index),
    )


def build_vision_batch(
    patches: Sequence[np.ndarray],
    grids: Sequence[Grid],
    cfg: VisionConfig,
    pictures: int | None = None,
    windows: int | None = None,
    slots: int | None = None,
) -> tuple[VisionBatch, list[np.ndarray]]:
    """(VisionBatch of numpy arrays, token_index as in Layout) from float32 [P, c] patches in the processor's order.

    Raises ValueError where patches and grid disagree (naming the picture), or a given bucket is too small.
    """
    if len(patches) != len(grids):
        raise ValueError(f"{len(patches)} pictures but {len(grids)} grids")
    placed = layout(grids, cfg, windows, slots, pictures)
    n, w, s = placed.valid.shape
    data = np.zeros((n, w * s, cfg.patch_features), np.float32)
    for i, (pixels, slot) in enumerate(zip(patches, placed.order, strict=True)):
        if pixels.shape != (len(slot), cfg.patch_features):
            expected = (len(slot), cfg.patch_features)
            raise ValueError(f"picture {i}: patches {pixels.shape}, but grid {tuple(grids[i])} needs {expected}")
        data[i, slot] = pixels
    fields: dict[str, Any] = {  # numpy arrays where the program has traced ones
        "patches": data.reshape(n, w, s, -1),
        "rows": placed.rows,
        "cols": placed.cols,
        "valid": placed.valid,
        "frames": placed.frames,
    }
    return VisionBatch(**fields), list(placed.token_index)
