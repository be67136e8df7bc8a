"""The demo recipe at toy size: every stage and control once, twice into the same folder, and what it leaves."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from pyvision_jax.cli import _preset
from pyvision_jax.config import DemoConfig
from pyvision_jax.config_load import ConfigError, load
from pyvision_jax.evaluation.metrics import paired_difference
from pyvision_jax.recipes import demo, results
from pyvision_jax.report import reader

SMALL = [
    "eval_tasks=8", "sft.steps=2", "sft.batch_size=4", "sft.log_every=1", "sft.optimizer.warmup_steps=1",
    "sft.packing.rows=4", "sft.packing.images=12", "rl.steps=1", "rl.algorithm.prompts=2", "rl.algorithm.group_size=2",
    "rl.algorithm.minibatches=1", "rl.optimizer.warmup_steps=1", "rl.packing.rows=4", "rl.packing.images=12",
    "rl.rollout.slots=8", "rl.selection.zero_variance=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One demo into a folder that already holds the files of an earlier one."""
    root = tmp_path_factory.mktemp("demo")
    config = load(DemoConfig, _preset("demo.yaml"), [*SMALL, f"run_dir={root / 'run'}", "seed=3"])
    earlier = root / "run" / "sft" / "checkpoints" / "2"
    earlier.mkdir(parents=True)
    (root / "run" / "run.json").write_text('{"starts": []}')
    said: list[str] = []
    summary = demo.run(config, say=said.append)
    return root / "run", summary, said


def test_the_summary_holds_what_it_must(run):
    root, _, _ = run
    stored = json.loads((root / "summary.json").read_text())
    assert set(stored["accuracy"]) == {"untrained", "sft", "rl", "tool_off", "direct", "wrong_image"}
    for row in stored["accuracy"].values():
        assert set(row) == {"mean", "low", "high", "n", "greedy"} and row["n"] == 8
        assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1
    assert set(stored["tool_calls"]) == {"sft", "rl"} and stored["seed"] == 3
    assert {"warmup", "sft", "rl", "direct", "evaluation", "total"} <= set(stored["seconds"])
    assert stored["photographs"]["rl"]["seen"]["n"] == stored["photographs"]["rl"]["unseen"]["n"] == 4
    assert stored["gain"]["mean"] == pytest.approx(stored["accuracy"]["rl"]["mean"] - stored["accuracy"]["sft"]["mean"])


def test_the_run_folder_tells_all(run):
    root, _, said = run
    for name in (
        "config.yaml",
        "versions.json",
        "sandbox.json",
        "metrics.csv",
        "drops.jsonl",
        "report.html",
        "model/config.json",
    ):
        assert (root / name).is_file(), name
    assert any((root / "tensorboard").rglob("events*")) and any((root / "rl" / "checkpoints").iterdir())
    phases = {path.name for path in (root / "trajectories").iterdir()}
    assert phases == {"rl", *(f"eval_{name}" for name in demo.ROWS)}
    members = reader.read_trajectories(root / "trajectories" / "rl" / "step_0001.jsonl")
    assert len(members) == 6 and all((root / "images" / f"{name}.png").is_file() for m in members for name in m.images)
    assert any("192" not in line and "trajectories" in line for line in said), "the batch arithmetic is printed"


def test_the_wrong_picture_is_wrong_for_every_task(run):
    root, _, _ = run
    shown = {}
    for phase in ("eval_rl", "eval_wrong_image"):
        members = reader.read_trajectories(root / "trajectories" / phase / "step_0001.jsonl")
        shown[phase] = {member.record_id: member.images[0] for member in members}
    assert shown["eval_rl"].keys() == shown["eval_wrong_image"].keys()
    assert all(shown["eval_rl"][task] != picture for task, picture in shown["eval_wrong_image"].items())


def test_a_seed_is_recorded_beside_the_others(run, tmp_path):
    _, summary, _ = run
    path = tmp_path / "demo.json"
    for seed in (0, 1):
        demo.record({**summary, "seed": seed}, path)
    names = [row.name for row in results.read(path).rows]
    assert {"gain seed 0", "gain seed 1", "rl seed 0", "direct seed 1"} <= set(names) and len(names) == len(set(names))
    demo.print_table(summary)


def test_gain_is_paired():
    before, after = np.array([0.0, 1, 0, 0] * 16), np.array([1.0, 1, 0, 1] * 16)
    change = demo.gain(after, before)
    assert change == paired_difference(after, before) and change.mean == 0.5 and change.low > 0.3


def test_a_wrong_configuration_stops_before_any_work(tmp_path):
    config = load(DemoConfig, _preset("demo.yaml"), [f"run_dir={tmp_path / 'run'}", "rl.packing.row_length=64"])
    with pytest.raises(ConfigError, match="row_length"):
        demo.run(config)
    assert not (tmp_path / "run").exists()
    stages = demo.stages(dataclasses.replace(config, rl=load(DemoConfig, _preset("demo.yaml")).rl, seed=2))
    assert stages[0].data.options["start"] == stages[2].data.options["start"] == 20_000_000
