"""Parameters and optimizer state, and how one follows from the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pyvision_jax.config import OptimizerConfig

PARTS = ("vision", "merger", "text")
SCHEDULES = ("constant", "cosine", "linear")


@struct.dataclass
class TrainState:
    """What a train step takes and gives back, and what a checkpoint holds."""

    step: Int[Array, ""]  # optimizer updates done; an update that was skipped does not count
    params: Any  # float32
    opt_state: Any  # of the trained parts only


def part_of(path: Sequence[Any]) -> str:
    """Top-level part of the parameter tree that a leaf belongs to: `merger` lies inside the vision tower."""
    names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
    return "merger" if "merger" in names else names[0]


def partition(params: Any, freeze: Sequence[str]) -> tuple[Any, Any]:
    """(trained, frozen): the same tree twice, with None where a leaf is in the other one.

    Gradients are taken of the first only, so no backward pass is built for what is frozen. Raises ValueError for a part
    that does not exist, and when nothing is left to train.
    """
    unknown = [part for part in freeze if part not in PARTS]
    if unknown:
        raise ValueError(f"optimizer.freeze names {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if set(freeze) == set(PARTS):
        raise ValueError("optimizer.freeze names every part: nothing is left to train")
    trained = jax.tree_util.tree_map_with_path(lambda path, leaf: None if part_of(path) in freeze else leaf, params)
    frozen = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if part_of(path) in freeze else None, params)
    return trained, frozen


def merge(trained: Any, frozen: Any) -> Any:
    """Inverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW (arXiv 1711.05101) with a schedule over `steps` updates, global-norm clipping and frozen parts.

    Weight decay leaves biases and norm scales alone. Raises ValueError for an unknown schedule or part.
    """

    config: OptimizerConfig
    steps: int

    def __post_init__(self) -> None:
        if self.config.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule {self.config.schedule!r}; one of {', '.join(SCHEDULES)}")
        partition({}, self.config.freeze)

    @property
    def transform(self) -> optax.GradientTransformation:
        """Gradients to the direction of an update, before the learning rate."""
        config = self.config
        return optax.chain(
            optax.scale_by_adam(config.b1, config.b2, config.eps),
            optax.add_decayed_weights(config.weight_decay, mask=_decays),
        )

    def lr(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Learning rate of update `step` (from 0): linear warm-up, then constant or falling to final_lr_ratio."""
        config = self.config
        warm = jnp.minimum(1.0, (step + 1) / max(config.warmup_steps, 1))
        if config.schedule == "constant":
            return config.lr * warm
        span = max(self.steps - config.warmup_steps, 1)
        gone = jnp.clip((step - config.warmup_steps) / span, 0.0, 1.0)
        left = 1.0 - gone if config.schedule == "linear" else 0.5 * (1.0 + jnp.cos(math.pi * gone))
        return config.lr * warm * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * left)

    def init(self, params: Any) -> TrainState:
        """State of step 0; moments lie where their parameters lie. Takes over `params`: the first step donates them."""
        trained, _ = partition(params, self.config.freeze)
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=self.transform.init(trained))
        place = jax.tree.leaves(params)[0].sharding
        if not isinstance(place, NamedSharding):
            return state
        # Counters are born on one device; a checkpoint would bring them back pinned there, beside a mesh of many.
        everywhere = NamedSharding(place.mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf.sharding, NamedSharding) else jax.device_put(leaf, everywhere), state
        )

    def update(self, state: TrainState, gradients: Any, weight: Array) -> tuple[TrainState, dict[str, Array]]:
        """One update from the mean gradient of the trained parts; `weight` is what the mean was taken over.

        Nothing moves, moments and step included, when nothing was learned from (weight 0) or the gradient is not
        finite; the metric `actor/update_skipped` says so.
        """
        trained, frozen = partition(state.params, self.config.freeze)
        norm = optax.tree.norm(gradients)
        if self.config.clip_norm > 0:
            scale = jnp.minimum(1.0, self.config.clip_norm / jnp.maximum(norm, 1e-12))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        directions, opt_state = self.transform.update(gradients, state.opt_state, trained)
        lr = self.lr(state.step)
        moved = jax.tree.map(lambda p, d: (p - lr * d).astype(p.dtype), trained, directions)
        sound = (weight > 0) & jnp.isfinite(norm)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)

        state = TrainState(
            step=state.step + sound.astype(jnp.int32),
            params=merge(choose(moved, trained), frozen),
            opt_state=choose(opt_state, state.opt_state),
        )
        return state, {"actor/grad_norm": norm, "actor/lr": lr, "actor/update_skipped": 1.0 - sound}


def _decays(params: Any) -> Any:
    def one(path: Sequence[Any], _: Any) -> bool:
        name = path[-1].name if isinstance(path[-1], jax.tree_util.GetAttrKey) else ""
        return "bias" not in name and "norm" not in name

    return jax.tree_util.tree_map_with_path(one, params)
