"""Arguments of the engine's own decode program, for the gates on what it compiles to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.rollout.step import Control, Tables

STATIC = {"chunk": 4, "top_p": 1.0, "top_k": 0, "implementation": "xla"}


def arguments(cfg: ModelSpec, slots: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Control, Tables]:
    """(cache, control, tables) of `slots` rows of `length`, all zeros, under an automaton of one state."""
    zeros = jnp.zeros(slots, jnp.int32)
    control = Control(
        token=zeros,
        state=zeros,
        length=zeros,
        delta=zeros,
        left=zeros,
        seed=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.ones((slots, 1), jnp.float32),
    )
    vocab = cfg.text.vocab_size
    tables = Tables(
        next=jnp.zeros((1, vocab), jnp.int32),
        stop=jnp.zeros(1, bool),
        region=jnp.zeros(1, jnp.int32),
        forbidden=jnp.zeros(vocab, bool),
    )
    return model.init_cache(cfg, slots, length, dtype), control, tables
