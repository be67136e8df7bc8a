"""The cached path against the packed one, packing, blindness, and what the decode program copies."""

from __future__ import annotations

import re
from functools import partial

import decode_program
import jax
import numpy as np
import pytest
from model_rows import rows, to_batch
from tiny import random_params, tiny_spec

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.rollout import step

CFG = tiny_spec(vocab_size=64, window_size=56, layers=2, depth=2)
PARAMS = random_params(CFG, scale=0.3)


@jax.jit
def full(params, batch):
    """[b, t, v] of a packed batch."""
    return model.logits(params.text, model.hidden_states(params, batch, CFG))


encode = jax.jit(partial(model.encode_images, cfg=CFG))


@partial(jax.jit, donate_argnums=(1,))
def extend(params, cache, ids, image_index, features, positions, lengths, counts):
    x = model.embed(params.text, ids, image_index, features)
    hidden, cache = model.forward_cached(params.text, x, positions, cache, lengths, counts, CFG)
    return model.logits(params.text, hidden), cache


def window(array: np.ndarray, starts: np.ndarray, counts: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    """Columns starts[b] .. starts[b] + counts[b] of each row b of [..., b, t], padded to `width`."""
    out = np.full((*array.shape[:-1], width), fill, array.dtype)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        out[..., b, :count] = array[..., b, start : start + count]
    return out


@pytest.fixture(scope="module")
def batch():
    return to_batch([[row] for row in rows(CFG)], CFG, 48)


def test_prefill_extend_and_decode_equal_one_forward(batch):
    """Prompts of unlike lengths, an extension, token by token, then an observation with a picture in mid-trajectory for
    some rows while the others rest, then token by token to the end."""
    members = rows(CFG)
    ends = np.array([len(row.ids) for row in members])
    first_picture = np.array([17, 3, 2, 4])  # where the first vision_start stands
    second = np.array([17, 19, 8, 24])  # where the second picture of rows 2 and 3 begins
    expected = np.asarray(full(PARAMS, batch))
    features = encode(PARAMS.vision, batch.vision)
    cache = model.init_cache(CFG, len(members), 48)
    # A slot that was used before: what it holds must not matter.
    cache = jax.tree.map(lambda x: np.full(x.shape, 7, np.float32), cache)
    lengths = np.zeros(4, np.int32)
    seen = np.zeros_like(expected)

    def feed(counts: np.ndarray, width: int) -> None:
        nonlocal cache, lengths
        counts = counts.astype(np.int32)
        scores, cache = extend(
            PARAMS,
            cache,
            window(batch.ids, lengths, counts, width),
            window(batch.image_index, lengths, counts, width, -1),
            features,
            window(batch.positions, lengths, counts, width),
            lengths,
            counts,
        )
        for b, count in enumerate(counts):
            seen[b, lengths[b] : lengths[b] + count] = np.asarray(scores)[b, :count]
        lengths = lengths + counts

    feed(first_picture - 1, 30)  # prefill
    assert lengths.tolist() == [16, 2, 1, 3]
    feed(second - lengths - np.array([0, 3, 0, 2]), 30)  # extension with the first picture
    while (lengths < second).any():  # decode, rows that are done rest
        feed((lengths < second).astype(np.int32), 1)
    resting = [np.asarray(x)[:2] for x in jax.tree.leaves(cache)]
    feed(np.where(np.arange(4) >= 2, ends - second - 3, 0), 30)  # pictures in mid-trajectory, rows 0 and 1 rest
    for before, after in zip(resting, jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(before, np.asarray(after)[:2])
    while (lengths < ends).any():
        feed((lengths < ends).astype(np.int32), 1)

    real = batch.segments > 0
    scale = np.abs(expected[real]).max()
    np.testing.assert_allclose(seen[real], expected[real], atol=1e-5 * scale, rtol=0)
    np.testing.assert_array_equal(seen[real].argmax(-1), expected[real].argmax(-1))


def test_packed_rows_equal_separate_rows(batch):
    members = rows(CFG)
    alone = np.asarray(full(PARAMS, batch))
    packed = np.asarray(full(PARAMS, to_batch([members[:2], members[2:]], CFG, 96)))
    for row, at in ((0, 0), (1, len(members[0].ids))):
        n = len(members[row].ids)
        np.testing.assert_allclose(packed[0, at : at + n], alone[row, :n], atol=1e-4)
    for row, at in ((2, 0), (3, len(members[2].ids))):
        n = len(members[row].ids)
        np.testing.assert_allclose(packed[1, at : at + n], alone[row, :n], atol=1e-4)


def test_no_picture_is_ignored(batch):
    """Blindness: other pixels in any picture change the logits of every later token of its row, and no other row."""
    before = np.asarray(full(PARAMS, batch))
    for picture in range(len(batch.vision.valid)):
        patches = batch.vision.patches.copy()
        patches[picture] = np.where(batch.vision.valid[picture][..., None], -patches[picture][..., ::-1], 0)
        after = np.asarray(full(PARAMS, batch.replace(vision=batch.vision.replace(patches=patches))))
        tokens = batch.vision.valid.size // len(batch.vision.valid) // 4
        mine = (batch.image_index // tokens == picture) & (batch.image_index >= 0)
        row = int(np.flatnonzero(mine.any(1))[0])
        later = (np.arange(48) > np.flatnonzero(mine[row])[-1]) & (batch.segments[row] > 0)
        assert later.sum() >= 5
        assert (np.abs(after - before)[row, later].max(-1) > 1e-4).all(), picture
        others = np.arange(len(before)) != row
        np.testing.assert_array_equal(after[others], before[others])


def test_padding_slots_of_the_tower_change_nothing(batch):
    """Larger buckets and other pictures beside it give the same features."""
    from pyvision_jax.models.vision_layout import build_vision_batch

    row = rows(CFG)[2]
    small, index = build_vision_batch(row.images, row.image_grids, CFG.vision)
    large, placed = build_vision_batch(row.images, row.image_grids, CFG.vision, pictures=5, windows=9, slots=20)
    tight, loose = (np.asarray(encode(PARAMS.vision, batch)) for batch in (small, large))
    assert np.isfinite(loose).all()
    for a, b in zip(index, placed, strict=True):
        np.testing.assert_allclose(tight[a], loose[b], atol=1e-5 * np.abs(tight[a]).max())


@pytest.mark.parametrize("static", [decode_program.STATIC, decode_program.EVERYTHING], ids=["plain", "everything"])
def test_decode_program_copies_no_cache(static):
    slots, length = 6, 512
    arguments = decode_program.arguments(CFG, slots, length, static=static)
    program = step.decode.lower(PARAMS, *arguments, cfg=CFG, **static).compile()
    shape = (slots, CFG.text.num_kv_heads, length, CFG.text.head_dim)
    size = int(np.prod(shape))
    for line in program.as_text().splitlines():
        found = re.search(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if found and found[2] in ("copy", "transpose", "convert", "pad", "concatenate", "select"):
            assert np.prod([int(n) for n in found[1].split(",")]) < size, line
    assert program.memory_analysis().temp_size_in_bytes < size * 4, "a whole layer's cache is held twice"
