"""Makes image_processing.npz from transformers' PIL processor: python tests/golden/make_image_processing.py

Holds the source sizes, the grids, a digest of every float32 patch array, and two arrays in full.
"""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

LIMITS = {"min_pixels": 3_136, "max_pixels": 60_000}
SIZES = [(1, 1), (27, 27), (1, 200), (42, 42), (70, 70), (98, 98), (100, 70), (10, 1990), (690, 138), (333, 256)]
SIZES += [(28, 84), (65, 49)]


def picture(height: int, width: int) -> Image.Image:
    """Ramps with noise, from the size alone."""
    rng = np.random.default_rng(height * 10_000 + width)
    noise = rng.integers(0, 64, (height, width, 3), dtype=np.uint8)
    rows, cols = np.arange(height, dtype=np.uint8)[:, None, None], np.arange(width, dtype=np.uint8)[None, :, None]
    return Image.fromarray(noise + rows * np.array([3, 1, 7], np.uint8) + cols * np.array([1, 5, 2], np.uint8))


def main() -> None:
    processor = Qwen2VLImageProcessorPil(**LIMITS)
    grids, digests, full = [], [], {}
    for height, width in SIZES:
        out = processor(images=picture(height, width), return_tensors="np")
        values = np.ascontiguousarray(out["pixel_values"])
        grids.append(out["image_grid_thw"][0])
        digests.append(hashlib.sha256(values.tobytes()).hexdigest())
        if (height, width) in ((27, 27), (28, 84)):
            full[f"patches_{height}x{width}"] = values
    path = Path(__file__).with_name("image_processing.npz")
    np.savez_compressed(path, sizes=np.array(SIZES), grids=np.array(grids), digests=np.array(digests), **full)


if __name__ == "__main__":
    main()
