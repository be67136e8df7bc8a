"""The one device mesh: axes `data`, `fsdp`, `tensor`, in this order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from pyvision_jax.config import MeshConfig

AXES = ("data", "fsdp", "tensor")


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """Devices along each axis, with a -1 filled in. Raises ValueError if the axes cannot cover `devices` exactly."""
    sizes = [config.data, config.fsdp, config.tensor]
    asked = ", ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh ({asked}): sizes are positive, and at most one may be -1")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if math.prod(sizes) != devices:
        raise ValueError(f"mesh ({asked}) does not cover {devices} devices")
    return sizes[0], sizes[1], sizes[2]


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over these jax devices (all of the process group by default)."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        mesh_shape(config, len(devices)), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def abstract_mesh(shape: tuple[int, int, int]) -> AbstractMesh:
    """A mesh without devices, to trace and lower programs for machines that are not there."""
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
