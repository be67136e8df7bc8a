"""Weights before they exist: shapes, logical axes and initialisers, from which everything else is derived."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from pyvision_jax.parallel.rules import DEFAULT_RULES, Rules


@dataclasses.dataclass(frozen=True)
class Spec:
    """One weight: its shape, the logical axis of each dimension, and how it begins. A leaf of a parameter tree."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"  # normal | zeros | ones
    std: float = 0.02  # of "normal"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in rank")
        if self.init not in ("normal", "zeros", "ones"):
            raise ValueError(f"init {self.init!r} is not normal, zeros or ones")


@functools.partial(jax.jit, static_argnums=(0, 2))
def _init_leaf(spec: Spec, key: jax.Array, dtype: DTypeLike) -> jax.Array:
    if spec.init == "normal":
        return (jax.random.normal(key, spec.shape, jnp.float32) * spec.std).astype(dtype)
    return jnp.full(spec.shape, 0 if spec.init == "zeros" else 1, dtype)


def init_params(
    specs: Any, key: jax.Array, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, rules: Rules = DEFAULT_RULES
) -> Any:
    """Parameters of a tree of Spec. A leaf depends on the key and its place in the tree, not on the mesh."""
    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    made = [_init_leaf(spec, keys[i], jnp.dtype(dtype)) for i, spec in enumerate(leaves)]
    params = jax.tree.unflatten(tree, made)
    return params if mesh is None else jax.device_put(params, shardings(specs, mesh, rules))


def abstract_params(
    specs: Any,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Any:
    """The same tree of jax.ShapeDtypeStruct, with shardings if a mesh is given."""

    def one(spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, rules.spec(spec.axes, spec.shape, mesh))
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    return jax.tree.map(one, specs)


def shardings(specs: Any, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES) -> Any:
    """The same tree of NamedSharding. Raises ValueError (naming axis and size) where the mesh does not fit."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, rules.spec(spec.axes, spec.shape, mesh)), specs)
