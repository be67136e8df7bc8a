"""What differs between the versions of jax that are supported; the only place that looks at the version."""

from __future__ import annotations

import jax
from jaxtyping import Array, Shaped

# Without the promise of a stable order a GPU selects; with it, it sorts the whole row once k is above 16.
_TOP_K = {"is_stable": False} if jax.__version_info__ >= (0, 11) else {}


def top_values(x: Shaped[Array, "*b v"], k: int) -> Shaped[Array, "*b k"]:
    """The k largest values of each row, ties counted one by one; take their order for unspecified."""
    return jax.lax.top_k(x, k, **_TOP_K)[0]
