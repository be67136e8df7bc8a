"""Small models for tests: the whole architecture, a few thousand parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec, TextConfig, VisionConfig
from pyvision_jax.models.spec import Spec, init_params

PATCH = 14


def tiny_spec(
    vocab_size: int = 96,
    tie: bool = False,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 2,
    window_size: int = 112,
    fullatt_blocks: tuple[int, ...] = (1,),
    ids: tuple[int, int, int, int] | None = None,
) -> ModelSpec:
    """A Qwen2.5-VL of about 0.1 M parameters. `ids`: image, video, vision_start, vision_end (else the last four)."""
    head = hidden // heads
    section = (head // 2 - 2 * (head // 6), head // 6, head // 6)
    image, video, start, end = ids or tuple(range(vocab_size - 4, vocab_size))
    return ModelSpec(
        family="qwen2_5_vl",
        text=TextConfig(vocab_size, hidden, 2 * hidden, layers, heads, kv_heads, head, 10_000.0, section, 1e-6, tie),
        vision=VisionConfig(depth, 32, 48, 2, 3, PATCH, 2, 2, window_size, fullatt_blocks, hidden, 2),
        image_token=image,
        video_token=video,
        vision_start=start,
        vision_end=end,
    )


def random_params(cfg: ModelSpec, seed: int = 0, scale: float = 0.2, dtype=jnp.float32) -> model.Params:
    """Every leaf random, biases and norms too, so that a test sees each of them."""
    leaves, tree = jax.tree.flatten(model.specs(cfg))
    rng = np.random.default_rng(seed)

    def one(spec: Spec) -> jax.Array:
        value = rng.standard_normal(spec.shape).astype(np.float32) * scale
        return jnp.asarray(1 + value if spec.init == "ones" else value, dtype)

    return jax.tree.unflatten(tree, [one(spec) for spec in leaves])


def init_tiny(cfg: ModelSpec, seed: int = 0) -> model.Params:
    """Parameters as a run would begin with them."""
    return init_params(model.specs(cfg), jax.random.key(seed))


def random_patches(grid: tuple[int, int, int], cfg: ModelSpec, seed: int = 0) -> np.ndarray:
    """Normalised pixels of one picture: float32 [t * h * w, c]."""
    t, h, w = grid
    return np.random.default_rng(seed).standard_normal((t * h * w, cfg.vision.patch_features)).astype(np.float32)
