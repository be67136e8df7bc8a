"""From a configuration to the pieces that a recipe works with. What needs no device comes first, and fails first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pyvision_jax.agents.protocol import AgentProtocol
from pyvision_jax.agents.pyvision import PyVisionImage
from pyvision_jax.config import (
    DataConfig,
    ImageConfig,
    MeshConfig,
    ModelConfig,
    ProtocolConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
)
from pyvision_jax.config_check import check, check_mesh
from pyvision_jax.config_load import ConfigError
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.jsonl import ReadReport, RecordError, read_records
from pyvision_jax.data.loader import Source
from pyvision_jax.data.media import Generators
from pyvision_jax.data.records import Record
from pyvision_jax.data.sources.stored import StoredRecords, is_stored
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.hf import import_weights
from pyvision_jax.models.hf_files import read_json, read_spec
from pyvision_jax.models.hf_names import FAMILIES
from pyvision_jax.models.safetensors_io import WeightsError
from pyvision_jax.models.spec import init_params
from pyvision_jax.parallel.mesh import make_mesh
from pyvision_jax.rewards.answers import matches
from pyvision_jax.rollout.cache import bucket_of, patch_buckets
from pyvision_jax.worlds import needle

GENERATORS: Generators = needle.GENERATORS
# Protocols by the name that a configuration gives them.
PROTOCOLS: Mapping[str, Callable[..., AgentProtocol]] = MappingProxyType({"pyvision_image": PyVisionImage})


@dataclasses.dataclass(frozen=True)
class Host:
    """What turns records into ids and pictures. Made without touching a device."""

    spec: ModelSpec
    tokenizer: Tokenizer
    processor: ImageProcessor
    protocol: AgentProtocol


@dataclasses.dataclass(frozen=True)
class Records:
    """A source of records, and the lines of its file that were left out: `{file, row, key, reason}` each."""

    source: Source
    bad: list[dict[str, Any]]


def build_host(config: SFTConfig | RLConfig, media_root: str | None = None) -> Host:
    """Checks the whole configuration, reads the model's small files. Raises `ConfigError`."""
    check(config)
    spec, tokenizer, processor = read_model(config.model, config.image)
    if isinstance(config, RLConfig):
        _check_buckets(config.rollout, spec, processor)
    protocol = build_protocol(config.protocol, config.image, spec, tokenizer, processor, media_root)
    return Host(spec, tokenizer, processor, protocol)


def read_model(model: ModelConfig, image: ImageConfig) -> tuple[ModelSpec, Tokenizer, ImageProcessor]:
    """Geometry, tokenizer and image processor; the pixel limits are those of `image`. Raises `ConfigError`."""
    try:
        spec = read_spec(model.path) if model.path else ModelSpec.from_hf(model.config)
    except (WeightsError, ValueError) as error:
        raise ConfigError(f"model.{'path' if model.path else 'config'}: {error}") from error
    place = Path(model.tokenizer or model.path)
    try:
        tokenizer = Tokenizer(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: {error}") from error
    _check_ids(spec, tokenizer, place)
    return spec, tokenizer, _processor(model, image, spec)


def build_protocol(
    protocol: ProtocolConfig,
    image: ImageConfig,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    media_root: str | None = None,
) -> AgentProtocol:
    """The dialogue's form by its name. Raises `ConfigError` for a name that does not exist."""
    if protocol.name not in PROTOCOLS:
        raise ConfigError(f"protocol.name: {protocol.name!r} does not exist; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol.name](protocol, image, tokenizer, processor, spec, GENERATORS, media_root)


def build_mesh(mesh: MeshConfig, rows: int) -> Mesh:
    """The mesh over all devices; `rows` of a micro-batch must divide over it. Raises `ConfigError`."""
    return make_mesh(check_mesh(mesh, rows, len(jax.devices())))


def build_params(
    model: ModelConfig,
    seed: int,
    mesh: Mesh | None = None,
    progress: Callable[[str, int], None] | None = None,
    dtype: DTypeLike = np.float32,
) -> Any:
    """Parameters, each leaf born where the mesh puts it: read from `model.path`, or random for `model.config`.

    Raises `ConfigError` naming the tensors at fault.
    """
    try:
        if model.path:
            return import_weights(model.path, mesh, dtype=dtype, progress=progress)[1]
        spec = ModelSpec.from_hf(model.config)
        return init_params(FAMILIES[spec.family].specs(spec), jax.random.key(seed), dtype, mesh)
    except (WeightsError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error


def build_tasks(data: DataConfig) -> Records:
    """Tasks of `data.train`. A generated world takes `data.options`: split, count, start. Raises `ConfigError`."""
    return _records(
        data, data.train, lambda options: needle.NeedleTasks(**{"split": "rl", "count": 100_000, **options})
    )


def build_traces(data: DataConfig) -> Records:
    """Traces of `data.train`. A generated world takes `data.options`: split, count, start, script."""
    return _records(
        data, data.train, lambda options: needle.NeedleTraces(**{"split": "sft", "count": 100_000, **options})
    )


def build_evaluation(data: DataConfig, count: int = 256) -> Records:
    """Held-out tasks of `data.eval`; `count` of a generated world."""
    return _records(data, data.eval, lambda _: needle.evaluation_tasks(count))


def _records(data: DataConfig, name: str, world: Callable[[dict[str, Any]], Source]) -> Records:
    if name == "needle":
        for key, known in (("split", (*needle.SPLITS,)), ("script", (None, *needle.SCRIPTS))):
            if key in data.options and data.options[key] not in known:
                raise ConfigError(f"data.options.{key}: {data.options[key]!r} is none of {', '.join(map(str, known))}")
        try:
            source = world(data.options)
            if len(source) < 1:
                raise ValueError("count is below 1")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"data.options: {error}") from error
        return Records(source, [])
    report = ReadReport()
    try:
        if is_stored(name):
            return Records(StoredRecords(name), [])
        records = read_records(name, report=report)
    except OSError as error:
        raise ConfigError(f"data: {error}") from error
    records = [record for record in records if _comparable(name, record, report)]
    if not records:
        first = f"; the first: {report.bad[0]}" if report.bad else ""
        raise ConfigError(f"data: {name} holds no usable record ({len(report.bad)} bad lines{first})")
    return Records(records, report.rows())


def _comparable(name: str, record: Record, report: ReadReport) -> bool:
    """Whether the record's answer can be compared with one; noted in the report if not."""
    try:
        matches("", record.answer)
    except ValueError as error:
        report.bad.append(RecordError(name, 0, "answer.value", f"record {record.id}: {error}"))
        return False
    return True


def _processor(model: ModelConfig, image: ImageConfig, spec: ModelSpec) -> ImageProcessor:
    stored = Path(model.path) / "preprocessor_config.json"
    try:
        config = read_json(stored) if model.path and stored.is_file() else {}
        processor = ImageProcessor.from_hf(config)
    except (WeightsError, ValueError) as error:
        raise ConfigError(f"{stored}: {error}") from error
    vision = spec.vision
    return dataclasses.replace(
        processor,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=image.min_pixels,
        max_pixels=image.max_pixels,
        max_aspect=min(image.max_aspect, processor.max_aspect),
    )


def _check_buckets(rollout: RolloutConfig, spec: ModelSpec, processor: ImageProcessor) -> None:
    """A tool may return a picture of any form: one that no vision program holds would end the run in its middle."""
    buckets, merge = patch_buckets(rollout.patch_buckets, spec.vision), spec.vision.merge_size
    tokens = max(1, processor.max_pixels // processor.factor**2)
    for rows in range(1, math.isqrt(tokens) + 1):
        columns = min(tokens // rows, math.ceil((rows + 0.5) * processor.max_aspect))  # a side may be rounded down
        try:
            bucket_of((1, rows * merge, columns * merge), buckets, spec.vision)
        except ValueError as error:
            raise ConfigError(f"rollout.patch_buckets: {error}") from error


def _check_ids(spec: ModelSpec, tokenizer: Tokenizer, place: Path) -> None:
    if tokenizer.vocab_size > spec.text.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} ids, the model {spec.text.vocab_size:,}"
        raise ConfigError(f"model.tokenizer: {place} has {sizes}")
    pairs = {
        "<|image_pad|>": (tokenizer.image_pad, spec.image_token),
        "<|video_pad|>": (tokenizer.video_pad, spec.video_token),
        "<|vision_start|>": (tokenizer.vision_start, spec.vision_start),
        "<|vision_end|>": (tokenizer.vision_end, spec.vision_end),
    }
    for name, (ours, models) in pairs.items():
        if ours != models:
            raise ConfigError(f"model.tokenizer: {name} is id {ours} in {place}, {models} in the model")
