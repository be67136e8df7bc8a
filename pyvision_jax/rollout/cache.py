"""Host books of what the device holds: slots of the KV cache, and rows of the picture-feature pool."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np

from pyvision_jax.models.config import VisionConfig
from pyvision_jax.models.vision_layout import Grid, window_shape


class Slots:
    """Free slots of the KV cache, lowest first."""

    def __init__(self, count: int):
        self.free = list(range(count))[::-1]

    def take(self) -> int:
        return self.free.pop()

    def give(self, slot: int) -> None:
        self.free.append(slot)
        self.free.sort(reverse=True)


class FeaturePool:
    """Which rows of the pool hold which picture's merged tokens. A picture's rows need not be neighbours.

    The least recently used pictures make room; `place` is told which ones the program at hand still needs.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.clear()

    def clear(self) -> None:
        self.free = np.arange(self.rows, dtype=np.int32)
        self.held: OrderedDict[str, np.ndarray] = OrderedDict()

    def find(self, name: str) -> np.ndarray | None:
        """int32 rows of the picture's tokens in reading order, or None."""
        if name in self.held:
            self.held.move_to_end(name)
        return self.held.get(name)

    def place(self, name: str, tokens: int, keep: Collection[str]) -> np.ndarray:
        """Rows for a new picture. Raises ValueError if they cannot be found without dropping one of `keep`."""
        for other in [n for n in self.held if n not in keep] if len(self.free) < tokens else []:
            self.free = np.concatenate([self.free, self.held.pop(other)])
            if len(self.free) >= tokens:
                break
        if len(self.free) < tokens:
            raise ValueError(f"a picture of {tokens} tokens does not fit beside {len(keep)} others in {self.rows} rows")
        self.held[name], self.free = self.free[:tokens], self.free[tokens:]
        return self.held[name]


@dataclasses.dataclass(frozen=True)
class PatchBucket:
    """Shape of one vision program: `pictures` of at most `windows` windows of `slots` patches."""

    pictures: int
    windows: int
    slots: int


def patch_buckets(patches: Sequence[int], cfg: VisionConfig, limit: int = 16) -> list[PatchBucket]:
    """The vision programs for `RolloutConfig.patch_buckets`, smallest first.

    A bucket below one full attention window is a single window; above, it is whole windows. Each program takes as many
    pictures as the largest bucket has patches (at least 1,024), and at most `limit`.
    """
    unit = cfg.merge_size**2
    full = cfg.window_tokens**2 * unit
    budget = max(*patches, 1_024)
    out = []
    for size in sorted(patches):
        windows, slots = (1, -(-size // unit) * unit) if size <= full else (-(-size // full), full)
        out.append(PatchBucket(max(1, min(limit, budget // (windows * slots))), windows, slots))
    return out


def bucket_of(grid: Grid, buckets: Sequence[PatchBucket], cfg: VisionConfig) -> PatchBucket:
    """The smallest bucket for a picture of this (t, h, w) grid. Raises ValueError with the numbers if none holds it."""
    windows, slots = window_shape([grid], cfg)
    for bucket in buckets:
        if windows <= bucket.windows and slots <= bucket.slots:
            return bucket
    largest = buckets[-1]
    raise ValueError(
        f"a picture of {grid} patches needs {windows} windows of {slots} patches, but the largest of patch_buckets "
        f"holds {largest.windows} of {largest.slots}: raise rollout.patch_buckets or lower image.max_pixels"
    )
