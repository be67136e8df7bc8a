"""Names and shapes of HF tensors <-> leaves of our parameter trees, one table per model family.

`stored(cfg)` has the structure of `specs(cfg)` with a `Stored` at every leaf. Names are those of transformers >= 4.52
(`model.language_model.layers...`, `model.visual...`, `lm_head`), here called the new layout; published files and
`save_pretrained` use the old one (`model.layers...`, `visual...`, `lm_head`). Both are read, either can be written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from pyvision_jax.models import qwen2_5_vl
from pyvision_jax.models.config import ModelSpec

Layout = Literal["old", "new"]

HEAD = "lm_head.weight"
EMBED = "model.language_model.embed_tokens.weight"
_OLD_TO_NEW = (("visual.", "model.visual."), ("model.", "model.language_model."))
_NEW_PREFIXES = ("model.visual.", "model.language_model.")


def layout_of(names: Any) -> Layout:
    """The layout of a directory's tensor names: new as soon as one name is."""
    return "new" if any(name.startswith(_NEW_PREFIXES) for name in names) else "old"


def new_name(name: str) -> str:
    """A name of either layout in the new one."""
    if name.startswith(_NEW_PREFIXES):
        return name
    for old, new in _OLD_TO_NEW:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def name_in(layout: Layout, name: str) -> str:
    """A name of the new layout as `layout` writes it."""
    if layout == "old":
        for old, new in _OLD_TO_NEW:
            if name.startswith(new):
                return old + name.removeprefix(new)
    return name


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one leaf lies in a file: the tensor `name` of `shape`, reshaped to `split`, axes then taken in `order`."""

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return tuple(self.split[axis] for axis in self.order)

    def to_file(self, leaf: np.ndarray) -> np.ndarray:
        """The whole leaf as the file's tensor."""
        return leaf.transpose(np.argsort(self.order)).reshape(self.shape)

    def from_file(self, read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """`leaf[index]`, where `read(slices)` gives a part of the file's tensor.

        Reads no more than the rows (and columns) of the file's tensor that hold the wanted part: what a shard needs of
        a tensor split over devices by heads, by features or by the vocabulary is a contiguous piece of one axis.
        """
        wanted = [slice(0, size) for size in self.split]
        for axis, part in zip(self.order, index, strict=True):
            start, stop, step = part.indices(self.split[axis])
            assert step == 1, "devices hold contiguous parts"
            wanted[axis] = slice(start, stop)
        slices: list[slice] = []
        sizes = list(self.split)  # of the part that is read, on the split axes
        axis = 0
        for size in self.shape:
            inside = _axes_of(size, self.split, axis)
            if not inside:  # this split axis spans several of the file's: read them whole
                slices = [*slices, *(slice(0, n) for n in self.shape[len(slices) :])]
                break
            inner = math.prod(self.split[axis + 1 : axis + inside])
            slices.append(slice(wanted[axis].start * inner, wanted[axis].stop * inner))
            sizes[axis] = wanted[axis].stop - wanted[axis].start
            wanted[axis] = slice(0, sizes[axis])
            axis += inside
        return read(tuple(slices)).reshape(sizes)[tuple(wanted)].transpose(self.order)


def _axes_of(size: int, split: tuple[int, ...], first: int) -> int:
    """How many axes of `split`, from `first` on, make up a file axis of `size`; 0 if none do."""
    for count in range(1, len(split) - first + 1):
        if math.prod(split[first : first + count]) == size:
            return count
    return 0


def _plain(name: str, *shape: int) -> Stored:
    return Stored(name, shape, shape, tuple(range(len(shape))))


def _linear(name: str, inputs: int, outputs: int) -> Stored:
    """torch keeps [out, in]; we keep [in, out]."""
    return Stored(name, (outputs, inputs), (outputs, inputs), (1, 0))


def _to_heads(name: str, d: int, heads: int, h: int) -> Stored:
    return Stored(name, (heads * h, d), (heads, h, d), (2, 0, 1))


def _from_heads(name: str, heads: int, h: int, d: int) -> Stored:
    return Stored(name, (d, heads * h), (d, heads, h), (1, 2, 0))


def _head_bias(name: str, *split: int) -> Stored:
    return Stored(name, (math.prod(split),), split, tuple(range(len(split))))


def _qwen2_5_vl_block(cfg: ModelSpec, layer: int) -> qwen2_5_vl.Block:
    text = cfg.text
    d, f, h, n, k = text.hidden_size, text.intermediate_size, text.head_dim, text.num_heads, text.num_kv_heads
    at = f"model.language_model.layers.{layer}"
    return qwen2_5_vl.Block(
        attn_norm=_plain(f"{at}.input_layernorm.weight", d),
        q=_to_heads(f"{at}.self_attn.q_proj.weight", d, n, h),
        q_bias=_head_bias(f"{at}.self_attn.q_proj.bias", n, h),
        k=_to_heads(f"{at}.self_attn.k_proj.weight", d, k, h),
        k_bias=_head_bias(f"{at}.self_attn.k_proj.bias", k, h),
        v=_to_heads(f"{at}.self_attn.v_proj.weight", d, k, h),
        v_bias=_head_bias(f"{at}.self_attn.v_proj.bias", k, h),
        o=_from_heads(f"{at}.self_attn.o_proj.weight", n, h, d),
        mlp_norm=_plain(f"{at}.post_attention_layernorm.weight", d),
        gate=_linear(f"{at}.mlp.gate_proj.weight", d, f),
        up=_linear(f"{at}.mlp.up_proj.weight", d, f),
        down=_linear(f"{at}.mlp.down_proj.weight", f, d),
    )


def _qwen2_5_vl_vision_block(cfg: ModelSpec, layer: int) -> qwen2_5_vl.VisionBlock:
    vision = cfg.vision
    d, f, n = vision.hidden_size, vision.intermediate_size, vision.num_heads
    h = d // n
    at = f"model.visual.blocks.{layer}"
    return qwen2_5_vl.VisionBlock(
        norm1=_plain(f"{at}.norm1.weight", d),
        qkv=Stored(f"{at}.attn.qkv.weight", (3 * d, d), (3, n, h, d), (3, 0, 1, 2)),
        qkv_bias=_head_bias(f"{at}.attn.qkv.bias", 3, n, h),
        proj=_from_heads(f"{at}.attn.proj.weight", n, h, d),
        proj_bias=_plain(f"{at}.attn.proj.bias", d),
        norm2=_plain(f"{at}.norm2.weight", d),
        gate=_linear(f"{at}.mlp.gate_proj.weight", d, f),
        gate_bias=_plain(f"{at}.mlp.gate_proj.bias", f),
        up=_linear(f"{at}.mlp.up_proj.weight", d, f),
        up_bias=_plain(f"{at}.mlp.up_proj.bias", f),
        down=_linear(f"{at}.mlp.down_proj.weight", f, d),
        down_bias=_plain(f"{at}.mlp.down_proj.bias", d),
    )


def _qwen2_5_vl(cfg: ModelSpec) -> qwen2_5_vl.Params:
    vision, text = cfg.vision, cfg.text
    d, c, patch = vision.hidden_size, vision.patch_features, vision.patch_size
    merged, out = vision.merge_size**2 * d, vision.out_hidden_size
    convolution = (d, vision.in_channels, vision.temporal_patch_size, patch, patch)
    return qwen2_5_vl.Params(
        vision=qwen2_5_vl.Vision(
            patch_embed=Stored("model.visual.patch_embed.proj.weight", convolution, (d, c), (1, 0)),
            blocks=tuple(_qwen2_5_vl_vision_block(cfg, layer) for layer in range(vision.depth)),
            merger=qwen2_5_vl.Merger(
                norm=_plain("model.visual.merger.ln_q.weight", d),
                fc1=_linear("model.visual.merger.mlp.0.weight", merged, merged),
                fc1_bias=_plain("model.visual.merger.mlp.0.bias", merged),
                fc2=_linear("model.visual.merger.mlp.2.weight", merged, out),
                fc2_bias=_plain("model.visual.merger.mlp.2.bias", out),
            ),
        ),
        text=qwen2_5_vl.Text(
            embed=_plain(EMBED, text.vocab_size, text.hidden_size),
            blocks=tuple(_qwen2_5_vl_block(cfg, layer) for layer in range(text.num_layers)),
            norm=_plain("model.language_model.norm.weight", text.hidden_size),
            head=None if text.tie_embeddings else _linear(HEAD, text.hidden_size, text.vocab_size),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """What import and export need of a model family: its tree of Spec, and the same tree of Stored."""

    specs: Callable[[ModelSpec], Any]
    stored: Callable[[ModelSpec], Any]


FAMILIES: Mapping[str, Family] = MappingProxyType({"qwen2_5_vl": Family(qwen2_5_vl.specs, _qwen2_5_vl)})
