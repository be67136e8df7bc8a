"""Rows, shifts, shared pictures, and the sizes that programs are compiled for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pyvision_jax.config import PackingConfig
from pyvision_jax.data.packing import Packer, TooLong, split, trajectory_example
from tests.tiny import tiny_spec
from tests.trajectories import PROCESSOR, random_example, random_image, toy_trajectory

SPEC = tiny_spec()


def packer(row_length=64, rows=2, images=0, **options) -> Packer:
    return Packer(SPEC, PROCESSOR, PackingConfig(row_length, rows, images), **options)


def rows_of(batch):
    """(row, slice) of every segment."""
    for row in range(batch.segments.shape[0]):
        for segment in range(1, batch.segments[row].max() + 1):
            at = np.flatnonzero(batch.segments[row] == segment)
            yield row, slice(int(at[0]), int(at[-1]) + 1)


def test_every_value_moves_to_the_position_that_predicts_it():
    examples = [random_example(SPEC, seed, [random_image(seed)] if seed % 2 else []) for seed in range(9)]
    packed = packer().pack(examples)
    assert len(packed.batches) == 2
    found = 0
    for batch in packed.batches:
        assert batch.ids.shape == (2, 64)
        for row, at in rows_of(batch):
            ids = batch.ids[row, at]
            example = next(e for e in examples if np.array_equal(e.ids, ids))
            found += 1
            np.testing.assert_array_equal(batch.positions[:, row, at], example.positions)
            np.testing.assert_array_equal(batch.targets[row, at], [*example.ids[1:], 0])
            for name in ("loss_weights", "old_logprobs", "ref_logprobs", "advantages"):
                values = vars(batch)[name][row, at]
                np.testing.assert_array_equal(values, [*vars(example)[name][1:], 0])
            np.testing.assert_array_equal(batch.temperatures[row, at], [*example.temperatures[1:], 1])
        padding = batch.segments == 0
        assert not batch.loss_weights[padding].any()
        assert (batch.temperatures[padding] == 1).all()
        assert (batch.image_index[padding] == -1).all()
    assert found == len(examples)
    assert packed.fill == pytest.approx(sum(len(e.ids) for e in examples) / (2 * 2 * 64))


def test_siblings_share_one_encoding_and_each_token_finds_its_own_patch():
    """U05: pixels are addressed by picture, whatever the other pictures of the batch are."""
    shared, wide, own = random_image(1), random_image(2, (28, 112)), random_image(3, (56, 28))
    examples = [random_example(SPEC, 0, [shared, wide]), random_example(SPEC, 1, [shared]), random_example(SPEC, 2)]
    examples.append(random_example(SPEC, 3, [own, shared]))
    batch = packer(rows=3).pack(examples).batches[0]
    assert batch.vision.valid.any(axis=(1, 2)).sum() == 3  # distinct pictures, in four slots
    assert batch.vision.valid.shape[0] == 4
    slots = batch.vision.patches.reshape(-1, 4, batch.vision.patches.shape[-1])  # one merged token each
    for row, at in rows_of(batch):
        ids, index = batch.ids[row, at], batch.image_index[row, at]
        example = next(e for e in examples if np.array_equal(e.ids, ids))
        assert ((index >= 0) == (ids == SPEC.image_token)).all()
        if example.images:
            wanted = np.concatenate([PROCESSOR.patches(image) for image in example.images])
            np.testing.assert_array_equal(slots[index[index >= 0]].reshape(wanted.shape), wanted)


def test_too_long_is_never_cut():
    """U01: rejected with both numbers, or counted."""
    long = random_example(SPEC, 7, [random_image(i) for i in range(4)], prompt=40)
    with pytest.raises(TooLong, match=rf"example7: {len(long.ids)} ids do not fit row_length=64"):
        packer().pack([long])
    packed = packer().pack([random_example(SPEC, 1), long], too_long="skip")
    assert packed.skipped == [("example7", f"{len(long.ids)} ids do not fit row_length=64")]
    assert len(packed.batches) == 1


def test_picture_slots_are_a_limit_or_grow_and_are_state():
    examples = [random_example(SPEC, seed, [random_image(seed)]) for seed in range(8)]
    capped = packer(row_length=128, rows=1, images=2).pack(examples)
    assert [batch.vision.valid.shape[0] for batch in capped.batches] == [2, 2, 2, 2]
    with pytest.raises(ValueError, match=r"3 pictures do not fit packing\.images=2"):
        packer(row_length=128, images=2).pack([random_example(SPEC, 0, [random_image(i) for i in range(3)])])

    crowded = random_example(SPEC, 0, [random_image(i) for i in range(3)])
    with pytest.raises(TooLong):  # a loader asks before it packs, and skips the record
        packer(row_length=128, images=2).check(crowded)
    packed = packer(row_length=128, images=2).pack([crowded, examples[0]], too_long="skip")
    assert packed.skipped == [("example0", "3 pictures do not fit packing.images=2 of a micro-batch")]

    growing = packer(row_length=128)
    assert growing.pack([random_example(SPEC, 0)]).batches[0].vision is None
    assert growing.pack(examples[:5]).batches[0].vision.valid.shape[0] == 8
    assert growing.pack(examples[:1]).batches[0].vision.valid.shape[0] == 8  # never shrinks
    text = growing.pack([random_example(SPEC, 0)]).batches[0]
    assert text.vision.valid.shape[0] == 8  # one program for text and pictures
    assert not text.vision.valid.any()
    again = packer(row_length=128)
    again.restore(growing.state())
    assert again.pack(examples[:1]).batches[0].vision.valid.shape == text.vision.valid.shape


def test_malformed_examples_are_refused():
    broken = random_example(SPEC, 0, [random_image(0)])
    broken.images = []
    with pytest.raises(ValueError, match="4 picture placeholders but its pictures make 0"):
        packer().pack([broken])
    forbidden = np.zeros(96, bool)
    example = random_example(SPEC, 0)
    forbidden[example.ids[-1]] = True
    with pytest.raises(ValueError, match="may never be sampled"):
        packer(forbidden=forbidden).pack([example])
    with pytest.raises(ValueError, match="multiples of the 4 devices"):
        packer(rows=6, multiple=4)


def test_trajectory_rules_for_temperature():
    """U30: temperature 1.3 against `logprobs`; greedy, or cut by top-p, at temperature 1 against `policy_logprobs`."""
    options = {"advantage": 2.0, "weight": 0.25, "images": [], "image_token": SPEC.image_token}
    warm = trajectory_example(toy_trajectory(temperature=1.3), **options)
    np.testing.assert_allclose(warm.temperatures, [1, 1, 1, 1.3, 1.3, 1.3, 1.3])
    np.testing.assert_allclose(warm.old_logprobs, [0, 0, 0, -1, -1, -1, -1])
    np.testing.assert_allclose(warm.advantages, [0, 0, 0, 2, 2, 2, 2])
    np.testing.assert_allclose(warm.loss_weights, [0, 0, 0, 0.25, 0.25, 0.25, 0.25])
    for greedy in (
        trajectory_example(toy_trajectory(temperature=0.0), **options),
        trajectory_example(toy_trajectory(temperature=1.3), filtered=True, **options),
    ):
        np.testing.assert_allclose(greedy.temperatures, np.ones(7))
        np.testing.assert_allclose(greedy.old_logprobs, [0, 0, 0, -1.5, -1.5, -1.5, -1.5])


def test_split_keeps_order_and_leaves_out_empty_parts():
    assert split(list("abcde"), 2) == [["a", "b"], ["c", "d", "e"]]
    assert split(["a"], 4) == [["a"]]
    assert split([], 2) == []


def test_host_time_of_a_demo_step():
    """64 traces of about 90 ids with two pictures of 36 patches: 40 ms on one core; twice that is a regression."""
    examples = [
        random_example(SPEC, seed, [random_image(2 * seed + i, (84, 84)) for i in range(2)], prompt=40, learned=20)
        for seed in range(64)
    ]
    subject = Packer(SPEC, PROCESSOR, PackingConfig(512, 13))
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        packed = subject.pack(examples)
        seconds.append(time.thread_time() - start)
    assert len(packed.batches) == 1
    assert min(seconds) < 0.1, seconds
