"""Operations against plain numpy, and their refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyvision_jax.ops import (
    attention,
    cache_mask,
    grid_angles,
    group_mask,
    key_mask,
    linear,
    mrope_angles,
    packed_mask,
    rms_norm,
    rotate,
    token_logprobs,
)

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_attention_equals_numpy():
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)
    valid = RNG.random((2, 7)) < 0.6
    valid[:, 0] = True
    out = np.asarray(attention(q, k, v, key_mask(jnp.asarray(valid))))
    for b in range(2):
        for head in range(4):
            scores = q[b, head] @ k[b, head // 2].T / np.sqrt(8)
            weights = np.exp(scores) * valid[b]
            np.testing.assert_allclose(
                out[b, head], weights / weights.sum(-1, keepdims=True) @ v[b, head // 2], atol=1e-5
            )


def test_masks_say_who_sees_whom():
    packed = np.asarray(packed_mask(jnp.array([[1, 1, 2, 0]])).allowed)[0]
    assert packed.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    cached = np.asarray(cache_mask(jnp.array([0, 2]), 2, 5).allowed).astype(int)
    assert cached.tolist() == [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]]
    assert cache_mask(jnp.array([0, 2]), 2, 5).lengths is None
    assert np.asarray(cache_mask(jnp.array([0, 2]), 1, 5).lengths).tolist() == [1, 3]
    frames = np.asarray(group_mask(jnp.array([[0, 0, 1]]), jnp.array([[True, False, True]])).allowed)[0]
    assert frames.astype(int).tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]


def test_a_row_that_sees_nothing_stays_finite():
    out = attention(normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4), key_mask(jnp.zeros((1, 3), bool)))
    assert np.isfinite(np.asarray(out)).all()


def test_attention_refuses_what_it_cannot_do():
    x, mask = normal(1, 2, 3, 8), key_mask(jnp.ones((1, 3), bool))
    with pytest.raises(ValueError, match="'flash' is not one of xla, cudnn"):
        attention(x, x, x, mask, implementation="flash")
    with pytest.raises(ValueError, match="float32"):
        attention(x, x, x, mask, implementation="cudnn")


def test_rms_norm_keeps_the_dtype_and_squares_in_float32():
    x, scale = normal(3, 16) * 300, normal(16)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(rms_norm(x, scale, 1e-6), expected, rtol=1e-5)
    half = rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16), 1e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), expected, atol=0.05)


def test_rotation_depends_on_differences_only():
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16)

    def score(p: list[int], r: list[int]) -> float:
        turned = [
            rotate(x, mrope_angles(jnp.array(at).reshape(3, 1, 1), 16, 100.0, (2, 3, 3))) for x, at in ((q, p), (k, r))
        ]
        return float((turned[0] * turned[1]).sum())

    base = score([5, 2, 9], [1, 1, 4])
    assert score([15, 32, 49], [11, 31, 44]) == pytest.approx(base, abs=1e-4)
    assert all(abs(score(p, [1, 1, 4]) - base) > 1e-3 for p in ([6, 2, 9], [5, 3, 9], [5, 2, 10]))  # each axis counts


def test_grid_rotation_sees_rows_and_columns():
    one = normal(1, 1, 1, 16)
    at = [grid_angles(jnp.array([[r]]), jnp.array([[c]]), 16) for r, c in ((0, 0), (1, 0), (0, 1))]
    still, row, col = (np.asarray(rotate(one, angles))[0, 0, 0] for angles in at)
    np.testing.assert_array_equal(still, one[0, 0, 0])
    assert (row[4:8] == still[4:8]).all() and (row[:4] != still[:4]).all()
    assert (col[:4] == still[:4]).all() and (col[4:8] != still[4:8]).all()


def test_sections_must_fill_half_the_head():
    with pytest.raises(ValueError, match="adds up to 6"):
        mrope_angles(jnp.zeros((3, 1, 1), jnp.int32), 16, 100.0, (2, 2, 2))


def test_linear_takes_weights_with_several_output_axes():
    x, w = normal(2, 3, 4), normal(4, 5, 6)
    np.testing.assert_allclose(linear(x, w), np.einsum("btd,dnh->btnh", x, w), atol=1e-5)
    assert linear(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("chunk", [0, 3, 7, 64])
def test_token_logprobs_equal_numpy(chunk):
    hidden, head = normal(2, 7, 6), normal(6, 11)
    targets = RNG.integers(0, 10, (2, 7))
    temperatures = RNG.uniform(0.5, 2.0, (2, 7)).astype(np.float32)
    forbidden = np.zeros(11, bool)
    forbidden[10] = True
    logp, entropy = token_logprobs(hidden, head, jnp.asarray(targets), temperatures, forbidden, chunk)
    z = (hidden @ head).astype(np.float64) / temperatures[..., None]
    z = z[..., :10]
    full = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, np.take_along_axis(full, targets[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(full) * full).sum(-1), atol=1e-5)


def test_token_logprobs_gradients_do_not_depend_on_the_chunk_and_are_finite():
    hidden, head = normal(2, 7, 6), normal(6, 11)
    targets = jnp.asarray(RNG.integers(0, 11, (2, 7))).at[0, 0].set(10)  # a forbidden target, at weight 0
    weights = jnp.ones((2, 7)).at[0, 0].set(0)
    forbidden = np.arange(11) == 10
    extreme = hidden.copy()
    extreme[1] *= 100  # logits of several hundred

    def loss(hidden, head, chunk):
        logp, entropy = token_logprobs(hidden, head, targets, jnp.ones((2, 7)), forbidden, chunk)
        return -(logp * weights).sum() + 0.1 * entropy.sum()

    gradients = [jax.grad(loss, argnums=(0, 1))(extreme, head, chunk) for chunk in (0, 2)]
    for whole, chunked in zip(*gradients, strict=True):
        assert np.isfinite(whole).all()
        np.testing.assert_allclose(whole, chunked, atol=1e-5 * np.abs(whole).max())
