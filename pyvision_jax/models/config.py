"""Geometry of a model, frozen and hashable (a static argument of jit); read from and written to HF config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

VISION_ROPE_THETA = 10_000.0
VISION_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class TextConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    mrope_section: tuple[int, ...] = (16, 24, 24)
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} key heads evenly")
        if sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(f"mrope_section {self.mrope_section} must add up to half of head_dim {self.head_dim}")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int  # pixels
    fullatt_blocks: tuple[int, ...]
    out_hidden_size: int
    tokens_per_second: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 4:
            raise ValueError(f"vision width {self.hidden_size} over {self.num_heads} heads is not a multiple of 4 each")
        if self.window_tokens < 1:
            raise ValueError(f"window_size {self.window_size} is smaller than one merged token")
        if self.merge_size != 2:
            raise ValueError(f"spatial_merge_size {self.merge_size}: VisionBatch holds four patches a merged token")

    @property
    def window_tokens(self) -> int:
        """Merged tokens along one side of an attention window."""
        return self.window_size // self.merge_size // self.patch_size

    @property
    def patch_features(self) -> int:
        """Length of one flattened patch (c of VisionBatch.patches)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A whole model; the last four are token ids."""

    family: str
    text: TextConfig
    vision: VisionConfig
    image_token: int
    video_token: int
    vision_start: int
    vision_end: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a config.json: text fields flat (transformers 4.x) or under `text_config`, RoPE as `rope_theta` +
        `rope_scaling` or as `rope_parameters`. Values that a file may leave out are the defaults of HF's config class.

        Raises ValueError for another family, a missing size, or a feature that is not built (sliding windows, other
        activations or RoPE kinds).
        """
        family = config.get("model_type", "qwen2_5_vl")
        if family != "qwen2_5_vl":
            raise ValueError(f"model_type {family!r} is not supported; known: qwen2_5_vl")
        text = {**config, **(config.get("text_config") or {})}
        vision = config.get("vision_config") or {}
        tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
        for part, name in ((text, "text"), (vision, "vision")):
            if part.get("hidden_act", "silu") != "silu":
                raise ValueError(f"{name} hidden_act {part['hidden_act']!r}: only silu is built")
        layers = _need(text, "num_hidden_layers")
        if text.get("use_sliding_window") and text.get("max_window_layers", layers) < layers:
            raise ValueError("use_sliding_window is set: sliding-window layers are not built")
        theta, section = _rope(text)
        heads = _need(text, "num_attention_heads")
        vision_rope = vision.get("rope_parameters") or {}
        if vision_rope.get("rope_theta", VISION_ROPE_THETA) != VISION_ROPE_THETA:
            raise ValueError(f"vision rope_theta {vision_rope['rope_theta']} is not {VISION_ROPE_THETA}")
        return cls(
            family=family,
            text=TextConfig(
                vocab_size=_need(text, "vocab_size"),
                hidden_size=_need(text, "hidden_size"),
                intermediate_size=_need(text, "intermediate_size"),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=text.get("num_key_value_heads") or heads,
                head_dim=text.get("head_dim") or _need(text, "hidden_size") // heads,
                rope_theta=theta,
                mrope_section=section,
                norm_eps=text.get("rms_norm_eps", 1e-5),
                tie_embeddings=tied,
            ),
            vision=VisionConfig(
                depth=vision.get("depth", 32),
                hidden_size=vision.get("hidden_size", 3584),
                intermediate_size=vision.get("intermediate_size", 3420),
                num_heads=vision.get("num_heads", 16),
                in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
                patch_size=vision.get("patch_size", 14),
                temporal_patch_size=vision.get("temporal_patch_size", 2),
                merge_size=vision.get("spatial_merge_size", 2),
                window_size=vision.get("window_size", 112),
                fullatt_blocks=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
                out_hidden_size=vision.get("out_hidden_size", 3584),
                tokens_per_second=vision.get("tokens_per_second", 4),
            ),
            image_token=config.get("image_token_id", 151655),
            video_token=config.get("video_token_id", 151656),
            vision_start=config.get("vision_start_token_id", 151652),
            vision_end=config.get("vision_end_token_id", 151653),
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json for transformers 4.5x and 5.x: text fields under `text_config`, RoPE in both forms."""
        text, vision = self.text, self.vision
        rope = {"rope_type": "default", "mrope_section": list(text.mrope_section)}
        body: dict[str, Any] = {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": text.norm_eps,
            "rope_theta": text.rope_theta,
            "rope_scaling": {"type": "mrope", **rope},
            "rope_parameters": {"rope_theta": text.rope_theta, **rope},
            "tie_word_embeddings": text.tie_embeddings,
        }
        if text.head_dim * text.num_heads != text.hidden_size:
            body["head_dim"] = text.head_dim
        return {
            "model_type": self.family,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "text_config": body,
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "depth": vision.depth,
                "hidden_size": vision.hidden_size,
                "hidden_act": "silu",
                "intermediate_size": vision.intermediate_size,
                "num_heads": vision.num_heads,
                "in_channels": vision.in_channels,
                "patch_size": vision.patch_size,
                "spatial_patch_size": vision.patch_size,
                "temporal_patch_size": vision.temporal_patch_size,
                "spatial_merge_size": vision.merge_size,
                "window_size": vision.window_size,
                "fullatt_block_indexes": list(vision.fullatt_blocks),
                "out_hidden_size": vision.out_hidden_size,
                "tokens_per_second": vision.tokens_per_second,
            },
            "image_token_id": self.image_token,
            "video_token_id": self.video_token,
            "vision_start_token_id": self.vision_start,
            "vision_end_token_id": self.vision_end,
            "tie_word_embeddings": text.tie_embeddings,
        }


def _need(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key!r} (looked at the top level and in text_config)")
    return int(config[key])


def _rope(text: Mapping[str, Any]) -> tuple[float, tuple[int, ...]]:
    """(theta, mrope_section) from `rope_parameters` (5.x), or `rope_theta` and `rope_scaling` (4.x)."""
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope type {kind!r}: only default (mrope) is built")
    theta = rope.get("rope_theta", text.get("rope_theta", 1_000_000.0))
    return float(theta), tuple(rope.get("mrope_section", (16, 24, 24)))
