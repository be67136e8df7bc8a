"""Checks that a configuration can run at all, and spells out the arithmetic that follows. Nothing here imports jax."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyvision_jax.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    ImageConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ProtocolConfig,
    RepetitionConfig,
    RLConfig,
    RolloutConfig,
    SamplingConfig,
    SandboxConfig,
    SelectionConfig,
    SFTConfig,
)
from pyvision_jax.config_load import ConfigError

WORLDS = ("needle",)  # values of data.train and data.eval that name a generated world, not a file


def check(config: SFTConfig | RLConfig, files: bool = True) -> None:
    """Raises `ConfigError` naming the first key that cannot work. `files=False` leaves the paths unlooked at."""
    for message in _problems(config, files):
        raise ConfigError(message)


def check_mesh(mesh: MeshConfig, rows: int, devices: int) -> MeshConfig:
    """The mesh with its -1 filled in. Raises `ConfigError` if it does not fit the devices, or the rows not the mesh."""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if devices % fixed or (-1 not in sizes.values() and fixed != devices):
        raise ConfigError(f"mesh: {shown} does not divide {devices} devices")
    filled = {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
    ways = filled["data"] * filled["fsdp"]
    if rows % ways:
        raise ConfigError(f"packing.rows: {rows} rows do not divide over data x fsdp = {ways} devices")
    return MeshConfig(**filled)


def arithmetic(config: SFTConfig | RLConfig) -> list[str]:
    """What the numbers come to, a line each, for the person who starts the run."""
    packing = config.packing
    micro = f"micro-batch: {packing.rows} rows x {packing.row_length:,} ids = {packing.rows * packing.row_length:,} ids"
    if isinstance(config, SFTConfig):
        traces = f"{config.steps:,} steps x {config.batch_size:,} traces = {config.steps * config.batch_size:,} traces"
        return [f"data: {traces}, packed without cutting", micro]
    algorithm, rollout = config.algorithm, config.rollout
    drawn = groups_drawn(algorithm)
    sampled, trained = drawn * algorithm.group_size, algorithm.prompts * algorithm.group_size
    return [
        f"rollouts: {algorithm.prompts} prompts x {algorithm.oversample:g} = {drawn} groups x {algorithm.group_size} "
        f"= {sampled:,} trajectories a step, {rollout.slots} at a time",
        f"limits: {config.protocol.max_calls} calls + 1 answer turn of <= {rollout.max_turn_length:,} ids, "
        f"<= {rollout.max_length:,} ids a trajectory, prompt and observations included",
        f"updates: {algorithm.prompts} groups x {algorithm.group_size} = {trained:,} trajectories "
        f"/ {algorithm.minibatches} = {trained // algorithm.minibatches:,} an update, {algorithm.minibatches} a step",
        micro,
    ]


def groups_drawn(algorithm: AlgorithmConfig) -> int:
    """Groups sampled in one step."""
    return round(algorithm.prompts * algorithm.oversample)


def _problems(config: SFTConfig | RLConfig, files: bool) -> Iterator[str]:
    yield from _at_least("", config, steps=1)
    yield from _seed("seed", config.seed)
    if not config.run_dir:
        yield "run_dir: empty; give the folder of the run"
    yield from _model(config.model, files)
    yield from _mesh(config.mesh, config.packing)
    yield from _image(config.image)
    yield from _optimizer(config.optimizer, config.steps)
    yield from _protocol(config.protocol)
    yield from _at_least("packing.", config.packing, row_length=1, rows=1, images=0)
    yield from _checkpoint(config.checkpoint)
    if isinstance(config, SFTConfig):
        yield from _at_least("", config, batch_size=1, log_every=1)
    else:
        yield from _rollout(config.rollout, config.packing)
        yield from _sampling(config.sampling)
        yield from _sandbox(config.sandbox)
        yield from _selection(config.selection, config.algorithm)
        yield from _algorithm(config.algorithm)
        yield from _seed("rollout.seed", config.rollout.seed)
        if config.reward.tool_bonus < 0:
            yield f"reward.tool_bonus: {config.reward.tool_bonus:g} is below 0"
    yield from _data(config.data, files)


def _at_least(prefix: str, part: Any, **minima: float) -> Iterator[str]:
    values = vars(part)
    for name, least in minima.items():
        if not values[name] >= least:
            yield f"{prefix}{name}: {values[name]} is below {least:g}"


def _seed(key: str, seed: int) -> Iterator[str]:
    if not 0 <= seed < 2**32:
        yield f"{key}: {seed} is not in [0, 2^32)"


def _model(model: ModelConfig, files: bool) -> Iterator[str]:
    if bool(model.path) == bool(model.config):
        yield "model: give either model.path (a directory in HF layout) or model.config (a mapping), and not both"
    if not model.path and not model.tokenizer:
        yield "model.tokenizer: a model built from model.config needs the directory of a tokenizer"
    if not files:
        return
    if model.path:
        directory = Path(model.path)
        if not directory.is_dir():
            yield f"model.path: directory {directory} does not exist"
        elif not (directory / "config.json").is_file():
            yield f"model.path: {directory} holds no config.json"
        else:
            yield from _json_file("model.path", directory / "config.json")
            if not sorted(directory.glob("*.safetensors")):
                yield f"model.path: {directory} holds no *.safetensors"
    if model.tokenizer and not Path(model.tokenizer).exists():
        yield f"model.tokenizer: {model.tokenizer} does not exist"


def _json_file(key: str, path: Path) -> Iterator[str]:
    try:
        json.loads(path.read_text())
    except ValueError as error:
        yield f"{key}: {path} is not JSON: {error}"


def _mesh(mesh: MeshConfig, packing: PackingConfig) -> Iterator[str]:
    sizes = vars(mesh)
    for name, size in sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{name}: {size} devices; a size is at least 1, or -1 for whatever is left"
    if sum(size == -1 for size in sizes.values()) > 1:
        yield "mesh: only one axis may be -1"
    ways = mesh.data * mesh.fsdp
    if ways > 0 and packing.rows % ways:
        yield f"packing.rows: {packing.rows} rows do not divide over mesh.data x mesh.fsdp = {ways} devices"


def _image(image: ImageConfig) -> Iterator[str]:
    yield from _at_least("image.", image, min_pixels=1, max_aspect=1)
    if image.max_pixels < image.min_pixels:
        yield f"image.max_pixels: {image.max_pixels:,} is below image.min_pixels ({image.min_pixels:,})"
    if not all(0 <= value <= 255 for value in image.background):
        yield f"image.background: {list(image.background)} holds a value outside 0..255"


def _optimizer(optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    yield from _at_least("optimizer.", optimizer, lr=0, warmup_steps=0, final_lr_ratio=0, weight_decay=0)
    for name in ("b1", "b2"):
        if not 0 <= vars(optimizer)[name] < 1:
            yield f"optimizer.{name}: {vars(optimizer)[name]} is not in [0, 1)"
    if optimizer.eps <= 0:
        yield f"optimizer.eps: {optimizer.eps} is not above 0"
    if optimizer.clip_norm <= 0:
        yield f"optimizer.clip_norm: {optimizer.clip_norm} is not above 0"
    if optimizer.warmup_steps > steps:
        yield f"optimizer.warmup_steps: {optimizer.warmup_steps:,} exceeds the run's steps ({steps:,})"


def _protocol(protocol: ProtocolConfig) -> Iterator[str]:
    yield from _at_least("protocol.", protocol, max_calls=0, max_images=1, max_text=1)


def _checkpoint(checkpoint: CheckpointConfig) -> Iterator[str]:
    yield from _at_least("checkpoint.", checkpoint, every=1, keep=1)


def _rollout(rollout: RolloutConfig, packing: PackingConfig) -> Iterator[str]:
    yield from _at_least("rollout.", rollout, slots=1, max_length=2, max_turn_length=1, chunk=1)
    if rollout.max_turn_length > rollout.max_length:
        yield (
            f"rollout.max_turn_length: {rollout.max_turn_length:,} exceeds "
            f"rollout.max_length ({rollout.max_length:,}), the ids of a whole trajectory"
        )
    if packing.row_length < rollout.max_length:
        yield (
            f"packing.row_length: {packing.row_length:,} is below rollout.max_length ({rollout.max_length:,}); "
            f"a trajectory is never cut to fit a row"
        )
    for name in ("prefill_buckets", "patch_buckets"):
        buckets = vars(rollout)[name]
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            yield f"rollout.{name}: {list(buckets)} is not a rising list of positive sizes"
    if rollout.repetition.rule != "off":
        yield from _repetition(rollout.repetition, rollout)


def _repetition(repetition: RepetitionConfig, rollout: RolloutConfig) -> Iterator[str]:
    key = "rollout.repetition."
    yield from _at_least(key, repetition, length=1, tail=0, minimum=1)
    fixed = repetition.rule == "fixed_length"
    if not 0 < repetition.share < 1:
        yield f"{key}share: {repetition.share:g} is not in (0, 1)"
    if not fixed and repetition.share >= 2 / 3:
        yield f"{key}share: two copies of at most a third of the ids never exceed {repetition.share:g}"
    if repetition.minimum > rollout.max_turn_length:
        yield (
            f"{key}minimum: {repetition.minimum:,} exceeds rollout.max_turn_length ({rollout.max_turn_length:,}): "
            f"no turn would ever be stopped"
        )
    if fixed and 0 < repetition.tail < 2 * repetition.length:
        yield f"{key}tail: {repetition.tail:,} ids have no room for two copies of {key}length ({repetition.length:,})"
    links = repetition.tail**2 * repetition.share / repetition.length if fixed else 0
    if repetition.tail < rollout.max_length and links > 2**22:
        yield (
            f"{key}tail: {repetition.tail:,} ids in copies of {repetition.length:,} take {4 * links / 2**20:,.0f} MiB "
            f"for each of {rollout.slots} slots; shorten the tail, or look at whole turns (0)"
        )


def _sampling(sampling: SamplingConfig) -> Iterator[str]:
    yield from _at_least("sampling.", sampling, temperature=0, top_k=0, min_p=0, top_entropy=0)
    if sampling.code_temperature is not None and sampling.code_temperature < 0:
        yield f"sampling.code_temperature: {sampling.code_temperature} is below 0"
    if not 0 < sampling.top_p <= 1:
        yield f"sampling.top_p: {sampling.top_p} is not in (0, 1]"
    if sampling.min_p > 1:
        yield f"sampling.min_p: {sampling.min_p} is not in [0, 1]"
    if sampling.repetition_penalty <= 0:
        yield f"sampling.repetition_penalty: {sampling.repetition_penalty} is not above 0 (1 is off)"


def _sandbox(sandbox: SandboxConfig) -> Iterator[str]:
    yield from _at_least("sandbox.", sandbox, workers=0, memory_mb=64, max_text=1, max_images=0)
    if sandbox.cell_timeout <= 0:
        yield f"sandbox.cell_timeout: {sandbox.cell_timeout} seconds is not above 0"


def _selection(selection: SelectionConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    yield from _at_least("selection.", selection, max_tokens=0)
    if not selection.end_reasons:
        yield "selection.end_reasons: an empty list drops every trajectory"
    if selection.zero_variance and algorithm.group_size == 1:
        yield "algorithm.group_size: groups of 1 have no variance, and selection.zero_variance drops them all"


def _algorithm(algorithm: AlgorithmConfig) -> Iterator[str]:
    yield from _at_least(
        "algorithm.", algorithm, group_size=1, prompts=1, oversample=1, minibatches=1, kl_coef=0, entropy_coef=0
    )
    if algorithm.prompts % algorithm.minibatches:
        yield (
            f"algorithm.minibatches: {algorithm.prompts} prompts (algorithm.prompts) do not divide into "
            f"{algorithm.minibatches} minibatches"
        )
    drawn = algorithm.prompts * algorithm.oversample
    if abs(drawn - round(drawn)) > 1e-6:
        yield (
            f"algorithm.oversample: {algorithm.prompts} prompts x {algorithm.oversample:g} = {drawn:g} is no whole "
            f"number of groups"
        )
    if not 0 < algorithm.clip_low < 1:
        yield f"algorithm.clip_low: {algorithm.clip_low} is not in (0, 1)"
    if algorithm.clip_high <= 0:
        yield f"algorithm.clip_high: {algorithm.clip_high} is not above 0"
    if algorithm.dual_clip and algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip: {algorithm.dual_clip} is neither 0 (off) nor above 1"


def _data(data: DataConfig, files: bool) -> Iterator[str]:
    yield from _seed("data.shuffle_seed", data.shuffle_seed)
    if not data.train:
        yield f"data.train: give a JSONL file of records, or a generated world ({', '.join(WORLDS)})"
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if value in WORLDS or not value:
            continue
        if files and not Path(value).is_file():
            yield f"{key}: file {value} does not exist (and no generated world has that name: {', '.join(WORLDS)})"
    if data.options and data.train not in WORLDS:
        yield f"data.options: only a generated world takes options, and data.train is {data.train!r}"
