"""The train step: one program for a batch that fits, two (accumulate, apply) for one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from pyvision_jax.config import AlgorithmConfig
from pyvision_jax.data.batch import TokenBatch
from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.ops import token_logprobs
from pyvision_jax.parallel import DEFAULT_RULES, Rules
from pyvision_jax.training.losses import KL_ESTIMATORS, Mean, kl_penalty, policy_loss, weighted
from pyvision_jax.training.state import Optimizer, TrainState, merge, partition

_LOGITS_BYTES = 256 * 2**20  # of float32 logits alive at a time


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: `sft` is the negative log-likelihood, `policy` the clipped surrogate with its extra terms."""

    kind: str = "sft"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("sft", "policy"):
            raise ValueError(f"objective {self.kind!r} is neither sft nor policy")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator {self.kl_estimator!r}; one of {', '.join(KL_ESTIMATORS)}")
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1, or 0 for off")

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Objective:
        names = ("clip_low", "clip_high", "dual_clip", "kl_coef", "kl_estimator", "entropy_coef")
        return cls("policy", **{name: vars(algorithm)[name] for name in names})


@dataclasses.dataclass(frozen=True, eq=False)  # an array in it: hashed by identity
class Scorer:
    """Log-probabilities of a packed batch as the trainer sees them: the sampler's distribution at each temperature.

    `forbidden` (bool [v]) is the mask of the sampler. `dtype` is what the parameters are cast to for the computation.
    """

    spec: ModelSpec
    forbidden: np.ndarray | None = None
    dtype: str = "float32"
    remat: str = "none"
    implementation: str = "xla"

    def __call__(self, params: Any, batch: TokenBatch) -> tuple[Array, Array]:
        """(log-probability of each target, entropy), float32 [b, t]; the last position of a segment means nothing."""
        if self.dtype != "float32":
            params = jax.tree.map(lambda leaf: leaf.astype(self.dtype), params)
        hidden = model.hidden_states(params, batch, self.spec, self.remat, self.implementation)
        head = model.head_matrix(params.text)
        rows, length = batch.ids.shape
        chunk = max(1, _LOGITS_BYTES // (4 * rows * head.shape[1]))
        forbidden = None if self.forbidden is None else jnp.asarray(self.forbidden)
        return token_logprobs(
            hidden, head, batch.targets, batch.temperatures, forbidden, chunk=0 if chunk >= length else chunk
        )


def batch_sums(
    logprobs: Array, entropy: Array, batch: TokenBatch, objective: Objective
) -> tuple[Array, dict[str, Mean], dict[str, Array]]:
    """(sum of weighted losses, metrics as pairs, metrics of which the largest counts) of one micro-batch."""
    weights = batch.loss_weights
    learned = (weights > 0).astype(jnp.float32)
    if objective.kind == "sft":
        loss = weighted(-logprobs, weights)
        return loss.total, {"actor/loss": loss, "actor/entropy": weighted(entropy, learned)}, {}

    token = policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
    )
    policy = weighted(token.loss, weights)
    total = policy.total
    gap = jnp.abs(jnp.exp(logprobs) - jnp.exp(batch.old_logprobs))
    difference = jnp.abs(logprobs - batch.old_logprobs)
    means = {
        "actor/pg_loss": policy,
        "actor/pg_clipfrac": weighted(token.clipped, learned),
        "actor/pg_clipfrac_lower": weighted(token.clipped_dual, learned),
        "actor/ppo_kl": weighted(-token.log_ratio, learned),
        "actor/entropy": weighted(entropy, learned),
        "training/rollout_probs_diff_mean": weighted(gap, learned),
        "training/rollout_probs_diff_square": weighted(jnp.square(gap), learned),
        "training/rollout_logprobs_diff_mean": weighted(difference, learned),
    }
    if objective.kl_coef:
        kl = kl_penalty(logprobs, batch.ref_logprobs, objective.kl_estimator)
        penalty = weighted(kl, weights)
        total = total + objective.kl_coef * penalty.total
        means["actor/kl_loss"] = penalty
    if objective.entropy_coef:
        total = total - objective.entropy_coef * weighted(entropy, weights).total
    means["actor/loss"] = Mean(total, policy.weight)
    peaks = {
        "training/rollout_probs_diff_max": jnp.max(jnp.where(learned > 0, gap, 0.0)),
        "training/rollout_logprobs_diff_max": jnp.max(jnp.where(learned > 0, difference, 0.0)),
    }
    return total, means, peaks


def _finish(means: dict[str, Mean], peaks: dict[str, Array], divisor: Array) -> dict[str, Array]:
    out = {name: pair.value for name, pair in means.items()}
    weight = means["actor/loss"].weight
    for name in ("actor/loss", "actor/pg_loss", "actor/kl_loss"):
        if name in out:
            out[name] = jnp.where(weight > 0, means[name].total / jnp.maximum(divisor, 1e-30), 0.0)
    square = out.pop("training/rollout_probs_diff_square", None)
    if square is not None:
        spread = square - jnp.square(out["training/rollout_probs_diff_mean"])
        out["training/rollout_probs_diff_std"] = jnp.sqrt(jnp.maximum(spread, 0.0))
    return out | peaks


class TrainStep:
    """`step(state, batches, divisor=None) -> (state, metrics)`: one optimizer update from any number of micro-batches.

    The state is donated. The weighted losses of all micro-batches are summed and divided once, by the sum of all
    weights or by `divisor` (`losses.token_weights` says when). Metrics are float32 scalars on the device, named as in
    verl.
    """

    def __init__(self, scorer: Scorer, optimizer: Optimizer, objective: Objective, mesh: Mesh | None = None):
        self._scorer = scorer
        self._optimizer = optimizer
        self._objective = objective
        self.mesh = mesh
        self._fused = jax.jit(self._fused_step, donate_argnums=0)
        self._first = jax.jit(self._sums)
        self._add = jax.jit(self._accumulate, donate_argnums=1)
        self._apply = jax.jit(self._update, donate_argnums=0)

    def __call__(
        self, state: TrainState, batches: Sequence[TokenBatch], divisor: float | None = None
    ) -> tuple[TrainState, dict[str, Array]]:
        if not batches:
            raise ValueError("a train step needs at least one micro-batch")
        given = jnp.float32(-1.0 if divisor is None else divisor)
        with jax.set_mesh(self.mesh) if self.mesh is not None else nullcontext():
            placed = put(batches[0], self.mesh)
            if len(batches) == 1:
                return self._fused(state, placed, given)
            sums = self._first(state.params, placed)
            for batch in batches[1:]:
                sums = self._add(state.params, sums, put(batch, self.mesh))
            return self._apply(state, sums, given)

    def _sums(self, params: Any, batch: TokenBatch) -> tuple[Any, dict[str, Mean], dict[str, Array]]:
        trained, frozen = partition(params, self._optimizer.config.freeze)

        def loss(trained: Any) -> tuple[Array, tuple[dict[str, Mean], dict[str, Array]]]:
            logprobs, entropy = self._scorer(merge(trained, frozen), batch)
            total, means, peaks = batch_sums(logprobs, entropy, batch, self._objective)
            return total, (means, peaks)

        gradients, (means, peaks) = jax.grad(loss, has_aux=True)(trained)
        return gradients, means, peaks

    def _accumulate(self, params: Any, sums: Any, batch: TokenBatch) -> Any:
        gradients, means, peaks = self._sums(params, batch)
        return (
            jax.tree.map(jnp.add, sums[0], gradients),
            {name: sums[1][name] + pair for name, pair in means.items()},
            {name: jnp.maximum(sums[2][name], peak) for name, peak in peaks.items()},
        )

    def _update(self, state: TrainState, sums: Any, given: Array) -> tuple[TrainState, dict[str, Array]]:
        gradients, means, peaks = sums
        weight = means["actor/loss"].weight
        divisor = jnp.where(given > 0, given, weight)
        scale = jnp.where(weight > 0, 1.0 / jnp.maximum(divisor, 1e-30), 0.0)
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        state, metrics = self._optimizer.update(state, gradients, weight)
        return state, metrics | _finish(means, peaks, divisor)

    def _fused_step(self, state: TrainState, batch: TokenBatch, given: Array) -> tuple[TrainState, dict[str, Array]]:
        return self._update(state, self._sums(state.params, batch), given)


def put(batch: TokenBatch, mesh: Mesh | None, rules: Rules = DEFAULT_RULES) -> TokenBatch:
    """The batch on the devices, its rows and pictures split over the mesh; each process brings its own rows."""
    if mesh is None:
        return jax.device_put(batch)

    def place(value: np.ndarray, axis: int = 0) -> Array:
        names = tuple("batch" if at == axis else None for at in range(value.ndim))
        return jax.make_array_from_process_local_data(rules.sharding(names, value.shape, mesh), value)

    placed = jax.tree.map(place, dataclasses.replace(batch, positions=cast(Any, None)))
    return dataclasses.replace(placed, positions=place(np.asarray(batch.positions), axis=1))
