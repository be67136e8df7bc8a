"""One mesh, one table of rules."""

from pyvision_jax.parallel.mesh import AXES, abstract_mesh, make_mesh, mesh_shape
from pyvision_jax.parallel.rules import DEFAULT_RULES, Rules, shard

__all__ = ["AXES", "DEFAULT_RULES", "Rules", "abstract_mesh", "make_mesh", "mesh_shape", "shard"]
