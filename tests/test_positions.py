"""mRoPE positions: against transformers, worked examples, and independence of padding and of how turns were joined."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from packaging.version import Version

from pyvision_jax.models.config import ModelSpec, TextConfig, VisionConfig
from pyvision_jax.models.positions import mrope_positions

GOLDEN = Path(__file__).parent / "golden"
TEXT, VS, VE, IMAGE, VIDEO = 5, 94, 95, 96, 97
TEXT_END = 90  # ids below are text in the golden prompts
CFG = ModelSpec(
    family="qwen2_5_vl",
    text=TextConfig(
        vocab_size=98,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rope_theta=1e6,
        mrope_section=(2, 1, 1),
        norm_eps=1e-6,
        tie_embeddings=False,
    ),
    vision=VisionConfig(
        depth=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        in_channels=3,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        window_size=112,
        fullatt_blocks=(0,),
        out_hidden_size=8,
        tokens_per_second=2,
    ),
    image_token=IMAGE,
    video_token=VIDEO,
    vision_start=VS,
    vision_end=VE,
)


def maker() -> ModuleType:
    """The script that wrote the golden file: it also holds the reference and the random prompts."""
    spec = importlib.util.spec_from_file_location("make_positions", GOLDEN / "make_positions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_worked_example() -> None:
    ids = [TEXT] * 2 + [VS] + [IMAGE] * 6 + [VE] + [TEXT] * 2
    positions, following = mrope_positions(ids, [(1, 4, 6)], [], CFG)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(
        positions,
        [
            [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
            [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
            [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
        ],
    )
    assert following == 9


def test_the_second_picture_is_not_flat() -> None:
    ids = [1, 2, VS, *[IMAGE] * 4, 5, VS, *[IMAGE] * 4, 7]
    positions, following = mrope_positions(ids, [(1, 4, 4), (1, 4, 4)], [], CFG)
    np.testing.assert_array_equal(positions[1], [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 7, 8, 8, 9])
    np.testing.assert_array_equal(positions[2], [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 7, 8, 9])
    assert following == positions.max() + 1 == 10


@pytest.mark.parametrize(
    ("mode", "seconds", "times", "after"),
    [
        ("hf5", 1.0, [2, 4, 6, 8], 4),
        ("hf4", 1.0, [2, 4, 6, 8], 9),
        ("verl", 1.0, [2, 4, 6, 8], 9),
        ("hf5", 0.5, [2, 3, 4, 5], 4),
        ("hf4", 0.5, [2, 2, 2, 2], 4),
        ("verl", 0.5, [2, 3, 4, 5], 6),
    ],
)
def test_three_video_rules(mode, seconds, times, after) -> None:
    ids = [TEXT, VS] + [VIDEO] * 16 + [VE]
    positions, following = mrope_positions(ids, [], [(4, 4, 4)], CFG, video_mode=mode, second_per_grid=[seconds])
    np.testing.assert_array_equal(positions[0, 2:-1], np.repeat(times, 4))
    np.testing.assert_array_equal(positions[:, -1], [after] * 3)
    assert following == after + 1


def test_golden() -> None:
    golden = np.load(GOLDEN / "positions.npz")
    for k in range(16):
        positions, _ = mrope_positions(
            golden[f"ids{k}"], golden[f"images{k}"], golden[f"videos{k}"], CFG, second_per_grid=golden[f"seconds{k}"]
        )
        np.testing.assert_array_equal(positions, golden[f"positions{k}"])


@pytest.mark.torch
def test_equal_to_transformers_on_random_prompts() -> None:
    pytest.importorskip("torch")
    import transformers

    make, rng = maker(), np.random.default_rng(1)
    model = make.reference_model()
    for k in range(200):
        ids, images, videos, seconds = make.random_prompt(rng, pictures=int(rng.integers(0, 6)), videos=int(k % 4 == 0))
        if Version(transformers.__version__) < Version("5.24"):  # earlier ones cut seconds per grid to a whole number
            seconds = [max(1, round(value)) for value in seconds]
        positions, following = mrope_positions(ids, images, videos, CFG, second_per_grid=seconds)
        for padding in (0, 1, 37) if k < 20 else (0,):
            reference = make.reference_positions(model, ids, images, videos, seconds, left_padding=padding)
            np.testing.assert_array_equal(positions, reference)
        if not videos:
            assert following == positions.max() + 1


@pytest.mark.parametrize("mode", ["hf5", "hf4", "verl"])
def test_incremental_equals_whole(mode) -> None:
    golden = np.load(GOLDEN / "positions.npz")
    for k in range(16):
        ids, grids = golden[f"ids{k}"], (golden[f"images{k}"], golden[f"videos{k}"])
        seconds = golden[f"seconds{k}"]
        whole, end = mrope_positions(ids, *grids, CFG, video_mode=mode, second_per_grid=seconds)
        # One call per text id and per vision run: the finest way in which a sequence can be joined.
        cuts = [0, *(np.flatnonzero((np.diff(ids) != 0) | (ids[1:] < TEXT_END)) + 1), len(ids)]
        parts, position, used = [], 0, [0, 0]
        for begin, stop in itertools.pairwise(cuts):
            chunk = ids[begin:stop]
            take = [int(chunk[0] == IMAGE), int(chunk[0] == VIDEO)]
            part, position = mrope_positions(
                chunk,
                grids[0][used[0] : used[0] + take[0]],
                grids[1][used[1] : used[1] + take[1]],
                CFG,
                start=position,
                video_mode=mode,
                second_per_grid=seconds[used[1] : used[1] + take[1]],
            )
            used = [u + n for u, n in zip(used, take, strict=True)]
            parts.append(part)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
        assert position == end


def test_empty_and_text_only() -> None:
    positions, following = mrope_positions([], [], [], CFG, start=7)
    assert positions.shape == (3, 0) and following == 7
    positions, following = mrope_positions([1, 2, 3], [], [], CFG, start=7)
    np.testing.assert_array_equal(positions, [[7, 8, 9]] * 3)
    assert following == 10


@pytest.mark.parametrize(
    ("ids", "images", "videos", "kwargs", "message"),
    [
        (
            [VS, IMAGE, VE, VS, *[IMAGE] * 3],
            [(1, 2, 2), (1, 4, 4)],
            [],
            {},
            r"picture 1: 3 placeholder .*makes 4 merged",
        ),
        ([VS, *[VIDEO] * 3], [], [(2, 4, 4)], {}, r"video 0: 3 placeholder .*makes 8 merged"),
        ([VS, IMAGE, VE], [], [], {}, "1 pictures but 0 picture grids"),
        ([VS, VE], [(1, 2, 2)], [], {}, "0 pictures but 1 picture grids"),
        ([VS, IMAGE], [(1, 3, 2)], [], {}, "picture 0: rows and columns .* multiples of 2"),
        ([VS, IMAGE, IMAGE], [(2, 2, 2)], [], {}, "picture 0: a still picture"),
        ([VS, VIDEO], [], [(1, 2, 2)], {"second_per_grid": [1.0, 2.0]}, "2 entries for 1 videos"),
        ([VS, VIDEO], [], [(1, 2, 2)], {"video_mode": "hf6"}, "hf6"),
        ([[1]], [], [], {}, "one axis"),
    ],
)
def test_mismatches_are_named(ids, images, videos, kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        mrope_positions(ids, images, videos, CFG, **kwargs)
