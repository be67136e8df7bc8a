"""The repetition stop: its definition in numpy, the same rule on the device, and what the engine makes of it."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine as sampler

from pyvision_jax.agents.pyvision import PyVisionImage
from pyvision_jax.config import ImageConfig, ProtocolConfig, RepetitionConfig, RolloutConfig, SamplingConfig
from pyvision_jax.recipes.collect import Collector
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.repetition import Repetition, Watch, catch_up, hear, repeated_share
from pyvision_jax.rollout.requests import Request, Segment, Stop
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.worlds import needle, tiny, warmup
from pyvision_sandbox import SandboxPool

# -- the definition ---------------------------------------------------------------------------------------------------


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


def thyme_released(s: str, threshold: float, tail: int, minimum: int) -> bool:
    """`has_repeated_content` of the released trainer (yfzhang114/Thyme) with its three constants as arguments."""
    s = s[-tail:]
    n = len(s)
    if n < minimum:
        return False
    for length in range(n // 3, 0, -1):
        if 2 * length / n <= threshold:
            break
        counts: dict[str, int] = {}
        for i in range(n - length + 1):
            counts[s[i : i + length]] = counts.get(s[i : i + length], 0) + 1
        if any(count > 1 and count * length / n > threshold for count in counts.values()):
            return True
    return False


def test_any_length_is_the_released_rule_of_thyme():
    rng = np.random.default_rng(6)
    seen = set()
    for _ in range(400):
        tail, minimum, share = int(rng.integers(12, 60)), int(rng.integers(1, 12)), float(rng.choice([0.1, 0.3, 0.5]))
        text = "".join(rng.choice(list("abc")[: rng.integers(1, 4)], rng.integers(1, 90)))
        if rng.random() < 0.5:
            text += text[: rng.integers(0, 20)] * 2
        rule = Repetition(length=0, share=share, tail=tail, minimum=minimum)
        want = thyme_released(text, share, tail, minimum)
        assert rule.found(text.encode()) == want, (text, rule)
        seen.add(want)
    assert seen == {True, False}


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
    for options, words in [({"share": 0}, "share"), ({"length": 0, "share": 0.7}, "third"), ({"tail": 40}, "room")]:
        with pytest.raises(ValueError, match=words):
            Repetition(**options)


def test_what_is_needed_is_what_found_compares():
    for length in (1, 3, 7, 32):
        for share in (0.1, 0.3, 0.5, 0.7, 1 / 3):
            needed = Repetition(length, share, tail=0).needed(300)
            for n in range(1, 301):
                assert needed[n] == next(c for c in range(2, 400) if c * length / n > share)


# -- the device -------------------------------------------------------------------------------------------------------

LIMIT = 160
RULES = [
    Repetition(length=1, share=0.3, tail=0, minimum=6),
    Repetition(length=3, share=0.5, tail=0, minimum=1),  # Thyme's paper
    Repetition(length=4, share=0.5, tail=24, minimum=10),
    Repetition(length=4, share=0.45, tail=24, minimum=60),  # older windows meet it before its minimum
    Repetition(length=2, share=0.6, tail=37, minimum=37),
    Repetition(length=5, share=0.1, tail=40, minimum=12),  # two copies will do
    Repetition(length=6, share=0.5, tail=LIMIT, minimum=12),
    Repetition(length=6, share=0.5, tail=10 * LIMIT, minimum=12),
    Repetition(length=0, share=0.3, tail=50, minimum=5),  # Thyme's released rule
    Repetition(length=0, share=0.3, tail=20, minimum=45),
    Repetition(length=0, share=0.4, tail=0, minimum=1),
]


def streams(count: int, n: int) -> np.ndarray:
    """Random ids over small alphabets, loops of every period, copies with faults, and the words that hashes fear."""
    rng = np.random.default_rng(count)
    thue = np.array([bin(i).count("1") % 2 for i in range(n)])
    fibonacci = [0]
    other = [0, 1]
    while len(other) < n:
        fibonacci, other = other, other + fibonacci
    out = [thue, np.array(other[:n]), np.zeros(n, int), np.arange(n)]
    while len(out) < count:
        kind = rng.integers(5)
        noise = rng.integers(0, 50, n)
        if kind == 0:
            row = rng.integers(0, rng.integers(2, 5), n)
        elif kind == 1:  # a loop after a while
            row = np.concatenate([noise[: rng.integers(0, n // 2)], np.tile(noise[: rng.integers(1, 30)], n)])
        elif kind == 2:  # the same piece at random distances, which overlap and do not
            row, piece = noise.copy(), noise[: rng.integers(2, 12)]
            for start in rng.integers(0, n - 12, rng.integers(2, 14)):
                row[start : start + len(piece)] = piece
        elif kind == 3:  # a loop with faults
            row = np.tile(noise[: rng.integers(2, 20)], n)[:n]
            row[rng.integers(0, n, rng.integers(0, 12))] = 99
        else:  # repeats, then no more: what leaves the tail is forgotten
            row = np.concatenate([np.tile(noise[: rng.integers(1, 8)], 9)[: n // 3], np.arange(100, 100 + n)])
        out.append(row[:n])
    return np.stack(out).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("rule",))
def listen(watch: Watch, ids: jax.Array, rule: Repetition) -> tuple[Watch, jax.Array]:
    """(the watch after all ids, whether each id met the rule) of ids [b, t]."""

    def step(watch: Watch, column: jax.Array) -> tuple[Watch, jax.Array]:
        return hear(watch, rule, column, jnp.ones(column.shape, bool))

    return jax.lax.scan(step, watch, ids.T)


def first(found: np.ndarray) -> int:
    """Ids up to the first True."""
    return int(found.argmax()) + 1 if found.any() else len(found) + 1


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_device_stops_where_the_definition_does(rule: Repetition):
    """At every step of every stream up to the stop; and a watch rebuilt from the ids goes on as if it had heard all."""
    ids = streams(48, LIMIT)
    empty = Watch.empty(rule, len(ids), LIMIT)
    _, found = listen(empty, ids, rule)
    ends = []
    for row, mine in zip(ids, np.asarray(found).T, strict=True):
        end = first(mine)
        definition = [rule.found(row[:n]) for n in range(1, min(end, LIMIT) + 1)]
        assert first(np.array(definition)) == end, row
        ends.append(end)
    assert len(set(ends)) > 2

    ends, begin, split = np.array(ends), np.zeros(len(ids), np.int32), 70
    fresh = np.arange(len(ids)) % 3 > 0  # the others have heard something else, and keep that
    width = empty.past.shape[1]
    held = ids[:, max(0, split - width) : split]
    begin[:] = split - held.shape[1]
    padded = np.pad(held, ((0, 0), (0, 5)), constant_values=3)
    others, _ = listen(empty, ids[:, ::-1][:, :split], rule)
    rebuilt = catch_up(others, fresh, begin, padded, np.full(len(ids), held.shape[1], np.int32), rule=rule)
    _, again = listen(rebuilt, ids[:, split:], rule)
    for row in np.flatnonzero(fresh & (ends > split)):
        assert first(np.asarray(again)[:, row]) + split == ends[row] or (ends[row] > LIMIT and not again[:, row].any())
    _, kept = listen(listen(empty, ids[:, ::-1][:, :split], rule)[0], ids[:, split:], rule)
    np.testing.assert_array_equal(np.asarray(again)[:, ~fresh], np.asarray(kept)[:, ~fresh])


def test_rows_that_do_not_go_on_keep_what_they_heard():
    rule = Repetition(length=2, share=0.5, tail=12, minimum=4)
    ids = streams(6, 30)
    watch, _ = listen(Watch.empty(rule, 6, 40), ids, rule)
    going = jnp.array([True, False] * 3)
    after, found = hear(watch, rule, jnp.full(6, 7), going)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(watch), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[1::2], np.asarray(old)[1::2])
    assert not np.asarray(found)[1::2].any() and (np.asarray(after.count)[::2] == 31).all()


# -- the engine -------------------------------------------------------------------------------------------------------

LOOPS = RepetitionConfig("fixed_length", length=2, share=0.5, tail=10, minimum=6)
ANY = RepetitionConfig("any_length", share=0.3, tail=12, minimum=8)


def engine(config: RepetitionConfig, chunk: int = 4, slots: int = 5, **sampling: float) -> Engine:
    rollout = dataclasses.replace(sampler.ROLLOUT, repetition=config, chunk=chunk, slots=slots, max_turn_length=40)
    return Engine(
        sampler.params(), sampler.config(), rollout, SamplingConfig(**{"temperature": 0.5, **sampling}),
        sampler.tokenizer(), sampler.TAGS, sampler.PROCESSOR, prefill_tokens=64,
    )  # fmt: skip


def check(rule: Repetition, ids: list[int], stop: Stop) -> None:
    """A turn ends at the first id that meets the rule, unless a tag or a limit ends it there."""
    assert not any(rule.found(ids[:n]) for n in range(1, len(ids)))
    if stop is Stop.REPETITION:
        assert rule.found(ids)
    else:
        assert stop in (Stop.TAG, Stop.END) or not rule.found(ids)


@pytest.mark.parametrize("config", [LOOPS, ANY], ids=str)
def test_a_turn_stops_at_the_token_that_repeats_whatever_the_chunk(config: RepetitionConfig):
    rule = Repetition.of(config)
    assert rule is not None
    traces = []
    for chunk, slots in ((4, 5), (7, 3)):
        eng = engine(config, chunk, slots)
        eng.submit(Request(sampler.prompt("loop"), n=12, seed=6))
        segments, _ = sampler.play(eng, sampler.prompt("go on"), turns=2)
        for s in (s for turns in segments.values() for s in turns):
            check(rule, s.ids.tolist(), s.stop)
        stops = [s.stop for turns in segments.values() for s in turns]
        assert stops.count(Stop.REPETITION) > 3 and len(set(stops)) > 1
        assert {len(s.ids) % chunk for turns in segments.values() for s in turns if s.stop is Stop.REPETITION} != {0}
        traces.append(sampler.trace(segments))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("config", [LOOPS, dataclasses.replace(ANY, tail=0)], ids=str)
def test_a_fork_inside_a_turn_stops_where_its_parent_did(config: RepetitionConfig):
    """From any position, also as the fork of a fork; sampling goes on under a repetition penalty, whose mask is rebuilt
    with it."""
    eng = engine(config, slots=10, repetition_penalty=0.8)  # below 1: what was said is said again
    eng.submit(Request(sampler.prompt("fork"), n=10, seed=3))
    turns = list(eng.run())
    last = max((s for s in turns if s.stop is Stop.REPETITION), key=lambda s: len(s.ids))
    assert len(last.ids) > 8
    parent, seed = last.handle, last.handle.seed
    for s in turns:
        if s.handle != parent:
            eng.release(s.handle)
    whole = eng.view(parent).ids.tolist()

    def goes_on(handle, at: int) -> Segment:
        eng.extend(handle)
        (got,) = (s for s in eng.run() if s.handle == handle)
        assert eng.view(handle).ids.tolist() == whole and got.start == at and got.stop is Stop.REPETITION
        np.testing.assert_allclose(got.logprobs, last.logprobs[at - last.start :], atol=1e-5)
        return got

    for at in range(last.start, last.start + len(last.ids), 3):
        child = eng.fork(parent, at, seed=seed)
        early = eng.fork(child, seed=seed)  # before the child goes on
        goes_on(child, at)
        grandchild = eng.fork(child, at + 1, seed=seed) if at + 1 < len(whole) else early
        eng.release(child)
        goes_on(early, at)
        if grandchild is not early:
            goes_on(grandchild, at + 1)
            eng.release(grandchild)
        eng.release(early)
    # gone on with after its end, the same ids count as another turn's
    after = eng.fork(parent, seed=seed)
    eng.extend(after)
    (got,) = (s for s in eng.run() if s.handle == after)
    rule = Repetition.of(config)
    assert rule is not None
    check(rule, got.ids.tolist(), got.stop)


def test_the_key_of_a_recipe_ends_trajectories():
    """`rollout.repetition` through the collector that RL uses: the trajectory ends where its turn met the rule."""
    stop = RepetitionConfig("fixed_length", length=1, share=0.05, tail=0, minimum=6)
    rollout = RolloutConfig(
        slots=4,
        max_length=400,
        max_turn_length=40,
        chunk=8,
        prefill_buckets=(64,),
        patch_buckets=(36,),
        repetition=stop,
    )
    tokens, protocol = tiny.tokenizer(), ProtocolConfig(template="brief", max_calls=1)
    spec, processor = tiny.model_spec(tokens), tiny.processor()
    collector = Collector(
        model_spec=spec,
        tokenizer=tokens,
        processor=processor,
        protocol=PyVisionImage(
            protocol, ImageConfig(tiny.MIN_PIXELS, tiny.MAX_PIXELS, 9.0), tokens, processor, spec, needle.GENERATORS
        ),
        protocol_config=protocol,
        rollout=rollout,
        sampling=SamplingConfig(temperature=0.3, repetition_penalty=0.5),
        pool=cast(SandboxPool, types.SimpleNamespace(max_sessions=1)),  # no code is run
        group_size=4,
    )
    params = jax.jit(lambda key: warmup.fresh(spec, key))(jax.random.key(0))
    try:
        (group,) = collector(params, [needle.task("eval", 0)], seed=1, version=0).groups
        (greedy,) = collector.evaluate(params, [needle.task("eval", 0)], seed=1, temperature=0.0).groups
    finally:
        collector.close()
    rule = Repetition.of(stop)
    assert rule is not None
    for trajectory in (*group, *greedy):
        assert trajectory.end_reason is EndReason.REPETITION
        span = trajectory.spans[-1]
        check(rule, trajectory.ids[span.start : span.end].tolist(), Stop.REPETITION)


def test_programs_are_few_and_the_stop_costs_none_when_off():
    eng = engine(LOOPS)
    handles = eng.submit(Request(sampler.prompt("x"), n=3, seed=1))
    for _ in list(eng.run()):
        pass
    eng.fork(handles[0])
    assert {name for name in eng.programs if name[0] == "catch_up"} == {("catch_up", (5, 1))}
    off = engine(RepetitionConfig())
    off.submit(Request(sampler.prompt("x"), seed=1))
    list(off.run())
    assert not any(name[0] == "catch_up" for name in off.programs)
