"""Writes positions.npz: `get_rope_index` of the installed transformers on random prompts with pictures and videos.

python tests/golden/make_positions.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, __version__

IMAGE, VIDEO, VISION_START, VISION_END, TEXT = 96, 97, 94, 95, 90  # ids; text ids are below TEXT
MERGE, TOKENS_PER_SECOND = 2, 2


def random_prompt(rng: np.random.Generator, pictures: int, videos: int):
    """ids int[T], picture grids, video grids, seconds per grid of each video, in random order."""
    kinds = rng.permutation([0] * pictures + [1] * videos)
    ids: list[int] = rng.integers(0, TEXT, rng.integers(0, 9)).tolist()
    grids: tuple[list, list] = ([], [])
    for kind in kinds:
        frames = int(rng.integers(2, 6)) if kind else 1
        rows, cols = (int(n) for n in rng.integers(1, 8, 2) * MERGE)
        grids[kind].append((frames, rows, cols))
        pads = frames * rows * cols // MERGE**2
        ids += [VISION_START] + [VIDEO if kind else IMAGE] * pads + [VISION_END]
        ids += rng.integers(0, TEXT, rng.integers(0, 9)).tolist()
    seconds = rng.choice([0.3, 0.5, 1.0, 1.4, 2.0], videos)
    return np.array([*ids, 1], np.int32), *grids, seconds


def reference_model() -> Qwen2_5_VLModel:
    """A model without weights: only its position function is wanted."""
    config = Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_hidden_layers=1,
            vocab_size=98,
            bos_token_id=None,
            eos_token_id=None,
        ),
        vision_config=dict(
            depth=1, hidden_size=8, num_heads=1, spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND
        ),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


def reference_positions(model, ids, images, videos, seconds, left_padding: int = 0) -> np.ndarray:
    """int [3, T] of `ids`, after `left_padding` masked pad ids."""
    padded = torch.tensor(np.concatenate([np.zeros(left_padding, np.int64), ids]))[None]
    positions, _ = model.get_rope_index(
        padded,
        (padded == IMAGE).int() + 2 * (padded == VIDEO).int(),
        torch.tensor(images) if images else None,
        torch.tensor(videos) if videos else None,
        torch.tensor(seconds, dtype=torch.float32) if videos else None,
        attention_mask=torch.arange(padded.shape[1])[None] >= left_padding,
    )
    return positions[:, 0, left_padding:].numpy()


def main() -> None:
    rng, model, out = np.random.default_rng(0), reference_model(), {}
    for k in range(16):
        ids, images, videos, seconds = random_prompt(rng, pictures=int(rng.integers(0, 5)), videos=k % 2)
        out |= {
            f"ids{k}": ids,
            f"images{k}": np.array(images, np.int32).reshape(-1, 3),
            f"videos{k}": np.array(videos, np.int32).reshape(-1, 3),
            f"seconds{k}": seconds,
            f"positions{k}": reference_positions(model, ids, images, videos, seconds).astype(np.int32),
        }
    np.savez_compressed(Path(__file__).with_suffix("").with_name("positions.npz"), transformers=__version__, **out)


if __name__ == "__main__":
    main()
