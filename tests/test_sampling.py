"""Sampling against explicit softmax arithmetic in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pyvision_jax.rollout.repetition import Repetition, repeated_share
from pyvision_jax.rollout.sampling import inverse_cdf, row_key, sample

draw = jax.jit(sample, static_argnums=(2, 3))


def keys(n: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed, impl="threefry2x32"), n)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def nucleus(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Filtered distribution of one row."""
    p = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    keep = order[: int(np.searchsorted(np.cumsum(p[order]), top_p) + 1)]
    out = np.zeros_like(p)
    out[keep] = p[keep]
    return out / out.sum()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 5), (0.9, 12)])
def test_frequencies_and_logprobs(top_p: float, top_k: int):
    """40,000 draws from one row: chi-square against the filtered distribution, and the recorded numbers."""
    v, n, t = 60, 40_000, 0.7
    logits = np.random.default_rng(1).normal(0, 1.5, v).astype(np.float32)
    forbidden = np.zeros(v, bool)
    forbidden[[3, int(logits.argmax())]] = True
    masked = np.where(forbidden, -np.inf, logits)
    out = draw(jnp.broadcast_to(logits, (n, v)), jnp.full(n, t), top_p, top_k, jnp.asarray(forbidden), keys(n))
    p = nucleus(masked, t, top_p, top_k)
    counts = np.bincount(np.asarray(out.ids), minlength=v)
    assert (counts[p == 0] == 0).all()
    inside = p > 0
    chi = ((counts[inside] - n * p[inside]) ** 2 / (n * p[inside])).sum()
    freedom = inside.sum() - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom)
    ids = np.asarray(out.ids)
    np.testing.assert_allclose(out.logprob, np.log(p[ids]), atol=2e-6)
    policy = softmax(masked.astype(np.float64))
    np.testing.assert_allclose(out.policy_logprob, np.log(policy[ids]), atol=2e-6)
    entropy = -(policy[policy > 0] * np.log(policy[policy > 0])).sum()
    np.testing.assert_allclose(out.entropy, entropy, rtol=1e-5)


def test_rows_have_their_own_temperature_and_zero_is_greedy():
    v = 40
    logits = np.random.default_rng(2).normal(0, 1, (4, v)).astype(np.float32)
    forbidden = np.zeros(v, bool)
    forbidden[logits[1].argmax()] = True
    out = draw(jnp.asarray(logits), jnp.array([1.0, 0.0, 0.6, 0.0]), 1.0, 0, jnp.asarray(forbidden), keys(4))
    masked = np.where(forbidden, -np.inf, logits)
    ids = np.asarray(out.ids)
    assert ids[1] == masked[1].argmax() and ids[3] == masked[3].argmax()
    for row, t in enumerate([1.0, 1.0, 0.6, 1.0]):  # greedy rows are scored at temperature 1
        want = np.log(softmax(masked[row] / t)[ids[row]])
        assert float(out.logprob[row]) == pytest.approx(want, abs=2e-6)
    assert float(out.logprob[0]) == float(out.policy_logprob[0])


def test_a_row_depends_on_its_key_only():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(8, 2_000)), jnp.float32)
    seeds = jnp.asarray(np.arange(16).reshape(8, 2), jnp.uint32)
    position = jnp.arange(8)
    row = jax.jit(lambda s, p: jax.vmap(jax.random.fold_in)(row_key(s), p))(seeds, position)
    whole = draw(logits, jnp.ones(8), 1.0, 0, None, row)
    order = np.array([5, 0, 7])
    part = draw(logits[order], jnp.ones(3), 1.0, 0, None, row[order])
    assert (np.asarray(whole.ids)[order] == np.asarray(part.ids)).all()


def test_inverse_cdf_over_a_large_vocabulary():
    """Two levels over 152k ids: equal to a float64 search away from the edges, never an id of weight 0."""
    v, b = 152_064, 24
    rng = np.random.default_rng(4)
    weights = np.exp(rng.normal(0, 3, (b, v))).astype(np.float32)
    weights[:, rng.random(v) < 0.5] = 0
    weights[0] = 0
    weights[0, 17] = 1
    weights[:, -700:] = 0
    uniform = np.concatenate([[0.5, 0.0, np.nextafter(1, 0, dtype=np.float32)], rng.random(b - 3)]).astype(np.float32)
    ids = np.asarray(jax.jit(inverse_cdf)(jnp.asarray(weights), jnp.asarray(uniform)))
    assert (np.take_along_axis(weights, ids[:, None], 1) > 0).all()
    assert ids[0] == 17
    running = np.cumsum(weights.astype(np.float64), 1)
    for row in range(1, b):
        low = (running[row, ids[row]] - weights[row, ids[row]]) / running[row, -1]
        high = running[row, ids[row]] / running[row, -1]
        assert low - 1e-5 <= uniform[row] <= high + 1e-5


def test_no_sort_without_filters():
    def hlo(top_p: float, top_k: int) -> str:
        args = (jnp.zeros((2, 300)), jnp.ones(2), top_p, top_k, None, keys(2))
        return draw.lower(*args).as_text()

    assert "stablehlo.sort" not in hlo(1.0, 0) and "top_k" not in hlo(1.0, 0)
    assert "stablehlo.sort" in hlo(0.9, 0)


def test_bad_top_p():
    with pytest.raises(ValueError, match="top_p"):
        sample(jnp.zeros((1, 4)), jnp.ones(1), 0.0, 0, None, keys(1))


def brute_share(items: list[int], length: int) -> float:
    best = 0
    for start in range(len(items) - length + 1):
        count, at = 0, 0
        while at + length <= len(items):
            hit = items[at : at + length] == items[start : start + length]
            count, at = count + hit, at + (length if hit else 1)
        best = max(best, count)
    return best * length / len(items) if best > 1 else 0.0


def test_repeated_share_equals_a_plain_search():
    rng = np.random.default_rng(5)
    for _ in range(60):
        items = rng.integers(0, 2, rng.integers(4, 40)).tolist()
        assert repeated_share(items, 3) == pytest.approx(brute_share(items, 3)), items


def test_repetition_rule():
    rule = Repetition(length=8, share=0.5, tail=200, minimum=40)
    varied = np.random.default_rng(6).integers(0, 500, 400)
    assert not rule.found(varied)
    assert not rule.found([7] * 39)
    assert rule.found([7] * 40)
    loop = np.tile(np.arange(10), 15)
    assert rule.found(np.concatenate([varied, loop]))  # 15 windows of 8 in the last 200 items: a share of 0.6
    assert not Repetition(length=8, share=0.5, tail=0, minimum=40).found(np.concatenate([varied, loop]))
    assert rule.found(b"I agree. " * 8)
    with pytest.raises(ValueError, match="share"):
        Repetition(share=0)
