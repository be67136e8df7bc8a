"""Traces and trajectories to the fixed shapes of a train step: rows of ids, distinct pictures encoded once a batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from pyvision_jax.config import PackingConfig
from pyvision_jax.data.batch import TokenBatch, VisionBatch
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.models.config import ModelSpec, VisionConfig
from pyvision_jax.models.vision_layout import build_vision_batch, window_shape
from pyvision_jax.rollout.trajectory import Trajectory


class TooLong(ValueError):
    """An example that no micro-batch holds: longer than a row, or with more pictures than there are slots. It is never
    cut: a cut could fall inside a picture."""


@dataclasses.dataclass
class Example:
    """One sequence to learn from; all arrays run over its T ids and speak of the id they stand at, not of the next.

    `image_index` counts the merged tokens of `images` in their order, -1 at text. `loss_weights` is 0 at ids that are
    not learned; the other values are read only where it is not. None stands for zeros, in `temperatures` for ones.
    """

    name: str
    ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [3, T]
    loss_weights: np.ndarray  # float32 [T]
    image_index: np.ndarray  # int32 [T]
    images: list[ProcessedImage]
    temperatures: np.ndarray | None = None  # float32 [T], > 0
    old_logprobs: np.ndarray | None = None  # float32 [T]
    ref_logprobs: np.ndarray | None = None  # float32 [T]
    advantages: np.ndarray | None = None  # float32 [T]


def image_token_index(ids: np.ndarray, image_token: int) -> np.ndarray:
    """int32 [T]: running number of every picture placeholder, -1 elsewhere."""
    is_image = ids == image_token
    return np.where(is_image, np.cumsum(is_image) - 1, -1).astype(np.int32)


def trajectory_example(
    trajectory: Trajectory,
    *,
    advantage: float,
    weight: float,
    images: Sequence[ProcessedImage],
    image_token: int,
    filtered: bool = False,
) -> Example:
    """The learned ids of a rollout, each with one advantage and one weight (`training.losses.token_weights`).

    The trainer must score a token under the distribution whose log-probability was recorded. A token drawn at
    temperature T > 0 is scored at T against `logprobs`. A greedy token, and every token when filters or a penalty
    bent the distribution (`filtered`), was drawn from one that has no gradient or other support: it is scored at
    temperature 1 against `policy_logprobs`. Either way the ratio of an on-policy step is 1.
    """
    learned = trajectory.policy_mask
    tempered = learned & (trajectory.temperatures > 0) & (not filtered)
    return Example(
        name=trajectory.id,
        ids=trajectory.ids,
        positions=trajectory.positions,
        loss_weights=np.where(learned, weight, 0.0).astype(np.float32),
        image_index=image_token_index(trajectory.ids, image_token),
        images=list(images),
        temperatures=np.where(tempered, trajectory.temperatures, 1.0).astype(np.float32),
        old_logprobs=np.where(tempered, trajectory.logprobs, trajectory.policy_logprobs).astype(np.float32),
        advantages=np.where(learned, advantage, 0.0).astype(np.float32),
    )


@dataclasses.dataclass
class Packed:
    """Micro-batches of one update, all of one shape, and what did not fit a row: (name, reason)."""

    batches: list[TokenBatch]
    skipped: list[tuple[str, str]]

    @property
    def fill(self) -> float:
        """Share of positions that hold an id."""
        return float(np.mean([np.count_nonzero(batch.segments) / batch.segments.size for batch in self.batches]))


@dataclasses.dataclass
class _Bin:
    """A micro-batch that is being filled."""

    used: np.ndarray  # int [rows]
    rows: list[list[Example]]
    pictures: dict[str, ProcessedImage] = dataclasses.field(default_factory=dict)


class Packer:
    """First-fit into rows, in the order given, so that siblings meet in a micro-batch and share their pictures.

    Every micro-batch is `packing.rows` x `packing.row_length`, so one program serves all. Pictures per micro-batch are
    padded to `packing.images` slots; 0 grows the slots in powers of two, and windows and patch slots always grow; they
    never shrink, so programs are few. These sizes are `state()`: a resumed run starts with them, since another padding
    may change the last bit of a sum. `multiple` makes the picture slots divisible among devices.
    """

    def __init__(
        self,
        spec: ModelSpec,
        processor: ImageProcessor,
        packing: PackingConfig,
        *,
        forbidden: np.ndarray | None = None,
        multiple: int = 1,
    ):
        self._spec = spec
        self._processor = processor
        self._config = packing
        self._forbidden = forbidden
        self._multiple = multiple
        if packing.images % multiple or packing.rows % multiple:
            raise ValueError(
                f"packing.rows={packing.rows} and packing.images={packing.images} must be multiples of the {multiple} "
                "devices that share a batch"
            )
        self._sizes = {"pictures": packing.images, "windows": 1, "slots": spec.vision.merge_size**2}

    def state(self) -> dict[str, int]:
        return dict(self._sizes)

    def restore(self, state: dict[str, int]) -> None:
        self._sizes = dict(state)

    def pack(self, examples: Sequence[Example], *, too_long: str = "raise") -> Packed:
        """Micro-batches over all examples.

        Raises `TooLong` for an example over `row_length` or with more pictures than a micro-batch may hold
        (`too_long="skip"` lists it instead), and `ValueError` for one that is malformed.
        """
        skipped: list[tuple[str, str]] = []
        bins: list[_Bin] = []
        for example in examples:
            over = self._over(example)
            if too_long == "skip" and over:
                skipped.append((example.name, over))
                continue
            self.check(example)
            self._place(example, len(example.ids), bins)
        self._grow([list(filled.pictures.values()) for filled in bins])
        return Packed([self._batch(filled) for filled in bins], skipped)

    def check(self, example: Example) -> None:
        """Raises `TooLong`, or `ValueError` for pictures that do not match their placeholders and for a learned id that
        the sampler can never draw."""
        over = self._over(example)
        if over:
            raise TooLong(f"{example.name}: {over}")
        tokens = sum(self._processor.grid_tokens(image.grid) for image in example.images)
        held = int(np.count_nonzero(example.ids == self._spec.image_token))
        if tokens != held or int(example.image_index.max(initial=-1)) + 1 != held:
            raise ValueError(f"{example.name}: {held} picture placeholders but its pictures make {tokens} tokens")
        learned = example.loss_weights > 0
        if self._forbidden is not None and self._forbidden[example.ids[learned]].any():
            at = int(np.flatnonzero(learned & self._forbidden[example.ids])[0])
            raise ValueError(f"{example.name}: id {example.ids[at]} at {at} is learned but may never be sampled")

    def _over(self, example: Example) -> str:
        """Why no micro-batch holds the example; empty if one does."""
        if len(example.ids) > self._config.row_length:
            return f"{len(example.ids)} ids do not fit row_length={self._config.row_length}"
        pictures, cap = len({image.hash for image in example.images}), self._config.images
        return f"{pictures} pictures do not fit packing.images={cap} of a micro-batch" if 0 < cap < pictures else ""

    def _place(self, example: Example, length: int, bins: list[_Bin]) -> None:
        cap = self._config.images
        for candidate in bins:
            new = {image.hash for image in example.images} - candidate.pictures.keys() if cap else ()
            if cap and len(candidate.pictures) + len(new) > cap:
                continue
            free = np.flatnonzero(candidate.used + length <= self._config.row_length)
            if len(free):
                self._put(example, length, candidate, int(free[0]))
                return
        bins.append(_Bin(np.zeros(self._config.rows, np.int64), [[] for _ in range(self._config.rows)]))
        self._put(example, length, bins[-1], 0)

    @staticmethod
    def _put(example: Example, length: int, chosen: _Bin, row: int) -> None:
        chosen.rows[row].append(example)
        chosen.used[row] += length
        for image in example.images:
            chosen.pictures.setdefault(image.hash, image)

    def _tokens(self, filled: _Bin) -> dict[str, np.ndarray]:
        """Every array of TokenBatch but `image_index` and `vision`; values move one place back, to the predictor."""
        shape = (self._config.rows, self._config.row_length)
        out = {name: np.zeros(shape, np.int32) for name in ("ids", "segments", "targets")}
        floats = ("loss_weights", "old_logprobs", "ref_logprobs", "advantages")
        out |= {name: np.zeros(shape, np.float32) for name in floats}
        out["temperatures"] = np.ones(shape, np.float32)
        positions = np.zeros((3, *shape), np.int32)
        shifted = (*floats, "temperatures")
        for row, examples in enumerate(filled.rows):
            start = 0
            for segment, example in enumerate(examples, start=1):
                end = start + len(example.ids)
                out["ids"][row, start:end] = example.ids
                out["segments"][row, start:end] = segment
                positions[:, row, start:end] = example.positions
                out["targets"][row, start : end - 1] = example.ids[1:]
                values = vars(example)
                for name in shifted:
                    if values[name] is not None:
                        out[name][row, start : end - 1] = values[name][1:]
                start = end
        return out | {"positions": positions}

    def _grow(self, pictures: list[list[ProcessedImage]]) -> None:
        """Sizes that hold every micro-batch of this update."""
        sizes = self._sizes
        most = max((len(images) for images in pictures), default=0)
        if most > sizes["pictures"]:
            sizes["pictures"] = -(-_power_of_two(most) // self._multiple) * self._multiple
        grids = list({image.grid for images in pictures for image in images})
        windows, slots = window_shape(grids, self._spec.vision)
        if windows > sizes["windows"]:
            sizes["windows"] = _power_of_two(windows)
        sizes["slots"] = max(sizes["slots"], slots)

    def _batch(self, filled: _Bin) -> TokenBatch:
        tokens = self._tokens(filled)
        image_index = np.full(tokens["ids"].shape, -1, np.int32)
        pictures = list(filled.pictures.values())
        vision = None
        if self._sizes["pictures"]:
            vision, token_index = vision_batch(pictures, self._processor, self._spec.vision, **self._sizes)
            places = {image.hash: index for image, index in zip(pictures, token_index, strict=True)}
            for row, examples in enumerate(filled.rows):
                start = 0
                for example in examples:
                    end = start + len(example.ids)
                    if example.images:
                        flat = np.concatenate([places[image.hash] for image in example.images])
                        here = example.image_index >= 0
                        image_index[row, start:end][here] = flat[example.image_index[here]]
                    start = end
        return TokenBatch(image_index=cast(Any, image_index), vision=vision, **cast(Any, tokens))


def vision_batch(
    images: Sequence[ProcessedImage],
    processor: ImageProcessor,
    cfg: VisionConfig,
    *,
    pictures: int,
    windows: int,
    slots: int,
) -> tuple[VisionBatch, list[np.ndarray]]:
    """`models.vision_layout.build_vision_batch` of processed pictures; those of one grid are normalised together."""
    patches: dict[int, np.ndarray] = {}
    by_grid: dict[tuple[int, int, int], list[int]] = {}
    for index, image in enumerate(images):
        by_grid.setdefault(image.grid, []).append(index)
    for members in by_grid.values():
        made = processor.patches_batch([images[index] for index in members])
        patches |= dict(zip(members, made, strict=True))
    grids = [image.grid for image in images]
    return build_vision_batch([patches[index] for index in range(len(images))], grids, cfg, pictures, windows, slots)


def split(items: Sequence, parts: int) -> list[list]:
    """`parts` runs of nearly equal length, in order; empty ones are left out."""
    edges = np.linspace(0, len(items), parts + 1).round().astype(int)
    return [list(items[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
