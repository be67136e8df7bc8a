"""Writes logits.npz: float32 logits of transformers' Qwen2.5-VL for `model_rows.rows`, with weights of tests/tiny.py.

PYTHONPATH=.:tests python tests/golden/make_logits.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from model_rows import CASES, Row, case_spec, rows
from tiny import random_params

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec


def state_dict(params: model.Params, cfg: ModelSpec) -> dict[str, np.ndarray]:
    """Our parameters under transformers' names and in torch's layouts (output axis first)."""
    out: dict[str, np.ndarray] = {}
    v = cfg.vision

    def put(name: str, value, transpose: bool = True) -> None:
        value = np.asarray(value)
        out[name] = np.ascontiguousarray(value.T if transpose and value.ndim == 2 else value)

    kernel = (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    put("model.visual.patch_embed.proj.weight", np.asarray(params.vision.patch_embed).T.reshape(-1, *kernel))
    for i, p in enumerate(params.vision.blocks):
        at = f"model.visual.blocks.{i}."
        put(at + "norm1.weight", p.norm1)
        put(at + "norm2.weight", p.norm2)
        put(at + "attn.qkv.weight", p.qkv.reshape(v.hidden_size, -1))
        put(at + "attn.qkv.bias", p.qkv_bias.reshape(-1))
        put(at + "attn.proj.weight", p.proj.reshape(-1, v.hidden_size))
        put(at + "attn.proj.bias", p.proj_bias)
        for name, weight, bias in (
            ("gate", p.gate, p.gate_bias),
            ("up", p.up, p.up_bias),
            ("down", p.down, p.down_bias),
        ):
            put(f"{at}mlp.{name}_proj.weight", weight)
            put(f"{at}mlp.{name}_proj.bias", bias)
    m = params.vision.merger
    put("model.visual.merger.ln_q.weight", m.norm)
    for name, weight, bias in (("0", m.fc1, m.fc1_bias), ("2", m.fc2, m.fc2_bias)):
        put(f"model.visual.merger.mlp.{name}.weight", weight)
        put(f"model.visual.merger.mlp.{name}.bias", bias)
    put("model.language_model.embed_tokens.weight", params.text.embed, transpose=False)
    for i, p in enumerate(params.text.blocks):
        at = f"model.language_model.layers.{i}."
        d = cfg.text.hidden_size
        put(at + "input_layernorm.weight", p.attn_norm)
        put(at + "post_attention_layernorm.weight", p.mlp_norm)
        for name, weight, bias in (("q", p.q, p.q_bias), ("k", p.k, p.k_bias), ("v", p.v, p.v_bias)):
            put(f"{at}self_attn.{name}_proj.weight", weight.reshape(d, -1))
            put(f"{at}self_attn.{name}_proj.bias", bias.reshape(-1))
        put(at + "self_attn.o_proj.weight", p.o.reshape(-1, d))
        for name, weight in (("gate", p.gate), ("up", p.up), ("down", p.down)):
            put(f"{at}mlp.{name}_proj.weight", weight)
    put("model.language_model.norm.weight", params.text.norm)
    put("lm_head.weight", model.head_matrix(params.text))
    return out


def reference_model(params: model.Params, cfg: ModelSpec):
    """transformers' model with our weights. Every tensor of it is set, or this raises."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(**cfg.to_hf())
    hf = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    hf.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state_dict(params, cfg).items()})
    return hf


def reference_logits(hf, row: Row, cfg: ModelSpec) -> np.ndarray:
    """float32 [T, v] of one row by itself, positions by transformers' own rule."""
    import torch

    def pixels(patches: list[np.ndarray]):
        return torch.from_numpy(np.concatenate(patches)) if patches else None

    def grid(grids: list[tuple[int, int, int]]):
        return torch.tensor(grids) if grids else None

    ids = torch.from_numpy(row.ids.astype(np.int64))[None]
    with torch.no_grad():
        out = hf(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == cfg.image_token).int() + 2 * (ids == cfg.video_token).int(),
            pixel_values=pixels(row.images),
            image_grid_thw=grid(row.image_grids),
            pixel_values_videos=pixels(row.videos),
            video_grid_thw=grid(row.video_grids),
        )
    return out.logits[0].float().numpy()


def main() -> None:
    out = {}
    for name in CASES:
        cfg = case_spec(name)
        hf = reference_model(random_params(cfg), cfg)
        for i, row in enumerate(rows(cfg)):
            out[f"{name}_{i}"] = reference_logits(hf, row, cfg)
    np.savez_compressed(Path(__file__).with_name("logits.npz"), **out)


if __name__ == "__main__":
    main()
