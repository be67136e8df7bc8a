"""Log-probabilities of given tokens without keeping the logits of a whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pyvision_jax.ops.linear import linear


def token_logprobs(
    hidden: Float[Array, "*b t d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "*b t"],
    temperatures: Float[Array, "*b t"],
    forbidden: Bool[Array, " v"] | None = None,
    chunk: int = 0,
) -> tuple[Float[Array, "*b t"], Float[Array, "*b t"]]:
    """(log-probability of each target, entropy of its distribution), both float32.

    Logits are taken in float32 and divided by `temperatures` (> 0); `forbidden` ids leave the distribution. A target
    that is itself forbidden (only ever at a position of weight 0, such as a picture token) is scored with its own
    logit, so that its value and gradient stay finite. `chunk` positions of the time axis are scored at a time and again
    in the backward pass, so at most [*b, chunk, v] logits are alive; 0 scores all at once.
    """
    t = hidden.shape[-2]
    if chunk <= 0 or chunk >= t:
        return _score(hidden, head, targets, temperatures, forbidden)
    pad = -t % chunk
    leading = hidden.ndim - 2

    def split(x: Array, fill: float) -> Array:  # time axis -> [chunks, *b, chunk, ...]
        widths = [(0, 0)] * x.ndim
        widths[leading] = (0, pad)
        x = jnp.pad(x, widths, constant_values=fill)
        x = x.reshape(*x.shape[:leading], (t + pad) // chunk, chunk, *x.shape[leading + 1 :])
        return jnp.moveaxis(x, leading, 0)

    @jax.checkpoint
    def body(carry: None, xs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return carry, _score(xs[0], head, xs[1], xs[2], forbidden)

    _, scored = jax.lax.scan(body, None, (split(hidden, 0), split(targets, 0), split(temperatures, 1)))
    join = [jnp.moveaxis(x, 0, leading).reshape(*targets.shape[:leading], t + pad)[..., :t] for x in scored]
    return join[0], join[1]


@jax.named_scope("token_logprobs")
def _score(
    hidden: Array, head: Array, targets: Array, temperatures: Array, forbidden: Array | None
) -> tuple[Array, Array]:
    logits = linear(hidden, head, jnp.float32)
    logits = logits / temperatures.astype(jnp.float32)[..., None]
    # A comparison instead of a gather: no scatter in the backward pass, and a head sharded over v needs no exchange.
    chosen = jnp.arange(head.shape[1], dtype=targets.dtype) == targets[..., None]
    target = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
    kept = logits if forbidden is None else jnp.where(forbidden, -jnp.inf, logits)
    top = jax.lax.stop_gradient(jnp.max(kept, axis=-1, keepdims=True))
    weights = jnp.exp(kept - top)
    total = jnp.sum(weights, axis=-1)
    normaliser = jnp.log(total) + top[..., 0]
    entropy = normaliser - jnp.sum(weights * logits, axis=-1) / total  # weight of a forbidden id is exactly 0
    return target - normaliser, entropy
