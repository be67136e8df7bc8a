"""A Qwen2.5-VL policy small enough to train on two CPU cores: a million parameters, a vocabulary of 450 ids."""

from __future__ import annotations

from pathlib import Path

from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.tokenizer import Tokenizer, train_tiny
from pyvision_jax.models.config import ModelSpec, TextConfig, VisionConfig
from pyvision_jax.worlds import needle

ASSETS = Path(__file__).parent / "assets"
MIN_PIXELS, MAX_PIXELS = 3_136, 7_056  # a square picture is 84 x 84: 36 patches, 9 tokens; no picture has more


def make_tokenizer() -> Tokenizer:
    """The byte-level BPE of everything that the needle world says; it is kept in ASSETS, since weights depend on it."""
    return train_tiny(needle.corpus(), vocab_size=512)


def tokenizer() -> Tokenizer:
    return Tokenizer(ASSETS)


def processor() -> ImageProcessor:
    return ImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)


def model_spec(tokens: Tokenizer) -> ModelSpec:
    """Qwen2.5-VL's architecture with its parts shrunk.

    A window holds a whole picture. RoPE turns fast (theta 8) and mostly by height and width: pictures are
    three tokens wide and trajectories are short, and the decoder has no other way to tell columns apart.
    """
    return ModelSpec(
        family="qwen2_5_vl",
        text=TextConfig(
            vocab_size=tokens.vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            rope_theta=8.0,
            mrope_section=(2, 7, 7),
        ),
        vision=VisionConfig(
            depth=3,
            hidden_size=64,
            intermediate_size=192,
            num_heads=2,
            in_channels=3,
            patch_size=14,
            temporal_patch_size=2,
            merge_size=2,
            window_size=252,
            fullatt_blocks=(2,),
            out_hidden_size=128,
            tokens_per_second=2,
        ),
        image_token=tokens.image_pad,
        video_token=tokens.video_pad,
        vision_start=tokens.vision_start,
        vision_end=tokens.vision_end,
    )
