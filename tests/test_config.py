"""Configuration: every mistake stops as one line that names the file or override and the key."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from pyvision_jax.config import DemoConfig, KeptEnd, MeshConfig, OptimizerConfig, RLConfig, SandboxConfig, SFTConfig
from pyvision_jax.config_check import arithmetic, check, check_mesh
from pyvision_jax.config_load import ConfigError, as_tree, dump, keys, load
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_sandbox.policy import LEVELS
from pyvision_sandbox.profiles import PROFILES

RUNNABLE = ["model.config={family: tiny}", "model.tokenizer=tok", "data.train=needle"]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml",
        "steps: 7\noptimizer: {lr: 1e-6, freeze: [vision]}\nrollout:\n  patch_buckets: [16, 32]\nseed: 3\n"
        "run_dir: runs/seed${seed}\nprotocol: {tool: off}\nsampling: {code_temperature: 0}\n",
    )
    config = load(RLConfig, path, ["steps=9", "seed=5", "image.background=[0, 1, 2]", "algorithm.oversample=4"])
    assert (config.steps, config.seed, config.run_dir) == (9, 5, "runs/seed5")
    assert config.optimizer.lr == 1e-6 and config.optimizer.freeze == ("vision",)
    assert config.rollout.patch_buckets == (16, 32) and config.rollout.slots == RLConfig().rollout.slots
    assert config.image.background == (0, 1, 2)
    assert config.protocol.tool == "off"
    assert config.sampling.code_temperature == 0.0 and isinstance(config.algorithm.oversample, float)


def test_an_interpolation_reaches_a_default(tmp_path: Path) -> None:
    config = load(RLConfig, write(tmp_path / "c.yaml", "run_dir: runs/seed${seed}-${optimizer.lr}"))
    assert config.run_dir == f"runs/seed{RLConfig().seed}-{RLConfig().optimizer.lr}"


@pytest.mark.parametrize("cls", [SFTConfig, RLConfig, DemoConfig])
def test_no_float_may_be_nan_or_infinite(cls: type) -> None:
    tree = dict.fromkeys(keys(cls))
    floats = [key for key in tree if isinstance(_at(as_tree(cls()), key), float)]
    assert len(floats) > 5
    for key in floats:
        for value in (".nan", ".inf", "-.inf", "1" + 400 * "0"):
            with pytest.raises(ConfigError, match=f"{key} must be a finite number"):
                load(cls, None, [f"{key}={value}"])


def _at(tree: typing.Any, key: str) -> typing.Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


def test_a_group_keeps_the_defaults_of_its_run() -> None:
    assert load(SFTConfig, None, ["optimizer.b2=0.99"]).optimizer == OptimizerConfig(lr=1e-5, b2=0.99)


def test_null_empties_a_mapping_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: {config: {a: 1}}\ndata: {options: {b: 2}}")
    config = load(SFTConfig, path, ["model.config=null", "data.options="])
    assert config.model.config == {} and config.data.options == {}


@pytest.mark.parametrize("cls", [SFTConfig, RLConfig])
def test_dump_and_load_are_inverse(cls: type, tmp_path: Path) -> None:
    config = load(cls, None, [*RUNNABLE, "optimizer.freeze=[vision, merger]", "mesh.fsdp=2"])
    assert load(cls, write(tmp_path / "c.yaml", dump(config))) == config
    assert load(cls, None, []) == cls()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algoritm: {prompts: 4}", ["unknown key 'algoritm'", "nearest is 'algorithm'"]),
        ("algorithm: {prompt: 4}", ["unknown key 'algorithm.prompt'", "'algorithm.prompts'"]),
        ("group_size: 8", ["unknown key 'group_size'", "'algorithm.group_size'"]),
        ("quux: 8", ["unknown key 'quux'", "valid here: run_dir"]),
        ("steps: many", ["steps must be a whole number", "'many'"]),
        ("steps: 1.5", ["steps must be a whole number"]),
        ("steps: true", ["steps must be a whole number"]),
        ("optimizer: {lr: fast}", ["optimizer.lr must be a number"]),
        ("optimizer: 3", ["optimizer is a group of keys"]),
        ("optimizer: {schedule: cosin}", ["optimizer.schedule must be one of constant, cosine, linear", "'cosine'"]),
        ("optimizer: {freeze: vision}", ["optimizer.freeze must be a list"]),
        ("optimizer: {freeze: [audio]}", ["optimizer.freeze[0] must be one of vision, merger, text"]),
        ("image: {background: [1, 2]}", ["image.background must be a list of 3 values"]),
        ("selection: {zero_variance: 1}", ["selection.zero_variance must be true or false"]),
        ("selection: {end_reasons: [infrastructure]}", ["selection.end_reasons[0] must be one of answered"]),
        ("model: {config: 3}", ["model.config must be a mapping"]),
        ("model: {path: [a]}", ["model.path must be text"]),
        ("3", ["not readable as YAML"]),
        ("- 1\n- 2", ["a list, not a mapping"]),
        ("a: [1", ["not readable as YAML"]),
        ("run_dir: ${nothing}", ["nothing"]),
        ("seed: ${run_dir}\nrun_dir: x", ["seed must be a whole number, not 'x'"]),
    ],
)
def test_a_bad_file_is_one_line_naming_it(text: str, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=1", ["override 'optimizer.learning_rate=1'", "unknown key"]),
        ("optimizer.lr", ["written key=value"]),
        ("=3", ["written key=value"]),
        ("steps=x", ["override 'steps=x'", "steps must be a whole number"]),
        ("steps.more=1", ["steps must be a whole number"]),
    ],
)
def test_a_bad_override_is_named_although_the_file_is_good(override: str, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "good.yaml", "steps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load(RLConfig, path, [override])
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"configuration file nowhere\.yaml does not exist"):
        load(RLConfig, "nowhere.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.minibatches=3", "16 prompts .* do not divide into 3 minibatches"),
        ("algorithm.oversample=0.5", "algorithm.oversample: 0.5 is below 1"),
        ("algorithm.oversample=1.03", "16 prompts x 1.03 = 16.48 is no whole number"),
        ("algorithm.group_size=1", "groups of 1 have no variance"),
        ("algorithm.dual_clip=0.5", "neither 0 .off. nor above 1"),
        ("rollout.max_turn_length=5000", "rollout.max_turn_length: 5,000 exceeds rollout.max_length .4,096."),
        ("packing.row_length=2048", "packing.row_length: 2,048 is below rollout.max_length"),
        ("rollout.patch_buckets=[64, 32]", "rollout.patch_buckets: .64, 32. is not a rising list"),
        ("mesh.data=3", None),
        ("mesh={data: 3, fsdp: 1}", "8 rows do not divide over mesh.data x mesh.fsdp = 3"),
        ("mesh={data: -1, fsdp: -1}", "only one axis may be -1"),
        ("mesh.tensor=0", "mesh.tensor: 0 devices"),
        ("image.max_pixels=10", "image.max_pixels: 10 is below image.min_pixels"),
        ("sampling.top_p=0", "sampling.top_p: 0.0 is not in"),
        ("sampling.min_p=1.5", "sampling.min_p: 1.5 is not in"),
        ("sampling.repetition_penalty=0", "sampling.repetition_penalty: 0.0 is not above 0 .1 is off."),
        ("rollout.repetition={rule: fixed_length}", None),
        ("rollout.repetition={rule: any_length, share: 0.3, tail: 256, minimum: 16}", None),
        ("rollout.repetition={rule: any_length, share: 0.7}", "share: two copies of at most a third of the ids never"),
        ("rollout.repetition={rule: fixed_length, share: 1}", "rollout.repetition.share: 1 is not in .0, 1."),
        ("rollout.repetition={rule: fixed_length, tail: 40}", "tail: 40 ids have no room for two copies .* .32."),
        ("rollout.repetition={rule: fixed_length, minimum: 2000}", "minimum: 2,000 exceeds rollout.max_turn_"),
        ("rollout.repetition={rule: fixed_length, length: 1, tail: 4000}", "take 31 MiB for each of 64 slots"),
        ("optimizer.warmup_steps=101", "exceeds the run's steps"),
        ("run_dir=", "run_dir: empty"),
        ("seed=-1", "seed: -1 is not in"),
        ("rollout.seed=4294967296", "rollout.seed: 4294967296 is not in"),
        ("data.shuffle_seed=-1", "data.shuffle_seed: -1 is not in"),
        ("checkpoint.every=0", "checkpoint.every: 0 is below 1"),
        ("model.path=some", "give either model.path .* or model.config"),
        ("model.tokenizer=", "model.tokenizer: "),
        ("data.train=", "data.train: give a JSONL file"),
        ("selection.end_reasons=[]", "drops every trajectory"),
    ],
)
def test_impossible_arithmetic(override: str, words: str | None) -> None:
    config = load(RLConfig, None, [*RUNNABLE, override])
    if words is None:
        check(config, files=False)
        return
    with pytest.raises(ConfigError, match=words):
        check(config, files=False)


def test_missing_files_are_named(tmp_path: Path) -> None:
    def message(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check(load(SFTConfig, None, overrides))
        return str(caught.value)

    model = tmp_path / "model"
    assert f"directory {model} does not exist" in message(f"model.path={model}", "data.train=needle")
    model.mkdir()
    assert "holds no config.json" in message(f"model.path={model}", "data.train=needle")
    write(model / "config.json", "{")
    assert "is not JSON" in message(f"model.path={model}", "data.train=needle")
    write(model / "config.json", "{}")
    assert "holds no *.safetensors" in message(f"model.path={model}", "data.train=needle")
    (model / "model.safetensors").touch()
    check(load(SFTConfig, None, [f"model.path={model}", "data.train=needle"]))
    assert "data.train: file gone.jsonl" in message(f"model.path={model}", "data.train=gone.jsonl")
    assert "data.eval: file gone.jsonl" in message(f"model.path={model}", "data.train=needle", "data.eval=gone.jsonl")
    assert "model.tokenizer: gone" in message("model.config={a: 1}", "model.tokenizer=gone", "data.train=needle")


def test_mesh_is_filled_in_or_refused() -> None:
    assert check_mesh(MeshConfig(), 8, 8) == MeshConfig(1, 8, 1)
    assert check_mesh(MeshConfig(2, -1, 2), 8, 8) == MeshConfig(2, 2, 2)
    for mesh, rows, devices, words in [
        (MeshConfig(3, -1, 1), 9, 8, "data 3 x fsdp -1 x tensor 1 does not divide 8 devices"),
        (MeshConfig(2, 2, 1), 8, 8, "does not divide 8 devices"),
        (MeshConfig(1, -1, 1), 6, 4, "6 rows do not divide over data x fsdp = 4"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_mesh(mesh, rows, devices)


def test_the_arithmetic_is_spelled_out() -> None:
    text = "\n".join(arithmetic(load(RLConfig, None, ["algorithm.minibatches=4"])))
    assert "16 prompts x 2 = 32 groups x 8 = 256 trajectories a step, 64 at a time" in text
    assert "16 groups x 8 = 128 trajectories / 4 = 32 an update, 4 a step" in text
    assert "8 rows x 4,096 ids = 32,768 ids" in text
    assert "100 steps x 64 traces = 6,400 traces" in "\n".join(arithmetic(SFTConfig()))


def test_classes_stay_small_hashable_values_and_enumerations_agree() -> None:
    seen: list[type] = [DemoConfig]
    for cls in seen:
        fields = dataclasses.fields(cls)
        assert len(fields) <= 20, cls
        seen += [type(f.default) for f in fields if dataclasses.is_dataclass(f.default) and type(f.default) not in seen]
    kinds = typing.get_type_hints(SandboxConfig)
    assert typing.get_args(kinds["min_level"]) == LEVELS[1:], "`none` is out of a configuration's reach"
    assert set(typing.get_args(kinds["profile"])) == set(PROFILES)
    assert set(typing.get_args(KeptEnd)) == {reason.value for reason in EndReason} - {"infrastructure"}


def test_every_key_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    stages = keys(SFTConfig) + keys(RLConfig)
    demo = [key for key in keys(DemoConfig) if not key.startswith(("sft.", "rl."))]
    missing = [key for key in dict.fromkeys(stages + demo) if f"`{key}`" not in text]
    assert not missing


def test_presets_load_and_name_their_command() -> None:
    root = Path(__file__).parents[1]
    presets = sorted((root / "configs").glob("*.yaml"))
    assert presets
    for path in presets:
        first = path.read_text().splitlines()[0]
        command = "demo" if first.startswith("# scripts/demo.sh") else first.split()[2]
        if command != "demo":
            assert first.startswith(f"# pyvision {command} configs/{path.name}"), path
        config = load({"sft": SFTConfig, "rl": RLConfig, "demo": DemoConfig}[command], path)
        if not isinstance(config, DemoConfig):
            check(config, files=False)
            assert load(type(config), None, []) != config and as_tree(config)
