"""The run directory: exact trajectories, metrics that survive a resume, and values that no JSON holds (U54)."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from PIL import Image
from run_fixture import decode, picture, step_of_trajectories, trajectory

from pyvision_jax.config import RLConfig
from pyvision_jax.recipes.metrics import MetricsWriter, Progress, clock
from pyvision_jax.recipes.plain import plain
from pyvision_jax.recipes.run_dir import RunDir, TrajectoryWriter, read_trajectories
from pyvision_jax.report import reader
from pyvision_jax.rollout.trajectory import EndReason, Trajectory


def same(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        left, right = vars(a)[field.name], vars(b)[field.name]
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype and left.shape == right.shape, field.name
            assert left.tobytes() == right.tobytes(), field.name  # NaN payloads and -0.0 too
        else:
            assert left == right, field.name


# ---------------------------------------------------------------- trajectories


def test_round_trip_is_exact(tmp_path: Path):
    rng = np.random.default_rng(1)
    made = step_of_trajectories(rng, 3)
    made[0].logprobs[:3] = (np.nan, -np.inf, -0.0)
    made[1].entropies = None
    made[2].top_entropies = made[2].logprobs / -2
    made[2].end_reason, made[2].answer = None, "half \ud800 a pair"
    made[3].parent = ("3-0-0", 17)
    made[4].calls, made[4].spans = [], []
    with TrajectoryWriter(tmp_path, decode, picture) as writer:
        writer.write("rl", 3, made, advantages={"3-0-1": 0.25}, dropped={"3-0-2": "zero_variance"})
    path = tmp_path / "trajectories" / "rl" / "step_0003.jsonl"
    back = read_trajectories(path)
    assert len(back) == len(made)
    for a, b in zip(made, back, strict=True):
        same(a, b)
    assert isinstance(back[0].end_reason, EndReason)
    stored = reader.read_trajectories(path)
    assert stored[1].advantage == 0.25 and stored[0].advantage is None and stored[2].dropped == "zero_variance"
    text = stored[0].spans[0]["text"]
    assert text.count("<|image_pad|>") == 1 and "<|image_pad|>*9" in text
    for line in path.read_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no bare NaN


def test_pictures_are_stored_once_per_hash(tmp_path: Path):
    rng = np.random.default_rng(2)
    asked: list[str] = []

    def fetch(digest: str) -> np.ndarray:
        asked.append(digest)
        if len(asked) == 2:
            raise KeyError(digest)
        return picture(digest)

    made = step_of_trajectories(rng, 0)
    hashes = {digest for item in made for digest in item.images}
    with TrajectoryWriter(tmp_path, decode, fetch) as writer:
        writer.write("rl", 0, made)
        writer.write("rl", 1, made)
    assert sorted(asked) == sorted(hashes)
    stored = {path.stem for path in (tmp_path / "images").iterdir()}
    assert stored == hashes - {asked[1]}
    assert np.array_equal(np.asarray(Image.open(tmp_path / "images" / f"{asked[0]}.png")), picture(asked[0]))
    with TrajectoryWriter(tmp_path, decode, fetch) as writer:  # a resumed run finds them there
        count = len(asked)
        writer.write("rl", 2, made)
    assert len(asked) == count + 1  # only the one that was lost


def test_index_rows_equal_those_of_a_scan(tmp_path: Path):
    rng = np.random.default_rng(3)
    with TrajectoryWriter(tmp_path, decode) as writer:
        for step in range(3):
            writer.write("rl", step, step_of_trajectories(rng, step))
    folder = tmp_path / "trajectories" / "rl"
    rows, broken = reader.read_index(folder)
    assert broken == 0 and len(rows) == 36
    assert reader.load(rows[-1]).id == rows[-1]["id"] == "2-2-3"
    row = rows[0]
    whole = read_trajectories(row["path"])[0]
    assert row["tokens"] == whole.policy_mask.sum() and row["calls_ok"] == whole.tool_calls
    assert row["entropy"] == pytest.approx(whole.entropies[whole.policy_mask].mean())
    for path in folder.glob("*.idx"):
        path.unlink()
    assert reader.read_index(folder)[0] == rows


def test_rewind_drops_the_steps_to_come(tmp_path: Path):
    rng = np.random.default_rng(4)
    writer = TrajectoryWriter(tmp_path, decode)
    for step in range(4):
        writer.write("rl", step, step_of_trajectories(rng, step, groups=1))
    writer.rewind("rl", 2)
    assert [path.name for path in reader.step_files(tmp_path / "trajectories" / "rl")] == [
        "step_0000.jsonl",
        "step_0001.jsonl",
    ]
    again = step_of_trajectories(rng, 1, groups=1)
    writer.write("rl", 1, again)
    writer.close()
    same(read_trajectories(tmp_path / "trajectories" / "rl" / "step_0001.jsonl")[0], again[0])
    assert not list(tmp_path.rglob("*.part"))


def test_write_errors_reach_the_caller_and_the_writer_lives_on(tmp_path: Path):
    rng = np.random.default_rng(5)
    made = step_of_trajectories(rng, 0, groups=1)
    writer = TrajectoryWriter(tmp_path, decode)
    (tmp_path / "trajectories").write_text("a file where the folder must be")
    writer.write("rl", 0, made)
    with pytest.raises(OSError):
        writer.flush()
    (tmp_path / "trajectories").unlink()
    writer.write("rl", 1, made)
    writer.close()
    writer.close()
    assert len(read_trajectories(tmp_path / "trajectories" / "rl" / "step_0001.jsonl")) == 4
    with pytest.raises(RuntimeError):
        writer.write("rl", 2, made)


def test_caller_may_change_rewards_after_write(tmp_path: Path):
    made = [trajectory("a", "g", right=True, called=True, rng=np.random.default_rng(6))]
    with TrajectoryWriter(tmp_path, decode) as writer:
        writer.write("rl", 0, made)
        made[0].rewards["total"] = -1.0
        made[0].calls.clear()
    back = read_trajectories(tmp_path / "trajectories" / "rl" / "step_0000.jsonl")[0]
    assert back.rewards["total"] == 1.1 and len(back.calls) == 1


def test_calling_thread_is_hardly_held_up(tmp_path: Path):
    rng = np.random.default_rng(7)
    made = step_of_trajectories(rng, 0, groups=32, size=8)
    took = []
    with TrajectoryWriter(tmp_path, decode, picture) as writer:
        for step in range(3):
            start = time.thread_time()
            writer.write("rl", step, made)
            took.append(time.thread_time() - start)
    assert len(made) == 256 and min(took) < 0.05


# ---------------------------------------------------------------- U54


class Strange:
    def __repr__(self) -> str:
        raise RuntimeError("not even a repr")


def test_values_that_json_cannot_hold_never_stop_a_run(tmp_path: Path):
    deep: list = []
    deep.append(deep)
    extras = {
        "int": np.int64(3),
        "float": np.float32(0.5),
        "bfloat16": jnp.bfloat16(0.5),
        "nan": np.float32("nan"),
        "inf": -math.inf,
        "bool": np.bool_(True),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "jax": jnp.float32(2.5),
        "bytes": b"\x00\xff",
        "set": {3, 1, 2},
        "picture": Image.new("RGB", (4, 4)),
        "strange": Strange(),
        "deep": deep,
        "huge": 10**5000,
        "large": np.zeros(10**6),
        "objects": np.array([None, "x"], object),
        "time": np.datetime64("2024-01-01"),
        "complex": 1j,
        "keys": {1: "a", (2, "b"): "c", Strange(): "d"},
        "mark": {"__float__": "hello"},
        "path": tmp_path / "x",
        "reason": EndReason.ANSWERED,
    }
    made = [trajectory("a", "g", right=True, called=True, rng=np.random.default_rng(8))]
    made[0].calls[0].result["usage"] = extras
    with TrajectoryWriter(tmp_path, decode) as writer:
        writer.write("rl", 0, made, extras={"a": extras})
    stored = reader.read_trajectories(tmp_path / "trajectories" / "rl" / "step_0000.jsonl")[0]
    held = stored.extras
    assert stored.calls[0]["result"]["usage"]["int"] == 3
    assert (held["int"], held["float"], held["bfloat16"], held["jax"], held["bool"]) == (3, 0.5, 0.5, 2.5, True)
    assert math.isnan(held["nan"]) and held["inf"] == -math.inf
    assert np.array_equal(held["array"], extras["array"]) and held["array"].dtype == np.int16
    assert held["bytes"] == b"\x00\xff" and held["set"] == {1, 2, 3} and held["mark"] == {"__float__": "hello"}
    assert held["picture"]["__unheld__"]["type"] == "PIL.Image.Image"
    assert held["strange"]["__unheld__"]["type"].endswith("Strange")
    for name in ("huge", "large", "objects", "time", "complex"):
        assert "__unheld__" in held[name], name
    assert held["large"]["__unheld__"]["shape"] == [10**6]
    assert held["keys"]["1"] == "a" and held["keys"]["(2, b)"] == "c"
    assert held["reason"] == "answered" and held["path"].endswith("x")
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write(0, extras)
    row = reader.restore(reader.read_jsonl(tmp_path / "metrics.jsonl").rows[0])
    assert row["int"] == 3 and row["jax"] == 2.5 and math.isnan(row["nan"])


def test_plain_is_json_for_ordinary_data():
    data = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert plain(data) == data and reader.restore(plain(data)) == data
    assert plain(True) is True and plain(np.True_) is True


# ---------------------------------------------------------------- metrics


def rows_of(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_columns_grow(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False, phase="rl") as metrics:
        metrics.write(0, {"a": 1})
        metrics.write(1, {"a": np.float32(2), "b,\n": 0.5})
        metrics.write(2, {"c": float("nan"), "note": 'x "y", z', "one": np.array([4.0])})
    rows = rows_of(tmp_path)
    assert list(rows[0]) == ["phase", "step", "time", "a", "b,\n", "c", "note", "one"]
    assert [row["a"] for row in rows] == ["1", "2.0", ""]
    assert (
        rows[1]["b,\n"] == "0.5" and rows[2]["c"] == "nan" and rows[2]["note"] == 'x "y", z' and rows[2]["one"] == "4.0"
    )


def test_resume_drops_rows_at_or_after_the_step(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False, phase="sft") as metrics:
        metrics.write(9, {"loss": 1.0})
    with MetricsWriter(tmp_path, tensorboard=False, phase="rl") as metrics:
        for step in range(5):
            metrics.write(step, {"reward": step, "old": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 5, "rew')  # killed in the middle of a write
    with MetricsWriter(tmp_path, tensorboard=False, phase="rl", resume_step=3) as metrics:
        metrics.write(3, {"reward": 30})
    rows = rows_of(tmp_path)
    assert [(row["phase"], row["step"], row["reward"]) for row in rows] == [
        ("sft", "9", ""), ("rl", "0", "0"), ("rl", "1", "1"), ("rl", "2", "2"), ("rl", "3", "30"),
    ]  # fmt: skip
    lines = reader.read_jsonl(tmp_path / "metrics.jsonl")
    assert lines.broken == 0 and [row["step"] for row in lines.rows] == [9, 0, 1, 2, 3]


def test_tensorboard_holds_the_numbers(tmp_path: Path):
    with MetricsWriter(tmp_path, phase="rl") as metrics:
        metrics.write(7, {"critic/rewards/mean": 0.25, "note": "text is passed over"})
    (file,) = (tmp_path / "tensorboard" / "rl").iterdir()
    assert b"critic/rewards/mean" in file.read_bytes() and b"note" not in file.read_bytes()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_a_step_or_a_bar():
    stream = io.StringIO()
    with Progress("rl", total=12, start=10, stream=stream) as progress:
        assert math.isnan(progress.seconds_left)
        progress.step(reward=0.51234, calls=3)
        progress.step()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("[rl] 11/12  reward 0.5123  calls 3  ") and lines[0].endswith("left")
    assert lines[1].endswith("0 s left")
    terminal = Terminal()
    with Progress("sft", total=2, stream=terminal) as progress:
        progress.step(2, loss=0.5)
    assert "2/2" in terminal.getvalue() and "loss 0.5" in terminal.getvalue()
    assert [clock(value) for value in (12.4, 185, 7_620, math.nan)] == ["12 s", "3 min 05 s", "2 h 07 min", "?"]


# ---------------------------------------------------------------- the directory


def test_run_directory_tells_what_it_was_made_of(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    run = RunDir(tmp_path / "run", mode="new", command="pyvision rl")
    run.write_config(RLConfig(seed=7))
    run.write_versions()
    run.write_manifest("train", path=str(data), records=1)
    run.write_manifest("eval", kind="needle", seeds=range(2))
    run.skip("r1", "truncated", file="a.jsonl", row=3)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert (
        config["seed"] == 7
        and config["algorithm"]["clip_high"] == 0.28
        and config["sampling"]["code_temperature"] is None
    )
    versions = reader.read_json(run.path / "versions.json")
    assert (
        versions["packages"]["jax"] == versions["jax"] and versions["pillow"] and sum(versions["devices"].values()) >= 1
    )
    manifest = reader.read_json(run.path / "manifest.json")
    assert manifest["train"]["bytes"] == 3 and manifest["train"]["sha256"].startswith(
        "ca3d163bab055381827226140568f3bef7"
    )
    assert reader.read_jsonl(run.path / "skipped.jsonl").rows == [
        {"id": "r1", "file": "a.jsonl", "row": 3, "reason": "truncated"}
    ]


def test_modes_of_opening(tmp_path: Path):
    run = RunDir(tmp_path / "run", mode="new")
    run.write_config({"a": 1})
    run.drop("rl", 0, {"zero_variance": 1})
    run.drop("rl", 1, {"zero_variance": 2})
    with pytest.raises(FileExistsError, match="already holds a run"):
        RunDir(tmp_path / "run", mode="new")
    resumed = RunDir(tmp_path / "run", mode="resume")
    resumed.rewind("rl", 1)
    resumed.write_config({"a": 2})
    assert [row["step"] for row in reader.read_jsonl(run.path / "drops.jsonl").rows] == [0]
    assert (run.path / "config.1.yaml").read_text() == "a: 1\n"
    assert [start["mode"] for start in reader.read_json(run.path / "run.json")["starts"]] == ["new", "resume"]
    (run.path / "mine.txt").write_text("keep")
    RunDir(tmp_path / "run", mode="replace")
    assert not (run.path / "drops.jsonl").exists() and (run.path / "mine.txt").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="nothing there is removed"):
        RunDir(tmp_path / "other", mode="replace")
