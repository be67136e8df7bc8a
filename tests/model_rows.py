"""Rows of ids with pictures for the model tests, and their way into the arrays that the model takes."""

from __future__ import annotations

import dataclasses

import numpy as np
from tiny import random_patches, tiny_spec

from pyvision_jax.data.batch import TokenBatch
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.models.vision_layout import build_vision_batch

CASES = ("untied", "tied", "wide")


def case_spec(name: str) -> ModelSpec:
    """untied and tied head with many small windows; wide: every picture is one window."""
    if name == "wide":
        return tiny_spec(vocab_size=64, layers=1, hidden=24, heads=2, kv_heads=1, window_size=448, fullatt_blocks=(0,))
    return tiny_spec(vocab_size=64, tie=name == "tied", depth=4, window_size=56, fullatt_blocks=(1, 3))


@dataclasses.dataclass
class Row:
    ids: np.ndarray
    images: list[np.ndarray]
    image_grids: list[tuple[int, int, int]]
    videos: list[np.ndarray]
    video_grids: list[tuple[int, int, int]]


def make_row(cfg: ModelSpec, parts: list, seed: int) -> Row:
    """parts: an int is that many random text ids, ("image" | "video", grid) a picture between its two marks."""
    rng = np.random.default_rng(seed)
    row = Row(np.zeros(0, np.int32), [], [], [], [])
    ids: list[int] = []
    for k, part in enumerate(parts):
        if isinstance(part, int):
            ids += rng.integers(0, cfg.text.vocab_size - 4, part).tolist()
            continue
        kind, grid = part
        pad = cfg.image_token if kind == "image" else cfg.video_token
        ids += [cfg.vision_start] + [pad] * (grid[0] * grid[1] * grid[2] // 4) + [cfg.vision_end]
        patches, grids = (row.images, row.image_grids) if kind == "image" else (row.videos, row.video_grids)
        patches.append(random_patches(grid, cfg, seed=100 * seed + k))
        grids.append(grid)
    row.ids = np.array(ids, np.int32)
    return row


def rows(cfg: ModelSpec) -> list[Row]:
    """Text only; one picture; three pictures of unlike shapes; a video of three frames and a picture."""
    return [
        make_row(cfg, [17], 1),
        make_row(cfg, [3, ("image", (1, 4, 6)), 8], 2),
        make_row(cfg, [2, ("image", (1, 2, 8)), 3, ("image", (1, 10, 6)), ("image", (1, 4, 4)), 6], 3),
        make_row(cfg, [4, ("video", (3, 6, 4)), 2, ("image", (1, 2, 2)), 5], 4),
    ]


def row_positions(row: Row, cfg: ModelSpec) -> np.ndarray:
    """int32 [3, T]; one second for each frame of a video, as transformers assumes when it is told nothing."""
    return mrope_positions(
        row.ids, row.image_grids, row.video_grids, cfg, second_per_grid=(1.0,) * len(row.video_grids)
    )[0]


def to_batch(packed: list[list[Row]], cfg: ModelSpec, length: int, pictures: int | None = None) -> TokenBatch:
    """Each inner list is packed into one row of `length` ids; weights 1 on every position with a target."""
    b = len(packed)
    ids, segments, targets = (np.zeros((b, length), np.int32) for _ in range(3))
    image_index = np.full((b, length), -1, np.int32)
    positions = np.zeros((3, b, length), np.int32)
    weights, zeros = (np.zeros((b, length), np.float32) for _ in range(2))
    patches, grids, places = [], [], []
    for i, members in enumerate(packed):
        at = 0
        for segment, row in enumerate(members, start=1):
            n = len(row.ids)
            span = slice(at, at + n)
            ids[i, span], segments[i, span], positions[:, i, span] = row.ids, segment, row_positions(row, cfg)
            targets[i, at : at + n - 1], weights[i, at : at + n - 1] = row.ids[1:], 1
            images = iter(zip(row.images, row.image_grids, strict=True))
            videos = iter(zip(row.videos, row.video_grids, strict=True))

            for run in np.split(np.arange(n), np.flatnonzero(np.diff(row.ids)) + 1):
                token = row.ids[run[0]]
                if token not in (cfg.image_token, cfg.video_token):
                    continue
                pixels, grid = next(images if token == cfg.image_token else videos)
                patches.append(pixels)
                grids.append(grid)
                where = at + run
                places.append((i, where))
            at += n
    vision = None
    if patches:
        vision, index = build_vision_batch(patches, grids, cfg.vision, pictures=pictures)
        for (i, where), flat in zip(places, index, strict=True):
            image_index[i, where] = flat
    return TokenBatch(
        ids=ids,
        segments=segments,
        positions=positions,
        image_index=image_index,
        targets=targets,
        loss_weights=weights,
        temperatures=zeros + 1,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        advantages=zeros,
        vision=vision,
    )
