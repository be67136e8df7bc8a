"""Qwen2.5-VL as pure functions over one parameter tree (arXiv:2502.13923; semantics of HF `modeling_qwen2_5_vl.py`).

features = encode_images(params.vision, batch.vision, cfg)
x = embed(params.text, batch.ids, batch.image_index, features)
hidden = forward(params.text, x, batch.positions, batch.segments, cfg)
scores = logits(params.text, hidden)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pyvision_jax.data.batch import TokenBatch, VisionBatch
from pyvision_jax.models import text, vision
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.text import Block, KVCache, Text, embed, head_matrix, logits
from pyvision_jax.models.vision import Merger, Vision, VisionBlock

__all__ = [
    "Block",
    "KVCache",
    "Merger",
    "Params",
    "Text",
    "Vision",
    "VisionBlock",
    "embed",
    "encode_images",
    "forward",
    "forward_cached",
    "head_matrix",
    "hidden_states",
    "init_cache",
    "logits",
    "specs",
]


@struct.dataclass
class Params:
    vision: Vision
    text: Text


def specs(cfg: ModelSpec) -> Params:
    """The parameter tree with a Spec at every leaf. Raises ValueError if tower and decoder differ in width."""
    if cfg.vision.out_hidden_size != cfg.text.hidden_size:
        raise ValueError(
            f"vision out_hidden_size {cfg.vision.out_hidden_size} is not the text hidden_size {cfg.text.hidden_size}"
        )
    return Params(vision=vision.vision_specs(cfg.vision), text=text.text_specs(cfg.text))


def init_cache(cfg: ModelSpec, slots: int, length: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """As `text.init_cache`."""
    return text.init_cache(cfg.text, slots, length, dtype)


def encode_images(
    params: Vision, batch: VisionBatch, cfg: ModelSpec, remat: str = "none", implementation: str = "xla"
) -> Float[Array, "m d"]:
    """As `vision.encode_images`."""
    return vision.encode_images(params, batch, cfg.vision, remat, implementation)


def forward(
    params: Text,
    x: Float[Array, "b t d"],
    positions: Int[Array, "3 b t"],
    segments: Int[Array, "b t"],
    cfg: ModelSpec,
    remat: str = "none",
    implementation: str = "xla",
) -> Float[Array, "b t d"]:
    """As `text.forward`."""
    return text.forward(params, x, positions, segments, cfg.text, remat, implementation)


def forward_cached(
    params: Text,
    x: Float[Array, "b t d"],
    positions: Int[Array, "3 b t"],
    cache: KVCache,
    lengths: Int[Array, " b"],
    counts: Int[Array, " b"],
    cfg: ModelSpec,
    implementation: str = "xla",
) -> tuple[Float[Array, "b t d"], KVCache]:
    """As `text.forward_cached`."""
    return text.forward_cached(params, x, positions, cache, lengths, counts, cfg.text, implementation)


def hidden_states(
    params: Any, batch: TokenBatch, cfg: ModelSpec, remat: str = "none", implementation: str = "xla"
) -> Float[Array, "b t d"]:
    """The whole trainer path of a packed batch: pictures, embeddings, decoder, final norm."""
    features = None
    if batch.vision is not None:
        features = encode_images(params.vision, batch.vision, cfg, remat, implementation)
    x = embed(params.text, batch.ids, batch.image_index, features)
    return forward(params.text, x, batch.positions, batch.segments, cfg, remat, implementation)
