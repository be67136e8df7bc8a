"""The image processor against Hugging Face's PIL path: stored values always, the library itself beside torch."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pyvision_jax.data.image_processing import ImageProcessor, smart_resize
from pyvision_jax.data.media import MediaError
from tests.golden.make_image_processing import LIMITS, picture

GOLDEN = np.load(Path(__file__).parent / "golden/image_processing.npz")


@pytest.mark.parametrize("index", range(len(GOLDEN["sizes"])), ids=lambda i: "x".join(map(str, GOLDEN["sizes"][i])))
def test_patches_equal_stored_values_of_hf(index):
    height, width = map(int, GOLDEN["sizes"][index])
    processor = ImageProcessor(**LIMITS)
    image = processor.process(picture(height, width))
    patches = processor.patches(image)
    name = f"patches_{height}x{width}"
    if name in GOLDEN:
        np.testing.assert_array_equal(patches, GOLDEN[name])
    assert image.grid == tuple(GOLDEN["grids"][index])
    assert patches.dtype == np.float32
    assert hashlib.sha256(patches.tobytes()).hexdigest() == GOLDEN["digests"][index]


def random_sizes(n: int) -> list[tuple[int, int]]:
    """Seeded sizes: small, ordinary and long, with the sides that sit on a rounding tie among them."""
    rng = np.random.default_rng(0)
    sizes = [(98, 98), (690, 15420), (1, 1), (27, 27), (1, 200), (42, 70), (2160, 40)]
    while len(sizes) < n:
        height, width = (int(x) for x in np.exp(rng.uniform(0, np.log(900), 2)))
        if max(height, width) <= 200 * min(height, width):
            sizes.append((height, width))
    return sizes


@pytest.mark.torch
@pytest.mark.parametrize("patch, low, high", [(14, 3_136, 60_000), (16, 4_096, 50_176)])
def test_equal_to_hf_on_200_random_sizes(patch, low, high):
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours = ImageProcessor(patch_size=patch, min_pixels=low, max_pixels=high)
    theirs = Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=low, max_pixels=high)
    for height, width in random_sizes(200):
        source = picture(height, width)
        expected = theirs(images=source, return_tensors="np")
        image = ours.process(source)
        assert image.grid == tuple(expected["image_grid_thw"][0]), (height, width)
        np.testing.assert_array_equal(ours.patches(image), expected["pixel_values"])
        assert ours.num_tokens(height, width) * 4 == len(expected["pixel_values"])


@pytest.mark.torch
def test_smart_resize_equals_hf_at_checkpoint_limits():
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as theirs

    rng = np.random.default_rng(1)
    for factor, low, high in ((28, 3_136, 12_845_056), (28, 3_136, 2_000_000), (32, 65_536, 16_777_216)):
        for height, width in rng.integers(30, 6_000, (500, 2)).tolist():
            assert smart_resize(height, width, factor, low, high) == theirs(height, width, factor, low, high)


@pytest.mark.parametrize(
    "size, factor, low, high, expected",
    [
        ((768, 1024), 28, 3_136, 12_845_056, (756, 1036)),
        ((2160, 3840), 28, 3_136, 2_000_000, (1036, 1876)),
        ((42, 42), 28, 3_136, 12_845_056, (56, 56)),
        ((10, 1990), 28, 3_136, 12_845_056, (28, 812)),
        ((100, 70), 32, 65_536, 16_777_216, (320, 224)),
        ((98, 98), 28, 3_136, 12_845_056, (112, 112)),
        ((98, 98), 32, 3_136, 12_845_056, (96, 96)),
        ((690, 15_420), 28, 3_136, 9_000, (28, 448)),  # the side would be 20 pixels without the floor
        ((5, 5), 28, 1, 10_000, (28, 28)),  # rounds to 0, and min_pixels does not mend it
    ],
)
def test_smart_resize_known_values(size, factor, low, high, expected):
    assert smart_resize(*size, factor, low, high) == expected


def test_too_long_is_refused_with_a_reason():
    with pytest.raises(MediaError, match="aspect ratio"):
        ImageProcessor().process(Image.new("RGB", (201, 1)))
    assert ImageProcessor().process(Image.new("RGB", (200, 1))).grid == (1, 2, 58)  # 28 x 812 pixels


def test_batch_equals_single_and_refuses_mixed_grids():
    processor = ImageProcessor(min_pixels=84 * 84, max_pixels=84 * 84)
    images = [processor.process(picture(90 + i, 90)) for i in range(5)]
    batch = processor.patches_batch(images)
    assert batch.shape == (5, 36, processor.patch_dim)
    for image, patches in zip(images, batch, strict=True):
        np.testing.assert_array_equal(processor.patches(image), patches)
    other = dataclasses.replace(processor, max_pixels=200_000).process(picture(300, 100))
    with pytest.raises(ValueError, match="one grid"):
        processor.patches_batch([images[0], other])


def test_hash_names_the_pixels():
    processor = ImageProcessor()
    a, b, c = processor.process(picture(60, 60)), processor.process(picture(60, 60)), processor.process(picture(60, 61))
    assert a.hash == b.hash != c.hash


@pytest.mark.parametrize(
    "config",
    [
        {"min_pixels": 1_000, "max_pixels": 9_000},
        {"size": {"shortest_edge": 1_000, "longest_edge": 9_000}},
        {"size": {"min_pixels": 1_000, "max_pixels": 9_000}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 1_000, "max_pixels": 9_000},
    ],
)
def test_preprocessor_config_spellings(config):
    processor = ImageProcessor.from_hf({**config, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    assert (processor.min_pixels, processor.max_pixels, processor.patch_size) == (1_000, 9_000, 16)
    assert processor.mean == processor.std == (0.5, 0.5, 0.5)
    assert ImageProcessor.from_hf(processor.to_hf()) == processor


def test_preprocessor_config_defaults_and_refusals():
    assert ImageProcessor.from_hf({}) == ImageProcessor()
    with pytest.raises(ValueError, match="resample=2"):
        ImageProcessor.from_hf({"resample": 2})
    for key, value in [("image_mean", "abc"), ("image_mean", [0.5]), ("image_std", [1, 1, 0]), ("image_std", None)]:
        with pytest.raises(ValueError, match=f"{key}=.* is not three numbers"):
            ImageProcessor.from_hf({key: value})
    with pytest.raises(ValueError, match="min_pixels"):
        ImageProcessor(min_pixels=10, max_pixels=5)
