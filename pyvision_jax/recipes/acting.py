"""A policy that acts: what `rollout`, `chat` and `serve` run with, from the configuration of any run or of none."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import OmegaConf

from pyvision_jax.config import DataConfig, DemoConfig, ImageConfig, ModelConfig, RLConfig, SFTConfig
from pyvision_jax.config_load import ConfigError, load
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.models.hf_files import read_json
from pyvision_jax.models.safetensors_io import WeightsError
from pyvision_jax.recipes.build import Host, build_host, build_params
from pyvision_jax.recipes.collect import open_pool
from pyvision_jax.rollout.engine import Engine
from pyvision_sandbox import SandboxPool


def acting_config(
    path: Path | None = None, overrides: Iterable[str] = (), weights: Path | None = None, data: str = ""
) -> RLConfig:
    """The configuration of a policy that is not trained here.

    `path` is a configuration of `pyvision rl`, `sft` or `demo`; what it says of training is left aside. Without one,
    `config.yaml` of the run that left `weights` (RUN_DIR/model) is taken, else the defaults with the pixel limits of
    the weights' `preprocessor_config.json`. `weights` and `data` win over the file and the overrides. Raises
    `ConfigError`.
    """
    overrides = list(overrides)
    if path is None and weights is not None and (weights.parent / "config.yaml").is_file():
        path = weights.parent / "config.yaml"
    kind = RLConfig if path is None else _kind(path)
    if path is not None and kind is RLConfig:
        config = load(RLConfig, path, overrides)
    else:
        config = load(RLConfig, None, overrides, base=_base(path, kind, weights))
    if weights is not None:
        config = dataclasses.replace(config, model=ModelConfig(path=str(weights), dtype=config.model.dtype))
    return dataclasses.replace(
        config,
        # A generated world stands for no data: the checks want some, and a policy that talks reads none.
        data=dataclasses.replace(config.data, train=data) if data else DataConfig(train="needle"),
        packing=dataclasses.replace(
            config.packing, row_length=max(config.packing.row_length, config.rollout.max_length)
        ),
        selection=dataclasses.replace(config.selection, zero_variance=False),
    )


def _kind(path: Path) -> type[RLConfig | SFTConfig | DemoConfig]:
    """Which command a configuration file is for. Raises `ConfigError` for one that cannot be read."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # OmegaConf passes on what its YAML reader raises, which is of several kinds
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    names = set(tree) if isinstance(tree, dict) else set()
    return DemoConfig if names & {"sft", "rl"} else SFTConfig if "batch_size" in names else RLConfig


def _base(path: Path | None, kind: type[Any], weights: Path | None) -> RLConfig:
    if path is None:
        return RLConfig(image=_stored_image(weights))
    held = load(kind, path)
    if isinstance(held, DemoConfig):
        return held.rl
    return RLConfig(seed=held.seed, model=held.model, image=held.image, protocol=held.protocol)


def _stored_image(weights: Path | None) -> ImageConfig:
    file = None if weights is None else weights / "preprocessor_config.json"
    if file is None or not file.is_file():
        return ImageConfig()
    try:
        stored = ImageProcessor.from_hf(read_json(file))
    except (WeightsError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return ImageConfig(min_pixels=stored.min_pixels, max_pixels=stored.max_pixels)


@dataclasses.dataclass(frozen=True)
class Acting:
    """An opened policy: its weights are in `engine`, its tool is `pool`."""

    config: RLConfig
    host: Host
    pool: SandboxPool
    engine: Engine


@contextlib.contextmanager
def open_policy(config: RLConfig, host: Host | None = None) -> Iterator[Acting]:
    """Weights, engine and sandbox of a configuration; the sandbox is closed at the end.

    Raises `ConfigError`, and `SandboxUnavailable` if the machine falls short of `sandbox.min_level`.
    """
    host = host or build_host(config)
    with open_pool(config.sandbox) as pool:
        engine = Engine(
            _params(config),
            host.spec,
            config.rollout,
            config.sampling,
            host.tokenizer,
            host.protocol.tags,
            host.processor,
        )
        yield Acting(config, host, pool, engine)


def _params(config: RLConfig) -> Any:
    """Parameters in the type that is computed in: no float32 copy is made of weights that are only used."""
    dtype = jnp.dtype(config.model.dtype)
    if config.model.path:
        return build_params(config.model, config.seed, dtype=dtype)
    # Random ones are drawn in float32 and rounded, as training has them.
    return jax.tree.map(lambda leaf: leaf.astype(dtype), build_params(config.model, config.seed))
