"""Bringing ids and pictures into the caches: which rows go together in which bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pyvision_jax.config import RolloutConfig
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.vision_layout import build_vision_batch
from pyvision_jax.rollout.cache import FeaturePool, bucket_of, patch_buckets
from pyvision_jax.rollout.requests import Row
from pyvision_jax.rollout.step import Fill, encode, fill


@dataclasses.dataclass
class Item:
    """One row of a prefill batch: the ids from `start` on, after what `source` (a slot) holds of the sequence.

    All of `rows` have the same ids and take the result; the first one's slot is worked in if it takes several passes.
    """

    rows: list[Row]
    source: int
    start: int

    @property
    def missing(self) -> int:
        return len(self.rows[0].ids) - 1 - self.start


class Filler:
    """Owner of the weights, the KV cache and the feature pool: every dispatch goes through it, so that the donated
    arrays have one reference."""

    def __init__(
        self,
        params: Any,
        cfg: ModelSpec,
        rollout: RolloutConfig,
        processor: ImageProcessor,
        implementation: str,
        tokens: int,
    ):
        self.params, self.cfg, self.processor, self.implementation = params, cfg, processor, implementation
        self.slots = rollout.slots
        self.buckets = sorted({min(bucket, rollout.max_length) for bucket in rollout.prefill_buckets})
        self.tokens = max(tokens, self.buckets[-1])
        self.patch_buckets = patch_buckets(rollout.patch_buckets, cfg.vision)
        largest = max(bucket.windows * bucket.slots for bucket in self.patch_buckets) // cfg.vision.merge_size**2
        # room for what one prefill batch can touch: each of its ids a picture's, the first and last pictures cut
        self.pool = FeaturePool(max(4_096, self.tokens + 2 * largest))
        dtype = params.text.embed.dtype
        self.features = jnp.zeros((self.pool.rows, cfg.text.hidden_size), dtype)
        self.cache = model.init_cache(cfg, rollout.slots, rollout.max_length, dtype)
        self.programs: set[tuple[Any, ...]] = set()

    def update(self, params: Any) -> None:
        self.params = params
        self.pool.clear()

    def run(self, program: Callable[..., Any], name: tuple[Any, ...], *args: Any, **static: Any) -> Any:
        """Dispatch a program that takes and returns (cache, rest)."""
        self.programs.add(name)
        self.cache, out = program(
            self.params, self.cache, *args, cfg=self.cfg, implementation=self.implementation, **static
        )
        return out

    def fill(self, items: list[Item]) -> None:
        """Put all missing ids into the cache; longest first, so that shorter ones fill up the rows of a bucket."""
        pending = list(items)
        while pending:
            pending.sort(key=lambda item: -min(item.missing, self.buckets[-1]))
            longest = min(pending[0].missing, self.buckets[-1])
            bucket = next(b for b in self.buckets if b >= longest)
            batch, pictures = self._choose(pending, bucket)
            self._encode(pictures)
            self._dispatch(batch, bucket)
            again = [item for item in batch if item.missing]
            pending = again + pending[len(batch) :]

    def _rows(self, bucket: int) -> int:
        return max(1, min(self.slots, self.tokens // bucket))

    def _choose(self, pending: list[Item], bucket: int) -> tuple[list[Item], dict[str, ProcessedImage]]:
        """Items for one program, and the pictures they touch: as many as the rows and the feature pool hold."""
        pictures: dict[str, ProcessedImage] = {}
        for count, item in enumerate(pending[: self._rows(bucket)]):
            more = dict(pictures)
            for begin, image in item.rows[0].images:
                if begin < item.start + bucket and begin + self.processor.grid_tokens(image.grid) > item.start:
                    more[image.hash] = image
            if count and sum(self.processor.grid_tokens(image.grid) for image in more.values()) > self.pool.rows:
                return pending[:count], pictures
            pictures = more
        return pending[: self._rows(bucket)], pictures

    def _encode(self, pictures: dict[str, ProcessedImage]) -> None:
        """Features of all these pictures into the pool, those that are there already excepted."""
        groups: dict[Any, list[ProcessedImage]] = {}
        for name, image in pictures.items():
            if self.pool.find(name) is None:
                groups.setdefault(bucket_of(image.grid, self.patch_buckets, self.cfg.vision), []).append(image)
        for shape, images in groups.items():
            for first in range(0, len(images), shape.pictures):
                some = images[first : first + shape.pictures]
                batch, token_index = build_vision_batch(
                    [self.processor.patches(image) for image in some],
                    [image.grid for image in some],
                    self.cfg.vision,
                    shape.pictures,
                    shape.windows,
                    shape.slots,
                )
                size = shape.pictures * shape.windows * shape.slots // self.cfg.vision.merge_size**2
                index, target = np.zeros(size, np.int32), np.full(size, self.pool.rows, np.int32)
                flat = np.concatenate(token_index)
                index[: len(flat)] = flat
                places = [self.pool.place(i.hash, len(t), pictures) for i, t in zip(some, token_index, strict=True)]
                target[: len(flat)] = np.concatenate(places)
                self.programs.add(("encode", shape))
                self.features = encode(
                    self.params, self.features, batch, index, target, cfg=self.cfg, implementation=self.implementation
                )

    def _dispatch(self, items: list[Item], bucket: int) -> None:
        rows = self._rows(bucket)
        host: dict[str, Any] = {
            "ids": np.zeros((rows, bucket), np.int32),
            "image_index": np.full((rows, bucket), -1, np.int32),
            "positions": np.zeros((3, rows, bucket), np.int32),
            "source": np.zeros(rows, np.int32),
            "length": np.zeros(rows, np.int32),
            "count": np.zeros(rows, np.int32),
            "target": np.arange(self.slots, 2 * self.slots, dtype=np.int32),  # past the end: dropped
            "origin": np.zeros(self.slots, np.int32),
        }
        used = 0
        for j, item in enumerate(items):
            row, start = item.rows[0], item.start
            end = start + min(item.missing, bucket)
            host["ids"][j, : end - start] = row.ids[start:end]
            host["positions"][:, j, : end - start] = row.position_range(start, end)
            host["source"][j], host["length"][j], host["count"][j] = item.source, start, end - start
            for begin, image in row.images:
                low, high = max(begin, start), min(begin + self.processor.grid_tokens(image.grid), end)
                if low < high:
                    features = self.pool.held[image.hash][low - begin : high - begin]
                    host["image_index"][j, low - start : high - start] = features
            item.start = end
            for taker in item.rows[:1] if item.missing else item.rows:
                host["target"][used], host["origin"][used] = taker.slot, j
                taker.cached = end
                used += 1
            if item.missing:
                item.source = row.slot
        batch = Fill(**host)
        self.programs.add(("fill", rows, bucket))
        self.cache = fill(
            self.params, self.cache, self.features, batch, cfg=self.cfg, implementation=self.implementation
        )
