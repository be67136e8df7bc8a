"""The rollout engine against the trainer's forward pass, and its promises about seeds, slots, limits and weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from pyvision_jax.config import RolloutConfig, SamplingConfig
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.data.tokenizer import Tokenizer, train_tiny
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec, TextConfig, VisionConfig
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.models.spec import Spec
from pyvision_jax.models.vision_layout import build_vision_batch
from pyvision_jax.ops.logprobs import token_logprobs
from pyvision_jax.rollout.cache import FeaturePool
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Handle, Request, Segment, Stop, View
from pyvision_jax.rollout.tags import Tag

LENGTH = 96  # ids of a trajectory, and of the reference's rows
TAGS = (Tag("code", "</code>", "<code>"), Tag("answer", "</answer>", "<answer>"))


class Narrow(Tokenizer):
    """A policy over a dozen ids, so that random weights open and close tags all the time."""

    words = ("<code>", "</code>", "<answer>", "</answer>", "x", "y", "z", "0", "1", "\n", " ", "(", ")")

    def forbidden_mask(self, rows: int | None = None) -> np.ndarray:
        mask = np.ones(rows or self.vocab_size, bool)
        mask[[*(self.encode(word)[0] for word in self.words), self.im_end]] = False
        return mask


@functools.cache
def tokenizer() -> Narrow:
    tiny = train_tiny(["<code></code><answer></answer>"] * 4, 320)
    assert len(tiny.encode("<code>")) == len(tiny.encode("</answer>")) == 1
    return Narrow(tiny.backend)


@functools.cache
def config() -> ModelSpec:
    tok = tokenizer()
    return ModelSpec(
        family="qwen2_5_vl",
        text=TextConfig(tok.vocab_size + 3, 32, 48, 2, 4, 2, 8, 10_000.0, (2, 1, 1)),
        vision=VisionConfig(2, 32, 48, 2, 3, 4, 2, 2, 16, (1,), 32, 2),
        image_token=tok.image_pad,
        video_token=tok.video_pad,
        vision_start=tok.vision_start,
        vision_end=tok.vision_end,
    )


@functools.cache
def params(seed: int = 0) -> model.Params:
    """Weights large enough for peaked distributions and pictures that matter; by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def one(spec: Spec) -> jax.Array:
        made = rng.normal(0, 0.16, spec.shape) if spec.init == "normal" else np.full(spec.shape, spec.init == "ones")
        return jnp.asarray(made, jnp.float32)

    return jax.tree.map(one, model.specs(config()))


PROCESSOR = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=2_048)
ROLLOUT = RolloutConfig(
    slots=5, max_length=LENGTH, max_turn_length=12, chunk=4, prefill_buckets=(32,), patch_buckets=(96,)
)


def engine(sampling: SamplingConfig = SamplingConfig(), **options) -> Engine:
    return Engine(params(), config(), ROLLOUT, sampling, tokenizer(), TAGS, PROCESSOR, prefill_tokens=64, **options)


def picture(seed: int, width: int = 16, height: int = 16) -> ProcessedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return PROCESSOR.process(Image.fromarray(pixels))


def prompt(text: str, images: Sequence[ProcessedImage] = ()) -> list[int]:
    tok = tokenizer()
    ids = tok.encode("<|im_start|>user\n", allow_special=True)
    for image in images:
        ids += [tok.vision_start, *[tok.image_pad] * PROCESSOR.grid_tokens(image.grid), tok.vision_end]
    return ids + tok.encode(text) + tok.encode("<|im_end|>\n<|im_start|>a\n", allow_special=True)


@jax.jit
def _reference(weights, vision, ids, image_index, positions, segments, temperatures, forbidden):
    features = model.encode_images(weights.vision, vision, config())
    x = model.embed(weights.text, ids, image_index, features)
    hidden = model.forward(weights.text, x, positions, segments, config())[:, :-1]
    head = model.head_matrix(weights.text)
    at_temperature, _ = token_logprobs(hidden, head, ids[:, 1:], temperatures[:, 1:], forbidden)
    policy, entropy = token_logprobs(hidden, head, ids[:, 1:], jnp.ones_like(temperatures[:, 1:]), forbidden)
    best = jnp.argmax(jnp.where(forbidden, -jnp.inf, model.logits(weights.text, hidden)), -1)
    return at_temperature, policy, entropy, best


def reference(
    view: View, temperatures: np.ndarray | None = None, weights: model.Params | None = None
) -> list[np.ndarray]:
    """Trainer's (log-prob at temperature, log-prob, entropy, best id); index i is of ids[i + 1]."""
    tok, t = tokenizer(), len(view.ids)
    grids = [image.grid for image in view.images]
    patches = [PROCESSOR.patches(image) for image in view.images]
    vision, index = build_vision_batch(patches, grids, config().vision, pictures=4, windows=8, slots=16)
    flat = np.concatenate([*index, np.zeros(0, np.int32)])
    ids, image_index, segments = (np.full((1, LENGTH), fill, np.int32) for fill in (0, -1, 0))
    ids[0, :t], segments[0, :t] = view.ids, 1
    image_index[ids == tok.image_pad] = flat
    positions = np.zeros((3, 1, LENGTH), np.int32)
    positions[:, 0, :t] = mrope_positions(view.ids, grids, [], config())[0]
    np.testing.assert_array_equal(positions[:, 0, :t], view.positions)
    heat = np.ones((1, LENGTH), np.float32)
    if temperatures is not None:
        heat[0, :t] = np.where(temperatures > 0, temperatures, 1)
    forbidden = tok.forbidden_mask(config().text.vocab_size)
    out = _reference(weights or params(), vision, ids, image_index, positions, segments, heat, forbidden)
    return [np.asarray(x)[0, : t - 1] for x in out]


def play(eng: Engine, observation: Sequence[int], images: Sequence[ProcessedImage] = (), turns: int = 3):
    """Answer every turn with the same observation until it has had `turns` turns or has no room; (segments, views)."""
    segments: dict[Handle, list[Segment]] = {}
    views: dict[Handle, View] = {}
    for segment in eng.run():
        mine = segments.setdefault(segment.handle, [])
        mine.append(segment)
        if len(mine) < turns and len(observation) <= eng.room(segment.handle):
            eng.extend(segment.handle, observation, images)
        else:
            views[segment.handle] = eng.view(segment.handle)
            eng.release(segment.handle)
    return segments, views


def trace(segments: dict[Handle, list[Segment]]) -> list[list[int]]:
    return [np.concatenate([s.ids for s in segments[h]]).tolist() for h in sorted(segments, key=lambda h: h.id)]


def test_sampler_and_trainer_agree_over_turns_with_pictures():
    """Temperatures 0.6 outside and 0 inside code, groups larger than the free slots, pictures in observations."""
    eng = engine(SamplingConfig(temperature=0.6, code_temperature=0.0))
    first, wide, shown = picture(0), picture(1, 24, 16), picture(2, 32, 40)
    eng.submit(Request(prompt("what?", [first]), [first], group="a", n=4, seed=1))
    eng.submit(Request(prompt("no picture"), group="b", n=3, seed=2))
    eng.submit(Request(prompt("two", [wide, first]), [wide, first], group="c", n=2, seed=3))
    segments, views = play(eng, prompt("seen", [shown]), [shown], turns=2)
    assert len(views) == 9
    checked = greedy = 0
    for handle, turns in segments.items():
        view = views[handle]
        heat = np.ones(len(view.ids), np.float32)
        for s in turns:
            assert view.ids[s.start : s.start + len(s.ids)].tolist() == s.ids.tolist()  # never re-tokenised
            heat[s.start : s.start + len(s.ids)] = s.temperatures
        at_temperature, policy, entropy, best = reference(view, heat)
        for s in turns:
            span = slice(s.start - 1, s.start + len(s.ids) - 1)
            np.testing.assert_allclose(s.logprobs, at_temperature[span], atol=1e-5)  # ratio 1
            np.testing.assert_allclose(s.policy_logprobs, policy[span], atol=1e-5)
            np.testing.assert_allclose(s.entropies, entropy[span], atol=1e-5)
            cold = s.temperatures == 0
            assert (s.ids[cold] == best[span][cold]).all()
            checked, greedy = checked + len(s.ids), greedy + int(cold.sum())
            assert set(s.temperatures) <= {0.0, np.float32(0.6)}
    assert checked > 60 and 10 < greedy < checked
    stops = {s.stop for turns in segments.values() for s in turns}
    assert Stop.TAG in stops
    assert len(eng.programs) <= 6


def test_turns_stop_exactly_and_say_why():
    eng = engine()
    tok = tokenizer()
    eng.submit(Request(prompt("stop"), n=24, seed=5))
    segments, _ = play(eng, (), turns=1)
    seen = set()
    for (s,) in segments.values():
        text = tok.decode(s.ids)
        seen.add((s.stop, s.event))
        if s.stop == Stop.TAG:
            assert text.endswith(f"</{s.event}>") and s.trim == 0
            assert text.count(f"</{s.event}>", text.rindex(f"<{s.event}>")) == 1
        elif s.stop == Stop.END:
            assert s.ids[-1] == tok.im_end and s.event == "im_end"
        else:
            assert s.stop == Stop.TURN_LENGTH and len(s.ids) == 12
        marks = eng.automaton.marks(s.ids.tolist())
        closes = [m for m in marks if m.kind != "open"]
        assert all(m.index == len(s.ids) - 1 for m in closes) and len(closes) == (s.stop != Stop.TURN_LENGTH)
    assert {(Stop.TAG, "code"), (Stop.TAG, "answer"), (Stop.END, "im_end")} <= seen


def test_group_is_distinct_and_reproducible_and_depends_on_nothing_else():
    ids = prompt("sample")
    image = picture(7)

    def alone(seed: int) -> list[list[int]]:
        eng = engine()
        eng.submit(Request(ids, n=8, seed=seed))
        return trace(play(eng, prompt("more", [image]), [image], turns=2)[0])

    first = alone(11)
    assert len({tuple(row) for row in first}) == 8
    assert alone(11) == first
    assert alone(12) != first
    eng = engine()
    eng.submit(Request(prompt("someone else"), n=3, seed=99))
    mine = eng.submit(Request(ids, n=8, seed=11))
    segments, _ = play(eng, prompt("more", [image]), [image], turns=2)
    assert trace({h: segments[h] for h in mine}) == first


def test_greedy_is_the_best_id_of_the_trainer():
    eng = engine(SamplingConfig(temperature=0.0))
    eng.submit(Request(prompt("greedy", [picture(3)]), [picture(3)]))
    segments, views = play(eng, prompt("again"), turns=2)
    ((handle, turns),) = segments.items()
    best = reference(views[handle])[3]
    for s in turns:
        assert s.ids.tolist() == best[s.start - 1 : s.start + len(s.ids) - 1].tolist()


def test_fork_repeats_the_parent_from_any_position():
    eng = engine()
    image = picture(8)
    (parent,) = eng.submit(Request(prompt("fork", [image]), [image], seeds=[123]))
    eng.extend(next(eng.run()).handle, prompt("go on", [image]), [image])
    last = next(eng.run())
    whole = eng.view(parent).ids.tolist()
    inside = last.start + len(last.ids) // 2
    same = eng.fork(parent, inside, seed=123)
    other = eng.fork(parent, inside)
    turn = eng.fork(parent, last.start, seed=123)
    assert other.seed not in (same.seed, eng.fork(parent, inside).seed)
    eng.extend(same)
    got = {s.handle: s for s in eng.run()}
    assert list(got) == [same] and got[same].start == inside
    assert eng.view(same).ids.tolist() == whole
    np.testing.assert_array_equal(eng.view(same).positions, eng.view(parent).positions)
    np.testing.assert_allclose(got[same].logprobs, last.logprobs[inside - last.start :], atol=1e-5)
    assert got[same].states.tolist() == last.states[inside - last.start :].tolist()
    eng.release(parent)  # without its KV the fork is computed from its ids
    eng.extend(turn)
    eng.extend(other)
    assert {s.handle for s in eng.run()} == {turn, other}
    assert eng.view(turn).ids.tolist() == whole
    assert eng.view(other).ids[:inside].tolist() == whole[:inside]
    with pytest.raises(ValueError, match="cannot fork at 3"):
        eng.fork(turn, 3)


def test_new_weights_void_every_cache():
    eng = engine(version=4)
    image = picture(4)
    handles = eng.submit(Request(prompt("update", [image]), [image], n=2, seed=3))
    before = {s.handle: s for s in eng.run()}
    assert all((s.versions == 4).all() for s in before.values())
    eng.update(params(1), 5)
    for handle in handles:
        eng.extend(handle, prompt("next", [image]), [image])
    for s in list(eng.run()):
        assert s.version == 5
        policy = reference(eng.view(s.handle), weights=params(1))[1]
        np.testing.assert_allclose(s.policy_logprobs, policy[s.start - 1 : s.start + len(s.ids) - 1], atol=1e-5)


def test_new_weights_in_the_middle_of_a_turn_are_stamped_on_each_id():
    eng = engine(version=1)
    chunks = []

    def between() -> None:
        chunks.append(len(chunks))
        if len(chunks) == 2:
            eng.update(params(1), 2)

    eng.submit(Request(prompt("swap"), n=5, seed=8))
    mixed = 0
    for s in list(eng.run(between)):
        assert s.versions.tolist() == [1] * min(4, len(s.ids)) + [2] * (len(s.ids) - 4)
        policy = [reference(eng.view(s.handle), weights=params(seed))[1] for seed in (0, 1)]
        want = np.where(s.versions == 1, *(p[s.start - 1 : s.start + len(s.ids) - 1] for p in policy))
        np.testing.assert_allclose(s.policy_logprobs, want, atol=1e-5)
        mixed += len(s.ids) > 4
    assert mixed


def test_swapping_any_picture_changes_the_scores():
    def scores(first: ProcessedImage, second: ProcessedImage) -> list[np.ndarray]:
        eng = engine(SamplingConfig(temperature=0.0))
        eng.submit(Request(prompt("blind", [first]), [first]))
        eng.extend(next(eng.run()).handle, prompt("look", [second]), [second])
        return [next(eng.run()).entropies]

    base = scores(picture(20), picture(21))[0]
    for changed in (scores(picture(22), picture(21))[0], scores(picture(20), picture(22))[0]):
        assert abs(changed[0] - base[0]) > 1e-3


def test_limits_and_refusals():
    eng = engine()
    tok = tokenizer()
    with pytest.raises(ValueError, match="max_length 96"):
        eng.submit(Request(prompt("x" * 90)))
    with pytest.raises(ValueError, match="picture grids"):
        eng.submit(Request(prompt("x", [picture(0)])))
    with pytest.raises(ValueError, match="needs 7 windows of 16"):
        big = picture(0, 128, 24)
        eng.submit(Request(prompt("x", [big]), [big]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        eng.submit(Request([5, 10**6]))
    with pytest.raises(ValueError, match="end with a picture"):
        ids = prompt("x", [picture(0)])
        eng.submit(Request(ids[: ids.index(tok.vision_end)], [picture(0)]))
    with pytest.raises(ValueError, match="can change temperatures; top_p"):
        eng.submit(Request(prompt("x"), sampling=SamplingConfig(top_p=0.5)))
    assert list(eng.run()) == []  # nothing of the refused requests is left

    handles = eng.submit(Request(prompt("long" * 4), n=12, seed=2, max_turn_length=60, max_length=40))
    with pytest.raises(ValueError, match="is running"):
        eng.extend(handles[0], [5])
    segments = {}
    for s in eng.run():
        segments[s.handle] = s
        if s.stop == Stop.LENGTH:
            assert len(eng.view(s.handle).ids) == 40 and eng.room(s.handle) == 0
            with pytest.raises(ValueError, match="no room"):
                eng.extend(s.handle, [5])
        eng.release(s.handle)
    assert len(segments) == 12
    lengths = {len(s.ids) for s in segments.values() if s.stop == Stop.LENGTH}
    assert lengths == {40 - len(prompt("long" * 4))}, "some row must have met the limit"

    forced = prompt("force") + tok.encode("<answer>")
    eng.submit(Request(forced, n=6, seed=1))
    assert all(s.event in ("answer", "im_end", "") for (s,) in play(eng, (), turns=1)[0].values())


def test_request_may_set_its_temperatures_and_prompts_may_exceed_the_largest_bucket():
    eng = engine()
    image = picture(30, 32, 40)
    ids = prompt("a rather long question " * 2, [image])
    assert len(ids) > 70  # three passes of the bucket of 32, the picture cut by their borders
    (hot,) = eng.submit(Request(ids, [image], seed=1))
    (cold,) = eng.submit(Request(ids, [image], seed=1, sampling=SamplingConfig(temperature=0.0)))
    got = {s.handle: s for s in eng.run()}
    for handle in (hot, cold):
        s = got[handle]
        policy, _, best = reference(eng.view(handle))[1:]
        np.testing.assert_allclose(s.policy_logprobs, policy[s.start - 1 : s.start + len(s.ids) - 1], atol=1e-5)
    assert got[cold].ids.tolist() == best[len(ids) - 1 :].tolist()


def test_waiting_rows_keep_slots_and_the_loop_can_be_left():
    eng = engine()
    handles = eng.submit(Request(prompt("wait"), n=7, seed=4))
    seen = [s.handle for s in eng.run()]
    assert len(seen) == 5  # all slots are held by rows that wait for the caller
    assert list(eng.run()) == []
    eng.release(seen[0])
    for s in eng.run():
        assert s.handle in handles and s.handle not in seen
        seen.append(s.handle)
        break
    eng.release(seen[1])
    eng.release(next(h for h in handles if h not in seen))  # while it is queued or running
    assert list(eng.run()) == []
    calls = []
    eng.extend(seen[2])
    assert len(list(eng.run(between=lambda: calls.append(1)))) == 1 and calls


def test_feature_pool_drops_the_oldest_picture_not_needed_now():
    pool = FeaturePool(10)
    a, b = pool.place("a", 4, ()), pool.place("b", 4, ())
    assert set(a.tolist()).isdisjoint(b.tolist())
    assert pool.find("a") is a
    c = pool.place("c", 6, {"a"})
    assert pool.find("b") is None and pool.find("a") is a and set(c.tolist()).isdisjoint(a.tolist())
    with pytest.raises(ValueError, match="does not fit"):
        pool.place("d", 1, {"a", "c"})
