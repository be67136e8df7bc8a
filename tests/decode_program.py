"""Arguments of the engine's own decode program, for the gates on what it compiles to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pyvision_jax.models import qwen2_5_vl as model
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.rollout.repetition import Repetition, Watch
from pyvision_jax.rollout.sampling import Filters, no_ids
from pyvision_jax.rollout.step import Control, Tables

STATIC = {"chunk": 4, "implementation": "xla"}
EVERYTHING = {  # all that is off by default
    **STATIC,
    "filters": Filters(top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.05),
    "top_entropy": 20,
    "repetition": Repetition(length=4, share=0.5, tail=24, minimum=8),
}


def arguments(
    cfg: ModelSpec, slots: int, length: int, dtype: Any = jnp.float32, static: dict[str, Any] = STATIC
) -> tuple[Any, Control, Tables, Watch | None]:
    """(cache, control, tables, watch) of `slots` rows of `length`, all zeros, under an automaton of one state."""
    zeros, vocab = jnp.zeros(slots, jnp.int32), cfg.text.vocab_size
    control = Control(
        token=zeros,
        state=zeros,
        length=zeros,
        delta=zeros,
        left=zeros,
        seed=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.ones((slots, 1), jnp.float32),
        seen=jnp.asarray(no_ids(slots, vocab)) if "filters" in static else None,
    )
    tables = Tables(
        next=jnp.zeros((1, vocab), jnp.int32),
        stop=jnp.zeros(1, bool),
        region=jnp.zeros(1, jnp.int32),
        forbidden=jnp.zeros(vocab, bool),
    )
    watch = Watch.empty(static["repetition"], slots, length) if "repetition" in static else None
    return model.init_cache(cfg, slots, length, dtype), control, tables, watch
