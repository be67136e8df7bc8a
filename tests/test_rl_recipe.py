"""The RL recipe: how many records a step draws, and what its metrics say."""

from __future__ import annotations

import dataclasses

import pytest

from pyvision_jax.agents.loop import Collected
from pyvision_jax.config_check import groups_drawn
from pyvision_jax.data.loader import UnusableData
from pyvision_jax.data.media import ImageStore
from pyvision_jax.recipes import rl
from pyvision_jax.rollout.trajectory import ToolCall
from tests import resume_run
from tests.trajectories import toy_trajectory


class Drawn(Exception):
    pass


def run(config, collect, rows, **more):
    """The recipe on tiny parts, with rollouts by `collect` and metrics into `rows`."""
    return rl.run(
        config,
        model_spec=resume_run.SPEC,
        params=resume_run.PARAMS,
        tokenizer=resume_run.TOKENIZER,
        processor=resume_run.PROCESSOR,
        source=resume_run.Source(),
        collect=collect,
        reward=lambda trajectory, record: {"total": 0.0},
        images=ImageStore(),
        metrics_writer=rows,
        **more,
    )


def test_a_step_draws_the_groups_that_the_arithmetic_says(tmp_path):
    """100 x 1.1 is a little above 110 in floats."""
    config = resume_run.config(tmp_path)
    config = dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, prompts=100, oversample=1.1, minibatches=1)
    )

    def collect(params, records, *, seed, version):
        raise Drawn(len(records))

    with pytest.raises(Drawn) as drawn:
        run(config, collect, resume_run.Rows())
    assert drawn.value.args == (110,) == (groups_drawn(config.algorithm),)


def test_tool_calls_of_the_metrics_are_the_successful_ones():
    """As docs/metrics.md and the report's curve say."""
    one, other = toy_trajectory(1.0, tool_images=1), toy_trajectory(0.0)
    one.calls.append(ToolCall("1/0", {"status": "error"}, 0.0))
    other.calls.append(ToolCall("1/0", {"status": "error"}, 0.0))
    metrics = rl._rollout_metrics([[one, other]])
    assert metrics["tool_call_counts/mean"] == 0.5 and metrics["tool_call_counts/max"] == 1
    assert metrics["tool_call_counts/zero_share"] == 0 and metrics["tools/failure_frequency"] == pytest.approx(2 / 3)
    assert metrics["reward/accuracy/mean"] == 0.5


def test_the_rollout_seed_changes_what_is_sampled():
    assert rl._seed(1, 2) == rl._seed(1, 2, 0) != rl._seed(1, 2, 1)


def test_a_run_in_which_no_record_can_be_rolled_out_stops(tmp_path):
    listed, dropped, rows = [], [], resume_run.Rows()

    def collect(params, records, *, seed, version):
        return Collected([[] for _ in records], [(record.id, "the picture is broken") for record in records])

    cfg = dataclasses.replace(resume_run.config(tmp_path), steps=10)
    with pytest.raises(UnusableData, match=r"no record of 3 steps.*the picture is broken"):
        run(
            cfg,
            collect,
            rows,
            on_skip=lambda record, reason: listed.append(record),
            on_drop=lambda step, reasons: dropped.append(step),
        )
    assert len(listed) >= 3 and dropped == [1, 2] and [step for step, _ in rows] == [1, 2]
