"""Sampling against explicit softmax arithmetic in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine as sampler

from pyvision_jax.config import SamplingConfig
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Request, View
from pyvision_jax.rollout.sampling import (
    Filters,
    _filter,
    _penalised,
    add_ids,
    inverse_cdf,
    no_ids,
    row_key,
    sample,
    with_ids,
)

draw = jax.jit(sample, static_argnames=("filters", "top_entropy"))
OFF = Filters()


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
    out = draw(jnp.broadcast_to(logits, (n, v)), jnp.full(n, t), Filters(top_p, top_k), jnp.asarray(forbidden), keys(n))
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
    out = draw(jnp.asarray(logits), jnp.array([1.0, 0.0, 0.6, 0.0]), OFF, jnp.asarray(forbidden), keys(4))
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
    whole = draw(logits, jnp.ones(8), OFF, None, row)
    order = np.array([5, 0, 7])
    part = draw(logits[order], jnp.ones(3), OFF, None, row[order])
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


def kept_by_sorting(scaled: np.ndarray, filters: Filters) -> np.ndarray:
    """The set of one row by its sorted definition, in float64: an id is in if those *more* likely leave it room.

    Ids that tie stand or fall together, so the order that a sort gives them does not matter.
    """
    p = np.exp(scaled.astype(np.float64))
    kept = p > 0
    if 0 < filters.top_k < len(p):
        kept &= p >= np.sort(p)[::-1][filters.top_k - 1]
    if filters.top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = np.where(kept, p, 0)[order]
        before = np.cumsum(mass) - mass
        first = np.searchsorted(-p[order], -p[order])  # of those that tie with it
        inside = before[first] < filters.top_p * mass.sum()
        kept[order] &= inside
    if filters.min_p > 0:
        kept &= p >= filters.min_p
    return kept


def rows_of_all_kinds(v: int) -> np.ndarray:
    """Random logits, and those that a search for a threshold may stumble over; the largest of each row is 0."""
    rng = np.random.default_rng(7)
    flat = np.zeros(v)
    one = np.full(v, -np.inf)
    one[v // 3] = 0
    far = np.full(v, -1e4)  # no mass outside the first
    far[0] = 0
    steps = -np.arange(v) * np.log(2.0)  # halves, down to nothing
    close = -np.arange(v) * 1e-7  # neighbouring floats
    ties = np.round(rng.normal(0, 2, v))  # large classes of equal logits
    pairs = -(np.arange(v) // 2) * 0.05
    half = np.where(rng.random(v) < 0.5, -np.inf, rng.normal(0, 2, v))
    huge = rng.normal(0, 80, v)
    rows = [flat, one, far, steps, close, ties, pairs, half, huge, *rng.normal(0, 1, (6, v)), *rng.gumbel(0, 3, (6, v))]
    out = np.stack(rows).astype(np.float32)
    return rng.permuted(out - out.max(-1, keepdims=True), axis=1)


CASES = [
    *(Filters(top_p=p) for p in (1e-6, 0.5, 0.95)),
    *(Filters(top_k=k) for k in (1, 17, 50, 10_000)),
    *(Filters(min_p=p) for p in (0.02, 1.0)),
    Filters(top_p=0.9, top_k=50),
    Filters(top_p=0.97, top_k=400),
    Filters(top_p=0.7, top_k=5, min_p=0.1),
]


@pytest.mark.parametrize("filters", CASES, ids=str)
@pytest.mark.parametrize("v", [7, 500])
def test_filters_keep_what_the_sorted_definition_keeps(filters: Filters, v: int):
    rows = rows_of_all_kinds(v)
    got = np.asarray(jax.jit(_filter, static_argnums=1)(rows, filters))
    for scaled, cut in zip(rows, got, strict=True):
        want = kept_by_sorting(scaled, filters)
        mine = cut > -np.inf
        np.testing.assert_array_equal(cut[mine], scaled[mine])
        if (mine != want).any():  # only where the mass before an id is the bound to float32's digits
            p = np.exp(scaled.astype(np.float64))
            within = np.where(kept_by_sorting(scaled, Filters(top_k=filters.top_k)), p, 0)
            for value in np.unique(p[mine != want]):
                assert within[p > value].sum() == pytest.approx(filters.top_p * within.sum(), rel=1e-6)
        assert mine[scaled == 0].all()


def test_nucleus_of_a_large_vocabulary():
    v = 152_064
    rng = np.random.default_rng(8)
    rows = np.stack([rng.normal(0, 2.5, v), rng.normal(0, 0.5, v), np.round(rng.normal(0, 4, v), 1)])
    rows = (rows - rows.max(-1, keepdims=True)).astype(np.float32)
    for filters in (Filters(top_p=0.9), Filters(top_p=0.95, top_k=1_000)):
        got = np.asarray(jax.jit(_filter, static_argnums=1)(rows, filters)) > -np.inf
        for mine, scaled in zip(got, rows, strict=True):
            assert (mine != kept_by_sorting(scaled, filters)).sum() <= 1  # the id on the border


def test_repetition_penalty_and_every_filter_together():
    """Frequencies and recorded numbers against HF's arithmetic; the policy's own numbers know nothing of it."""
    v, n, t = 70, 20_000, 0.8
    filters = Filters(top_p=0.9, top_k=20, min_p=0.02, repetition_penalty=1.3)
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 2, v).astype(np.float32)
    forbidden = np.zeros(v, bool)
    forbidden[[5, 40]] = True
    context = [*np.argsort(-logits)[[0, 2, 5]].tolist(), *np.argsort(logits)[:3].tolist(), 31, 32, 64, 69, 5, 31]
    seen = no_ids(1, v)
    add_ids(seen[0], np.array(context[:-2]))
    device = with_ids(with_ids(jnp.asarray(seen), jnp.array([context[-2]])), jnp.array([context[-1]]))
    add_ids(seen[0], np.array(context[-2:]))
    np.testing.assert_array_equal(device, seen)  # the host's way and the device's

    out = draw(
        jnp.broadcast_to(logits, (n, v)), jnp.full(n, t), filters, jnp.asarray(forbidden), keys(n),
        jnp.broadcast_to(device, (n, device.shape[1])), 20,
    )  # fmt: skip
    masked = np.where(forbidden, -np.inf, logits.astype(np.float64))
    marked = np.isin(np.arange(v), context)
    bent = np.where(marked, np.where(masked > 0, masked / 1.3, masked * 1.3), masked)
    scaled = (bent - bent.max()) / t
    p = np.where(kept_by_sorting(scaled, filters), np.exp(scaled), 0)
    p /= p.sum()
    ids = np.asarray(out.ids)
    counts = np.bincount(ids, minlength=v)
    inside = p > 0
    assert counts[~inside].sum() == 0 and 5 < inside.sum() < 20
    chi = ((counts[inside] - n * p[inside]) ** 2 / (n * p[inside])).sum()
    assert chi < inside.sum() - 1 + 4 * np.sqrt(2 * (inside.sum() - 1))
    np.testing.assert_allclose(out.logprob, np.log(p[ids]), atol=3e-6)
    policy = softmax(masked)
    np.testing.assert_allclose(out.policy_logprob, np.log(policy[ids]), atol=3e-6)
    best = np.sort(policy)[::-1][:20]
    np.testing.assert_allclose(out.top_entropy, -(best * np.log(best)).sum(), rtol=1e-5)
    assert float(out.top_entropy[0]) < float(out.entropy[0])

    cold = draw(logits[None], jnp.zeros(1), filters, jnp.asarray(forbidden), keys(1), device)
    assert int(cold.ids[0]) == bent.argmax() != masked.argmax()  # greedy choice after the penalty, as in HF
    assert float(cold.logprob[0]) == float(cold.policy_logprob[0]) and cold.top_entropy is None


@pytest.mark.torch
def test_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    v = 50
    logits = np.random.default_rng(10).normal(0, 2, (3, v)).astype(np.float32)
    context = np.random.default_rng(11).integers(0, v, (3, 12))
    want = RepetitionPenaltyLogitsProcessor(1.05)(torch.tensor(context), torch.tensor(logits)).numpy()
    seen = no_ids(3, v)
    for row, ids in zip(seen, context, strict=True):
        add_ids(row, ids)
    np.testing.assert_allclose(jax.jit(_penalised, static_argnums=2)(logits, seen, 1.05), want, rtol=2e-7)


def test_top_entropy_with_fewer_ids_than_asked_for_is_the_entropy():
    logits = jnp.asarray(np.random.default_rng(12).normal(size=(2, 40)), jnp.float32)
    forbidden = jnp.arange(40) >= 15
    out = draw(logits, jnp.ones(2), OFF, forbidden, keys(2), None, 20)
    np.testing.assert_allclose(out.top_entropy, out.entropy, rtol=1e-5)


def test_no_sort_over_the_vocabulary_and_nothing_of_what_is_off():
    def hlo(filters: Filters, top_entropy: int = 0) -> str:
        args = (jnp.zeros((2, 300)), jnp.ones(2), filters, None, keys(2), jnp.zeros((2, 10), jnp.uint32))
        return draw.lower(*args, top_entropy=top_entropy).as_text()

    everything = hlo(Filters(0.9, 40, 0.1, 1.05), 20)
    assert "stablehlo.sort" not in everything and everything.count("chlo.top_k") == 2
    nucleus = hlo(Filters(0.9))
    assert "stablehlo.sort" not in nucleus and nucleus.count("stablehlo.reduce(") > 48
    plain = hlo(OFF)
    assert "stablehlo.sort" not in plain and "top_k" not in plain
    assert plain.count("stablehlo.reduce(") < 15


def test_values_out_of_range():
    for options in ({"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Filters(**options)
    with pytest.raises(ValueError, match="context"):
        sample(jnp.zeros((1, 4)), jnp.ones(1), Filters(repetition_penalty=1.1), None, keys(1))


# -- in the engine ----------------------------------------------------------------------------------------------------


@jax.jit
def _logits(weights: model.Params, ids: jax.Array, positions: jax.Array) -> jax.Array:
    x = model.embed(weights.text, ids)
    hidden = model.forward(weights.text, x, positions, jnp.ones_like(ids), sampler.config())
    return model.logits(weights.text, hidden)[0]


def logits_of(view: View) -> np.ndarray:
    """The trainer's logits [t, v]; row i is of ids[i + 1]."""
    pad = sampler.LENGTH - len(view.ids)
    ids = np.pad(view.ids, (0, pad))[None]
    return np.asarray(_logits(sampler.params(), ids, np.pad(view.positions, ((0, 0), (0, pad)))[:, None]), np.float64)


def test_the_engine_records_what_it_sampled_from_and_neighbours_do_not_matter():
    """All filters, the penalty and both temperatures over two turns with an observation: every number worked out anew
    from the trainer's logits and the ids before."""
    config = SamplingConfig(0.7, 0.0, top_p=0.9, top_k=8, min_p=0.02, repetition_penalty=1.2, top_entropy=3)

    def run(slots: int, chunk: int, others: int) -> tuple[dict, dict]:
        rollout = dataclasses.replace(sampler.ROLLOUT, slots=slots, chunk=chunk)
        eng = Engine(
            sampler.params(), sampler.config(), rollout, config, sampler.tokenizer(), sampler.TAGS,
            sampler.PROCESSOR, prefill_tokens=64,
        )  # fmt: skip
        if others:
            eng.submit(Request(sampler.prompt("somebody else"), n=others, seed=9))
        mine = eng.submit(Request(sampler.prompt("what"), n=6, seed=2))
        segments, views = sampler.play(eng, sampler.prompt("seen"), turns=2)
        return {h.index: segments[h] for h in mine}, {h.index: views[h] for h in mine}

    segments, views = run(5, 4, 0)
    again, _ = run(3, 7, 4)
    forbidden = sampler.tokenizer().forbidden_mask(sampler.config().text.vocab_size)
    bent = greedy = 0
    for index, turns in segments.items():
        ids, logits = views[index].ids, logits_of(views[index])
        for s, other in zip(turns, again[index], strict=True):
            np.testing.assert_array_equal(s.ids, other.ids)
            for k, (token, t) in enumerate(zip(s.ids, s.temperatures, strict=True)):
                row = np.where(forbidden, -np.inf, logits[s.start + k - 1])
                policy = softmax(row)
                assert s.policy_logprobs[k] == pytest.approx(np.log(policy[token]), abs=1e-5)
                best = np.sort(policy)[::-1][:3]
                assert s.top_entropies is not None
                assert s.top_entropies[k] == pytest.approx(-(best * np.log(best)).sum(), abs=1e-5)
                said = np.isin(np.arange(len(row)), ids[: s.start + k])
                row = np.where(said, np.where(row > 0, row / 1.2, row * 1.2), row)
                if t == 0:
                    assert token == row.argmax() and s.logprobs[k] == s.policy_logprobs[k]
                    greedy += 1
                    continue
                scaled = (row - row.max()) / t
                p = np.where(kept_by_sorting(scaled, Filters.of(config)), np.exp(scaled), 0)
                assert s.logprobs[k] == pytest.approx(np.log(p[token] / p.sum()), abs=2e-5)
                bent += 1
    assert bent > 30 and greedy > 5
