"""Geometry from config.json in every layout, and the placement of patches in windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_patches, tiny_spec

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.spec import Spec, abstract_params, init_params
from pyvision_jax.models.vision_layout import build_vision_batch, layout

# The fields of Qwen/Qwen2.5-VL-3B-Instruct's config.json that shape the model (transformers 4.x, flat).
FLAT_3B = {
    "model_type": "qwen2_5_vl",
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}


def test_flat_and_nested_layouts_agree():
    spec = ModelSpec.from_hf(FLAT_3B)
    assert (spec.text.head_dim, spec.text.num_kv_heads, spec.text.tie_embeddings) == (128, 2, True)
    assert (spec.vision.window_tokens, spec.vision.patch_features, spec.vision.tokens_per_second) == (4, 1176, 2)
    assert ModelSpec.from_hf(spec.to_hf()) == spec
    nested = spec.to_hf()
    nested["text_config"] = {k: v for k, v in nested["text_config"].items() if k not in ("rope_theta", "rope_scaling")}
    assert ModelSpec.from_hf(nested) == spec
    assert hash(spec) == hash(ModelSpec.from_hf(FLAT_3B))


def test_sizes_of_the_3b_model():
    """3.75 G parameters, as the checkpoint's index counts them, without one array being made."""
    params = abstract_params(model.specs(ModelSpec.from_hf(FLAT_3B)), jnp.bfloat16)
    assert sum(x.size for x in jax.tree.leaves(params)) == 3_754_622_976


def test_a_saved_vision_config_may_hold_only_what_differs_from_the_defaults():
    thin = {**FLAT_3B, "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048, "tokens_per_second": 2}}
    assert ModelSpec.from_hf(thin) == ModelSpec.from_hf(FLAT_3B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llava"}, "llava"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"use_sliding_window": True, "max_window_layers": 4}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}}, "mrope_section"),
        ({"num_key_value_heads": 3}, "key heads"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf({**FLAT_3B, **change})


def test_tower_and_decoder_must_meet():
    cfg = ModelSpec.from_hf({**FLAT_3B, "vision_config": {**FLAT_3B["vision_config"], "out_hidden_size": 3584}})
    with pytest.raises(ValueError, match=r"3584.*2048"):
        model.specs(cfg)


def test_init_depends_on_the_key_only():
    specs = {
        "a": Spec((4, 6), (None, None), std=0.5),
        "b": Spec((6,), (None,), "ones"),
        "c": Spec((2,), (None,), "zeros"),
    }
    one, same, other = (init_params(specs, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["a"], same["a"])
    assert not np.array_equal(one["a"], other["a"])
    assert one["b"].tolist() == [1] * 6 and one["c"].tolist() == [0] * 2


def test_layout_visits_windows_of_unlike_sizes():
    """3 x 5 merged tokens in windows of 2 x 2: worked by hand."""
    cfg = tiny_spec(window_size=56).vision
    placed = layout([(1, 6, 10)], cfg)
    assert placed.valid.shape == (1, 6, 16)
    assert placed.valid.sum(-1).tolist() == [[16, 16, 8, 8, 8, 4]]
    tokens = placed.token_index[0].reshape(3, 5)
    assert tokens.tolist() == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9], [12, 13, 16, 17, 20]]
    first = placed.order[0][:4]  # the four patches of the first merged token
    assert list(zip(placed.rows.reshape(-1)[first], placed.cols.reshape(-1)[first], strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_one_window_wastes_nothing():
    assert layout([(1, 6, 6)], tiny_spec(window_size=112).vision).valid.all()


def test_frames_never_share_a_window():
    placed = layout([(3, 4, 4)], tiny_spec(window_size=112).vision)
    assert placed.valid.shape == (1, 3, 16)
    assert (placed.frames == np.arange(3)[:, None]).all()


@pytest.mark.torch
def test_order_equals_transformers_window_index():
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    rng = np.random.default_rng(0)
    cfg = tiny_spec(window_size=56).vision
    for _ in range(40):
        grid = (int(rng.integers(1, 4)), *(int(n) * 2 for n in rng.integers(1, 12, 2)))
        index, bounds = vision_utils.get_vision_window_index(torch.tensor([grid]), 2, cfg.window_size, cfg.patch_size)
        placed = layout([grid], cfg)
        reading = np.argsort(placed.token_index[0], kind="stable")
        np.testing.assert_array_equal(reading, index.numpy())
        np.testing.assert_array_equal(placed.valid[0].sum(-1), np.diff(bounds.numpy()))
        position = vision_utils.get_vision_position_ids(torch.tensor([grid]), 2).numpy()
        np.testing.assert_array_equal(placed.rows.reshape(-1)[placed.order[0]], position[:, 0])
        np.testing.assert_array_equal(placed.cols.reshape(-1)[placed.order[0]], position[:, 1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"windows": 1}, "windows=1.*2"),
        ({"slots": 8}, "slots=8.*16"),
        ({"pictures": 1}, "pictures=1.*2"),
        ({"slots": 18}, "multiple of 4"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(kwargs, message):
    cfg = tiny_spec(window_size=56)
    grids = [(1, 4, 6), (1, 2, 2)]
    with pytest.raises(ValueError, match=message):
        build_vision_batch([random_patches(grid, cfg) for grid in grids], grids, cfg.vision, **kwargs)


def test_patches_that_do_not_fit_their_grid_are_refused():
    cfg = tiny_spec()
    with pytest.raises(ValueError, match="picture 1"):
        build_vision_batch([random_patches((1, 4, 4), cfg)] * 2, [(1, 4, 4), (1, 4, 6)], cfg.vision)
    with pytest.raises(ValueError, match="multiples of 2"):
        layout([(1, 3, 4)], cfg.vision)
