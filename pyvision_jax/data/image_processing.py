"""Qwen-VL image processing on the host: one resize by Pillow, then patches, bit-equal to Hugging Face's PIL path.

Source of the arithmetic: transformers 5.24, models/qwen2_vl/image_processing_pil_qwen2_vl.py and image_transforms.py.
Pixels stay uint8 until a batch is built: normalisation depends on the value and the channel only, so it is a table of
3 x 256 float32 numbers, looked up while the pixels are laid out in patches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from pyvision_jax.data.media import MediaError, image_hash

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class ProcessedImage:
    """A resized picture: `hash` names it (`media.image_hash` of `pixels`), `grid` counts its patches (t, h, w)."""

    hash: str
    grid: Grid
    pixels: np.ndarray  # uint8 [H, W, 3]


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The (height, width) that Qwen-VL resizes a picture to, both multiples of `factor`.

    Sides are rounded half to even; a product outside `[min_pixels, max_pixels]` scales both sides by one ratio, rounded
    down (too large) or up (too small). No side is ever below `factor`, so a long picture may exceed `max_pixels`.
    Equal to HF's `smart_resize` wherever that gives a picture at all.
    """
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = math.floor(height / shrink / factor) * factor
        new_width = math.floor(width / shrink / factor) * factor
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return max(factor, new_height), max(factor, new_width)


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Settings of a checkpoint's `preprocessor_config.json`. Pixel limits are usually replaced by `ImageConfig`'s.

    `max_aspect` is HF's limit of 200: a longer picture raises `MediaError`.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 3_136
    max_pixels: int = 1_003_520
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    rescale_factor: float = 1 / 255
    max_aspect: float = 200.0

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(f"need 0 < min_pixels <= max_pixels, found {self.min_pixels} and {self.max_pixels}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ImageProcessor:
        """Reads a `preprocessor_config.json`: `min_pixels`/`max_pixels` win over `size.shortest_edge`/`longest_edge`.

        Raises `ValueError` for settings that would change the pixels in a way not implemented here.
        """
        fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise ValueError(f"preprocessor_config.json: {key}={config[key]!r} is not supported, only {value!r}")
        size = config.get("size") or {}

        def limit(name: str, edge: str, default: int) -> int:
            found = (config.get(name), size.get(edge), size.get(name), default)
            return int(next(value for value in found if value is not None))

        for key in ("image_mean", "image_std"):
            channels = config.get(key, CLIP_MEAN)
            numbers = isinstance(channels, list | tuple) and all(isinstance(value, int | float) for value in channels)
            if not numbers or len(channels) != 3 or (key == "image_std" and not all(value > 0 for value in channels)):
                raise ValueError(f"preprocessor_config.json: {key}={channels!r} is not three numbers that can be used")
        return cls(
            patch_size=config.get("patch_size", 14),
            merge_size=config.get("merge_size", 2),
            temporal_patch_size=config.get("temporal_patch_size", 2),
            min_pixels=limit("min_pixels", "shortest_edge", 3_136),
            max_pixels=limit("max_pixels", "longest_edge", 1_003_520),
            mean=tuple(config.get("image_mean", CLIP_MEAN)),
            std=tuple(config.get("image_std", CLIP_STD)),
            rescale_factor=config.get("rescale_factor", 1 / 255),
        )

    def to_hf(self) -> dict[str, Any]:
        """`preprocessor_config.json`, with the pixel limits in both spellings so that old and new readers agree."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "do_convert_rgb": True,
            "resample": 3,
            "rescale_factor": self.rescale_factor,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
        }

    @property
    def factor(self) -> int:
        """Side of one merged token in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """c: values of one patch, channels * temporal_patch * patch * patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels after the resize. Raises `MediaError` above `max_aspect`."""
        if max(height, width) > self.max_aspect * min(height, width):
            raise MediaError(f"picture of {width}x{height}", f"aspect ratio is above {self.max_aspect:g}")
        return smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)

    def num_tokens(self, height: int, width: int) -> int:
        """Merged tokens that a picture of this size takes in the prompt."""
        new_height, new_width = self.resized(height, width)
        return (new_height // self.factor) * (new_width // self.factor)

    def grid_tokens(self, grid: Grid) -> int:
        """Merged tokens of a grid (t, h, w) of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def process(self, image: Image.Image) -> ProcessedImage:
        """Resizes an RGB picture (see `media.open_image`). Raises `MediaError` above `max_aspect`."""
        if image.mode != "RGB":
            raise ValueError(f"expected an RGB picture, found mode {image.mode}: open it with media.open_image")
        height, width = self.resized(image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image)
        return ProcessedImage(image_hash(pixels), (1, height // self.patch_size, width // self.patch_size), pixels)

    def patches(self, image: ProcessedImage) -> np.ndarray:
        """float32 `[P, c]`: normalised patches in the order (h/m, w/m, m, m), each (channel, frame, row, column)."""
        return self.patches_batch([image])[0]

    def patches_batch(self, images: Sequence[ProcessedImage]) -> np.ndarray:
        """float32 `[n, P, c]`: `patches` of pictures that share one grid. Raises `ValueError` if they do not."""
        grids = {image.grid for image in images}
        if len(grids) != 1:
            raise ValueError(f"expected pictures of one grid, found {sorted(grids)}")
        ((_, rows, cols),) = grids
        n, m, p, t = len(images), self.merge_size, self.patch_size, self.temporal_patch_size
        pixels = np.empty((n, *images[0].pixels.shape), np.uint8)
        for index, image in enumerate(images):
            pixels[index] = image.pixels
        pixels = pixels.reshape(n, rows // m, m, p, cols // m, m, p, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
        out = np.empty((n, rows * cols, 3, t, p, p), np.float32)
        pixels = np.ascontiguousarray(pixels).reshape(n, rows * cols, 3, p, p)
        for channel in range(3):
            out[:, :, channel] = _table(self)[channel][pixels[:, :, channel]][:, :, None]
        return out.reshape(n, rows * cols, self.patch_dim)


@functools.lru_cache(maxsize=8)
def _table(processor: ImageProcessor) -> np.ndarray:
    """float32 [3, 256]: normalised value of each byte, rounded exactly as HF does: float64 product, then float32."""
    values = (np.arange(256, dtype=np.float64) * processor.rescale_factor).astype(np.float32)
    mean, std = np.array(processor.mean, np.float32), np.array(processor.std, np.float32)
    return (values[None] - mean[:, None]) / std[:, None]
