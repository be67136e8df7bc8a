"""Logical axes of weights and activations -> mesh axes: one table, and the only place that knows both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pyvision_jax.parallel.mesh import AXES

TABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data", "fsdp"),  # rows of a batch, pictures of a batch
        "embed": ("fsdp",),  # the model axis of a weight
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """`table[logical axis]` = the mesh axes that split it.

    Axes in `replicated_if_uneven` stay whole where their size is not a multiple of the devices (few key heads over many
    tensor devices); any other uneven split is an error.
    """

    table: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: TABLE)
    replicated_if_uneven: frozenset[str] = frozenset({"kv_heads"})

    def __post_init__(self) -> None:
        for name, axes in self.table.items():
            unknown = [axis for axis in axes if axis not in AXES]
            if unknown:
                raise ValueError(f"rule {name!r} names unknown mesh axes {unknown}; there are {AXES}")

    def spec(
        self,
        axes: tuple[str | None, ...],
        shape: tuple[int, ...] | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> PartitionSpec:
        """Partition of an array with these logical axes (None: whole).

        With shape and mesh, sizes are checked too. Raises ValueError for an unknown logical axis, for two axes of one
        array on the same mesh axis (a collision), and for an uneven split.
        """
        used: dict[str, str] = {}
        parts: list[tuple[str, ...] | None] = []
        for position, name in enumerate(axes):
            if name is None:
                parts.append(None)
                continue
            if name not in self.table:
                raise ValueError(f"logical axis {name!r} of {axes} has no rule; known are {sorted(self.table)}")
            mapped = self.table[name]
            for axis in mapped:
                if axis in used:
                    raise ValueError(f"axes {used[axis]!r} and {name!r} of {axes} both map to mesh axis {axis!r}")
                used[axis] = name
            if shape is not None and mesh is not None:
                count = math.prod(mesh.shape[axis] for axis in mapped)
                if shape[position] % count:
                    if name not in self.replicated_if_uneven:
                        raise ValueError(
                            f"axis {name!r} of size {shape[position]} does not split over {count} devices "
                            f"({' x '.join(mapped)}): change the mesh"
                        )
                    mapped = ()
            parts.append(mapped or None)
        return PartitionSpec(*parts)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec(axes, shape, mesh))


DEFAULT_RULES = Rules()


def shard(x: jax.Array, *axes: str | None, rules: Rules = DEFAULT_RULES) -> jax.Array:
    """Hold x to the partition of these logical axes on the mesh of `jax.set_mesh`; without a mesh, x as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, rules.spec(axes, x.shape, mesh))
