"""The SFT recipe: learns, skips bad records, resumes where it stopped."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pyvision_jax.config import CheckpointConfig, OptimizerConfig, PackingConfig, SFTConfig
from pyvision_jax.data.records import Answer, Record
from pyvision_jax.data.tokenizer import train_tiny
from pyvision_jax.recipes import sft
from tests.tiny import random_params, tiny_spec
from tests.trajectories import PROCESSOR, random_example, random_image

TOKENIZER = train_tiny(["one two"], 280)
SPEC = tiny_spec(
    TOKENIZER.vocab_size,
    layers=1,
    depth=1,
    fullatt_blocks=(0,),
    ids=(TOKENIZER.image_pad, TOKENIZER.video_pad, TOKENIZER.vision_start, TOKENIZER.vision_end),
)
PARAMS = random_params(SPEC, scale=0.05)


class Stopped(Exception):
    pass


def example(record):
    number = int(record.id.removeprefix("id"))
    if number == 3:
        raise OSError("picture is gone")
    made = random_example(SPEC, number % 5, [random_image(number % 5)], prompt=60 if number == 4 else 3)
    return dataclasses.replace(made, loss_weights=0 * made.loss_weights) if number == 7 else made


def run(run_dir, rows, stop_at=0, resume=False):
    def evaluate(params, step):
        if step == stop_at:
            raise Stopped
        return {"eval/step": step}

    class Writer:
        def write(self, step, values, phase=None):
            rows.append((step, dict(values)))

    config = SFTConfig(
        run_dir=str(run_dir),
        steps=6,
        batch_size=4,
        optimizer=OptimizerConfig(lr=2e-2),
        packing=PackingConfig(row_length=64, rows=2),
        checkpoint=CheckpointConfig(every=2),
        log_every=3,
    )
    listed = []
    trained = sft.run(
        config,
        model_spec=SPEC,
        params=PARAMS,
        tokenizer=TOKENIZER,
        processor=PROCESSOR,
        source=[Record(f"id{k}", (), (), Answer(""), "none", "test") for k in range(8)],
        example=example,
        metrics_writer=Writer(),
        evaluate=evaluate,
        on_skip=lambda *row: listed.append(row),
        resume=resume,
    )
    return trained, listed


def test_learns_skips_and_resumes(tmp_path):
    rows: list = []
    whole, listed = run(tmp_path / "whole", rows)
    logged = [(step, values["actor/loss"]) for step, values in rows if "actor/loss" in values]
    assert [step for step, _ in logged] == [3, 6]
    assert logged[1][1] < logged[0][1] < 6
    assert [step for step, values in rows if "eval/step" in values] == [2, 4, 6]
    assert sorted(listed) == [
        ("id3", "OSError: picture is gone"),
        ("id4", "TooLong: example4: 76 ids do not fit row_length=64"),
        ("id7", "ValueError: id7: nothing to learn: a task, or all its assistant text has weight 0"),
    ]
    assert [index for index, _ in whole.skipped] == [3, 4, 7]
    assert whole.metrics["data/skipped"] == 3
    jax.tree.map(np.asarray, PARAMS)  # the caller's parameters are still there

    with pytest.raises(Stopped):
        run(tmp_path / "parts", [], stop_at=4)
    resumed, _ = run(tmp_path / "parts", rows, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.skipped == whole.skipped
