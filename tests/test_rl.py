"""The RL recipe where the data are at fault, without compiling anything."""

from __future__ import annotations

import dataclasses

import pytest
import resume_run as tiny_run

from pyvision_jax.agents.loop import Collected
from pyvision_jax.data.loader import UnusableData
from pyvision_jax.data.media import ImageStore
from pyvision_jax.recipes import rl


def test_a_run_in_which_no_record_can_be_rolled_out_stops(tmp_path):
    listed, dropped, rows = [], [], tiny_run.Rows()

    def collect(params, records, *, seed, version):
        return Collected([[] for _ in records], [(record.id, "the picture is broken") for record in records])

    cfg = dataclasses.replace(tiny_run.config(tmp_path), steps=10)
    with pytest.raises(UnusableData, match=r"no record of 3 steps.*the picture is broken"):
        rl.run(
            cfg,
            model_spec=tiny_run.SPEC,
            params=tiny_run.PARAMS,
            tokenizer=tiny_run.TOKENIZER,
            processor=tiny_run.PROCESSOR,
            source=tiny_run.Source(),
            collect=collect,
            reward=lambda trajectory, record: {"total": 0.0},
            images=ImageStore(),
            metrics_writer=rows,
            on_skip=lambda record, reason: listed.append(record),
            on_drop=lambda step, reasons: dropped.append(step),
        )
    assert len(listed) >= 3 and dropped == [1, 2] and [step for step, _ in rows] == [1, 2]
