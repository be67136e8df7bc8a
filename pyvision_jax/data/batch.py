"""The arrays that a jitted program takes: packed token rows and a batch of pictures in window order."""

from __future__ import annotations

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class VisionBatch:
    """n pictures, each w windows of s patch slots; the four patches of one merged token are neighbours.

    Slots hold patches in window order (the order HF reaches through `window_index`), every window padded at its end to
    s slots (s a multiple of 4). So the tower's output is n * w * s // 4 merged tokens in slot order, and whoever places
    them indexes that flat axis: nothing is put back in reading order on the device.
    """

    patches: Float[Array, "n w s c"]  # normalised pixels, c = channels * temporal_patch * patch * patch
    rows: Int[Array, "n w s"]  # patch row in the picture (2-D RoPE)
    cols: Int[Array, "n w s"]
    valid: Bool[Array, "n w s"]
    frames: Int[Array, "n w s"]  # temporal patch index: full-attention layers attend within one frame only


@struct.dataclass
class TokenBatch:
    """b packed rows of t ids. Position j of a row predicts `ids[j + 1]`; `loss_weights[j]` belongs to that."""

    ids: Int[Array, "b t"]
    segments: Int[Array, "b t"]  # 0 is padding; attention is causal inside one segment
    positions: Int[Array, "3 b t"]  # temporal, height, width (mRoPE)
    image_index: Int[Array, "b t"]  # flat index into the tower's output, -1 for text
    targets: Int[Array, "b t"]  # ids[j + 1] inside the same segment, else 0
    loss_weights: Float[Array, "b t"]  # 0 where nothing is learned
    temperatures: Float[Array, "b t"]  # logits of the target are divided by it (1 in SFT and for greedy tokens)
    old_logprobs: Float[Array, "b t"]  # RL: of the target when it was sampled
    ref_logprobs: Float[Array, "b t"]  # RL with a KL term, else 0
    advantages: Float[Array, "b t"]  # RL, else 0
    vision: VisionBatch | None


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
