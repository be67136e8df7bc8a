"""From a configuration to pieces: models from a directory or a mapping, records, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from pyvision_jax.cli import app
from pyvision_jax.config import (
    DataConfig,
    ImageConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ProtocolConfig,
    RLConfig,
    SFTConfig,
)
from pyvision_jax.config_load import ConfigError, load
from pyvision_jax.data.tokenizer import Tokenizer, train_tiny
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.hf import export_weights
from pyvision_jax.recipes.build import (
    build_evaluation,
    build_host,
    build_mesh,
    build_params,
    build_protocol,
    build_tasks,
    build_traces,
    read_model,
)
from pyvision_jax.training.state import Optimizer
from tests.tiny import tiny_spec


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tiny(["Which digit is in the red box?", "<answer>\n\\boxed{4}\n</answer>"], 320).save(directory)
    return directory


@pytest.fixture(scope="module")
def spec(tokenizer_dir: Path) -> ModelSpec:
    t = Tokenizer(tokenizer_dir)
    return tiny_spec(
        vocab_size=t.vocab_size,
        layers=1,
        depth=1,
        fullatt_blocks=(0,),
        ids=(t.image_pad, t.video_pad, t.vision_start, t.vision_end),
    )


def test_a_model_from_a_mapping_and_from_its_export_is_the_same(
    spec: ModelSpec, tokenizer_dir: Path, tmp_path: Path
) -> None:
    mapped = ModelConfig(config=spec.to_hf(), tokenizer=str(tokenizer_dir))
    image = ImageConfig(min_pixels=28 * 28, max_pixels=56 * 56)
    assert read_model(mapped, image)[0] == spec
    params = build_params(mapped, seed=3)
    export_weights(params, spec, tmp_path / "model", tokenizer_dir=tokenizer_dir)

    stored = ModelConfig(path=str(tmp_path / "model"))
    again, tokenizer, processor = read_model(stored, image)
    assert again == spec and tokenizer.vocab_size == spec.text.vocab_size
    assert (processor.max_pixels, processor.patch_size) == (56 * 56, spec.vision.patch_size)
    mesh = build_mesh(MeshConfig(2, 2, 2), rows=8)
    sharded = build_params(stored, seed=0, mesh=mesh)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(sharded), strict=True):
        assert len(other.sharding.device_set) == 8
        np.testing.assert_array_equal(one, other)


def test_what_does_not_fit_is_named(spec: ModelSpec, tokenizer_dir: Path, tmp_path: Path) -> None:
    hf = spec.to_hf()
    image = ImageConfig()

    def message(model: ModelConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            read_model(model, image)
        return str(caught.value)

    assert "model.config: " in message(ModelConfig(config={"model_type": "other"}, tokenizer=str(tokenizer_dir)))
    assert "model.tokenizer: " in message(ModelConfig(config=hf, tokenizer=str(tmp_path)))
    wrong = ModelConfig(config={**hf, "image_token_id": 5}, tokenizer=str(tokenizer_dir))
    assert "<|image_pad|>" in message(wrong) and "5 in the model" in message(wrong)
    small = tiny_spec(vocab_size=96).to_hf()
    assert "ids, the model 96" in message(ModelConfig(config=small, tokenizer=str(tokenizer_dir)))
    model = read_model(ModelConfig(config=hf, tokenizer=str(tokenizer_dir)), image)
    with pytest.raises(ConfigError, match=r"protocol\.name: 'pyvison'"):
        build_protocol(ProtocolConfig(name="pyvison"), image, *model)
    with pytest.raises(ConfigError, match="does not divide 8 devices"):
        build_mesh(MeshConfig(data=3), rows=9)


def test_the_generated_world_and_files(tmp_path: Path) -> None:
    traces = build_traces(DataConfig(train="needle", options={"count": 3, "script": "tight"})).source
    assert len(traces) == 3 and traces[0].messages[-1].role == "assistant"
    assert build_tasks(DataConfig(train="needle")).source[0].messages[-1].role == "user"
    assert len(build_evaluation(DataConfig(eval="needle"), 6).source) == 6
    with pytest.raises(ConfigError, match=r"data\.options: .*colour"):
        build_tasks(DataConfig(train="needle", options={"colour": "red"}))

    for options, words in [({"split": "evl"}, "split: 'evl'"), ({"count": 0}, "count"), ({"script": "tite"}, "'tite'")]:
        with pytest.raises(ConfigError, match=rf"data\.options.*{words}"):
            build_traces(DataConfig(train="needle", options=options))

    path = tmp_path / "records.jsonl"
    asked = '"messages": [{"role": "user", "content": "hi"}]'
    path.write_text(f'{{"id": "a", {asked}, "answer": {{"value": "ten", "kind": "number"}}}}\n{{"id": "b", {asked}}}\n')
    records = build_tasks(DataConfig(train=str(path)))
    assert [record.id for record in records.source] == ["b"] and "'ten' is not a number" in records.bad[0]["reason"]
    path.write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\n{"id": 3}\n')
    records = build_tasks(DataConfig(train=str(path)))
    assert len(records.source) == 1 and records.bad[0]["row"] == 2
    path.write_text('{"id": 3}\n')
    with pytest.raises(ConfigError, match=r"holds no usable record .1 bad lines; the first: .*line 1"):
        build_tasks(DataConfig(train=str(path)))


def test_a_host_is_built_without_a_device(spec: ModelSpec, tokenizer_dir: Path) -> None:
    config = load(
        SFTConfig,
        None,
        [f"model.config={json.dumps(spec.to_hf())}", f"model.tokenizer={tokenizer_dir}", "data.train=needle"],
    )
    host = build_host(config)
    example = host.protocol.example(build_traces(config.data).source[0])
    assert example.loss_weights.sum() > 0
    with pytest.raises(ConfigError, match="steps: 0 is below 1"):
        build_host(load(SFTConfig, None, ["steps=0"]))


def test_every_picture_within_the_limits_fits_a_vision_program(tokenizer_dir: Path) -> None:
    """In the published tower (windows of 4 x 4 tokens) 2 million pixels are 10,204 patches, in windows partly empty."""
    t = Tokenizer(tokenizer_dir)
    hf = tiny_spec(vocab_size=t.vocab_size, ids=(t.image_pad, t.video_pad, t.vision_start, t.vision_end)).to_hf()
    hf["vision_config"]["window_size"] = 112
    given = [f"model.config={json.dumps(hf)}", f"model.tokenizer={tokenizer_dir}", "data.train=needle"]
    build_host(load(RLConfig, None, given))
    for buckets in ("[4096]", "[1024, 12288]"):  # too small for all, and for long pictures
        with pytest.raises(ConfigError, match=r"rollout\.patch_buckets: a picture of .* needs .* windows"):
            build_host(load(RLConfig, None, [*given, f"rollout.patch_buckets={buckets}"]))


def test_data_commands(spec: ModelSpec, tokenizer_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    export_weights(build_params(ModelConfig(config=spec.to_hf()), 0), spec, model, tokenizer_dir=tokenizer_dir)
    Image.new("RGB", (60, 40), "red").save(tmp_path / "a.png")
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}
    trace = {
        "id": "one",
        "messages": [user, {"role": "assistant", "content": "four"}],
        "media": ["a.png"],
        "answer": "4",
    }
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(trace) + "\n")

    result = CliRunner().invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 0 and "1 records: 0 tasks, 1 traces" in result.stdout
    result = CliRunner().invoke(app, ["data", "show", str(path), "--model", str(model), "--record", "one"])
    assert result.exit_code == 0 and "<|image_pad|>x" in result.stdout and "1 pictures" in result.stdout, result.output
    result = CliRunner().invoke(app, ["data", "show", str(path), "--model", str(model), "--record", "two"])
    assert result.exit_code == 2 and "none is 'two'" in result.stderr

    (tmp_path / "b.png").write_bytes(b"no picture")
    lines = [trace, {**trace, "id": "two", "media": ["b.png"]}, {**trace, "id": "three", "medias": []}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 1
    assert "record two, media[0]" in result.stdout and "line 3, medias: unknown key" in result.stdout


COMMON = {
    "packing": {"row_length": 512, "rows": 2},
    "image": {"max_pixels": 7056},
    "protocol": {"template": "brief"},
    "checkpoint": {"every": 1},
}


def pyvision(cache: Path, *arguments: str) -> tuple[int, str, str]:
    """The command in a process of its own with one device: programs compile faster, and the cache is tried too."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "sandbox"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pyvision_jax.cli", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def sft_tree(spec: ModelSpec, tokenizer_dir: Path, run: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run),
        "steps": 1,
        "batch_size": 2,
        "model": {"config": spec.to_hf(), "tokenizer": str(tokenizer_dir)},
        "data": {"train": "needle", "options": {"script": "direct"}},
        **COMMON,
    }


def test_a_bad_configuration_stops_before_anything_is_made(
    spec: ModelSpec, tokenizer_dir: Path, tmp_path: Path
) -> None:
    config, run = tmp_path / "sft.yaml", tmp_path / "run"
    config.write_text(json.dumps(sft_tree(spec, tokenizer_dir, run)))
    result = CliRunner().invoke(app, ["sft", str(config), "--check"])
    assert result.exit_code == 0 and "1 steps x 2 traces = 2 traces" in result.stdout and not run.exists()
    for wrong, words in [
        ("steps=none", "steps must be a whole number"),
        ("batchsize=3", "the nearest is 'batch_size'"),
        ("mesh.fsdp=3", "2 rows do not divide"),
        ("data.train=gone.jsonl", "file gone.jsonl does not exist"),
        ("protocol.name=nothing", "there are pyvision_image"),
        ("data.options.colour=red", "data.options"),
    ]:
        result = CliRunner().invoke(app, ["sft", str(config), wrong])
        assert result.exit_code == 2 and result.stderr.startswith("pyvision: error: ") and words in result.stderr
        assert result.stderr.count("\n") == 1 and not run.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    result = CliRunner().invoke(app, ["demo", f"run_dir={tmp_path / 'mine'}"])
    assert result.exit_code == 2 and "is not empty and no run" in result.stderr and result.stderr.count("\n") == 1
    (tmp_path / "file").write_text("")
    for where, words in [("file", "file is a file"), ("file/below", "cannot be written: Not a directory")]:
        wrong = [f"run_dir={tmp_path / where}", "packing.rows=8", "mesh.fsdp=-1"]
        result = CliRunner().invoke(app, ["sft", str(config), *wrong])
        assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.output
    (tmp_path / "busy").mkdir()
    number = os.open(tmp_path / "busy", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    for option in ("--resume", "--replace"):
        busy = [f"run_dir={tmp_path / 'busy'}", "packing.rows=8", "mesh.fsdp=-1", option]
        result = CliRunner().invoke(app, ["sft", str(config), *busy])
        assert result.exit_code == 2 and "another run is going on in" in result.stderr, result.output
        assert not any((tmp_path / "busy").iterdir())
    os.close(number)
    result = CliRunner().invoke(app, ["rl", str(tmp_path / "gone.yaml")])
    assert result.exit_code == 2 and "gone.yaml does not exist" in result.stderr


@pytest.mark.slow
def test_sft_and_rl_from_the_command_line(spec: ModelSpec, tokenizer_dir: Path, tmp_path: Path) -> None:
    config, run = tmp_path / "sft.yaml", tmp_path / "sft"
    config.write_text(json.dumps(sft_tree(spec, tokenizer_dir, run)))
    code, out, err = pyvision(tmp_path / "cache", "sft", str(config))
    assert code == 0 and str(run / "report.html") in out, err
    for name in ("config.yaml", "versions.json", "metrics.csv", "report.html", "model/model.safetensors"):
        assert (run / name).exists(), name
    assert load(SFTConfig, run / "config.yaml") == load(SFTConfig, config)
    code, _, err = pyvision(tmp_path / "cache", "sft", str(config))
    assert code == 2 and "already holds a run" in err
    code, out, err = pyvision(tmp_path / "cache", "sft", str(config), "steps=2", "--resume")
    assert code == 0 and "resume: goes on after step 1" in out and (run / "checkpoints" / "2").exists(), err
    assert [line.split(",")[1] for line in (run / "metrics.csv").read_text().splitlines()[1:]] == ["1", "2"]

    config, run, model = tmp_path / "rl.yaml", tmp_path / "rl", run / "model"
    tree = {
        "run_dir": str(run),
        "steps": 1,
        "model": {"path": str(model)},
        "data": {"train": "needle"},
        "algorithm": {"prompts": 1, "group_size": 2},
        "selection": {"zero_variance": False},
        "rollout": {"slots": 2, "max_length": 512, "max_turn_length": 16, "chunk": 8, "prefill_buckets": [256]},
        **COMMON,
    }
    config.write_text(json.dumps(tree))
    code, out, err = pyvision(tmp_path / "cache", "rl", str(config))
    assert code == 0 and "1 prompts x 2 = 2 groups x 2 = 4 trajectories a step" in out, err
    for name in ("sandbox.json", "metrics.csv", "report.html", "trajectories", "model/config.json"):
        assert (run / name).exists(), name

    arguments = ["run_dir=" + str(tmp_path / "eval"), f"model.path={run / 'model'}", "--tasks", "2", "--tries", "2"]
    code, out, err = pyvision(tmp_path / "cache", "eval", str(run / "config.yaml"), *arguments, "--temperature", "1")
    assert code == 0 and "2 tasks of needle x 2 = 4 trajectories" in out and "accuracy: " in out, err
    assert json.loads((tmp_path / "eval" / "summary.json").read_text())["accuracy"]["eval"]["n"] == 2


def test_a_checkpoint_of_a_mesh_has_no_leaf_on_one_device(spec: ModelSpec, tokenizer_dir: Path) -> None:
    model = ModelConfig(config=spec.to_hf(), tokenizer=str(tokenizer_dir))
    state = Optimizer(OptimizerConfig(), 1).init(build_params(model, 0, build_mesh(MeshConfig(2, 2, 2), 8)))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {8}
