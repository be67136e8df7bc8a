"""Rollouts for a recipe: one engine, one sandbox pool, and an agent loop per protocol over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pyvision_jax.agents.loop import AgentLoop, Collected, tool_threads
from pyvision_jax.agents.protocol import AgentProtocol, Prompt
from pyvision_jax.config import ProtocolConfig, RolloutConfig, SamplingConfig, SandboxConfig
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.media import ImageStore
from pyvision_jax.data.records import Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.rollout.engine import Engine
from pyvision_sandbox import Policy, SandboxPool, SandboxUnavailable
from pyvision_sandbox.policy import TRUSTED_ONLY

SAMPLED = "landlock"  # the weakest level at which sampled code runs


def open_pool(config: SandboxConfig, trusted: bool = False) -> SandboxPool:
    """The sandbox that a configuration asks for.

    trusted: what it runs was not sampled here, but is replayed from traces that their owner vouches for; then the level
    `seccomp` will do if `config.min_level` names it. Raises `SandboxUnavailable` below `config.min_level`, and for
    sampled code below `landlock`, whatever that says.
    """
    policy = Policy(
        profile=config.profile,
        memory_mb=config.memory_mb,
        cell_timeout=config.cell_timeout,
        max_text=config.max_text,
        max_images=config.max_images,
    )
    if trusted or config.min_level not in TRUSTED_ONLY:
        return SandboxPool(policy, min_level=config.min_level, workers=config.workers or None)
    try:
        return SandboxPool(policy, min_level=SAMPLED, workers=config.workers or None)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(
            f"sandbox.min_level={config.min_level} lets trusted traces be replayed, and no more: code that a policy "
            f"samples runs at level {SAMPLED} or above. {error}"
        ) from error


class Collector:
    """What `recipes.rl.run` collects with, and what evaluation uses as well, so that both run the same programs.

    The engine is made with the first parameters and keeps its compiled programs from then on. `images` holds the
    pictures that trajectories name; whoever has used them empties it.
    """

    def __init__(
        self,
        *,
        model_spec: ModelSpec,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        protocol: AgentProtocol,
        protocol_config: ProtocolConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        pool: SandboxPool,
        group_size: int,
    ):
        self.images = ImageStore()
        self._spec, self._tokenizer, self._processor = model_spec, tokenizer, processor
        self._protocol, self._protocol_config = protocol, protocol_config
        self._rollout, self._sampling, self._pool, self._group_size = rollout, sampling, pool, group_size
        self._engine: Engine | None = None
        self._loop: AgentLoop | None = None

    def __call__(self, params: Any, records: Sequence[Record], *, seed: int, version: int) -> Collected:
        """A group of rollouts for each record, at the run's temperature (`recipes.rl.Collect`)."""
        engine = self._with(params, version)
        if self._loop is None:
            self._loop = self._make_loop(engine, self._protocol, self._protocol_config)
        return self._loop.collect(records, group_size=self._group_size, seed=seed, prefix=f"{version + 1}/")

    def evaluate(
        self,
        params: Any,
        records: Sequence[Record],
        *,
        seed: int,
        temperature: float,
        protocol: AgentProtocol | None = None,
        protocol_config: ProtocolConfig | None = None,
        prompts: Sequence[Prompt] | None = None,
        tries: int = 1,
    ) -> Collected:
        """`tries` rollouts of each record at one temperature (0: greedy), by the run's protocol or another."""
        engine = self._with(params, -1)
        loop = self._make_loop(engine, protocol or self._protocol, protocol_config or self._protocol_config)
        sampling = dataclasses.replace(self._sampling, temperature=temperature, code_temperature=None)
        try:
            return loop.collect(records, group_size=tries, seed=seed, sampling=sampling, prompts=prompts)
        finally:
            loop.close()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _with(self, params: Any, version: int) -> Engine:
        if self._engine is None:
            self._engine = Engine(
                params,
                self._spec,
                self._rollout,
                self._sampling,
                self._tokenizer,
                self._protocol.tags,
                self._processor,
                version=version,
            )
        else:
            self._engine.update(params, version)
        return self._engine

    def _make_loop(self, engine: Engine, protocol: AgentProtocol, config: ProtocolConfig) -> AgentLoop:
        return AgentLoop(engine, protocol, self._pool, config, self._tokenizer, self.images, tool_threads())
