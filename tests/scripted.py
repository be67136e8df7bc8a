"""An engine whose rows say what a test wrote for them; everything but the sampling is the real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pyvision_jax.config import ProtocolConfig, RolloutConfig, SamplingConfig
from pyvision_jax.rollout.engine import Engine
from pyvision_jax.rollout.requests import Row
from pyvision_jax.worlds import tiny, warmup

Script = Callable[[int, int], str]  # (sibling, turn) -> text; "<end>" at its end stands for the end token


class ScriptedEngine(Engine):
    """Rows emit the script's ids one chunk at a time; slots, limits, stops and positions are Engine's own."""

    def __init__(self, script: Script, rollout: RolloutConfig, tags: Sequence, protocol: ProtocolConfig | None = None):
        import jax

        tokens = tiny.tokenizer()
        spec = tiny.model_spec(tokens)
        params = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, np.float32),
            jax.eval_shape(lambda k: warmup.fresh(spec, k), jax.random.key(0)),
        )
        super().__init__(params, spec, rollout, SamplingConfig(), tokens, tags, tiny.processor())
        self.script, self.tokens = script, tokens
        self.turns: dict[int, int] = {}
        self.pending: dict[int, list[int]] = {}

    def _admit(self) -> None:
        while self._queue and self._slots.free:
            row = self._queue.popleft()
            if row.running and row.slot < 0:
                row.slot = self._slots.take()

    def _decode(self, rows: list[Row]) -> None:
        for row in rows:
            key = row.handle.id
            if not self.pending.get(key):
                turn = self.turns.get(key, 0)
                text = self.script(row.handle.index, turn)
                ids = self.tokens.encode(text.removesuffix("<end>"))
                self.pending[key] = [*ids, self.tokens.im_end] if text.endswith("<end>") else ids
                self.turns[key] = turn + 1
            ids, states, state = [], [], row.state
            while self.pending[key] and len(ids) < min(self.rollout.chunk, row.left):
                ids.append(self.pending[key].pop(0))
                states.append(state)
                state = int(self.automaton.next[state, ids[-1]])
                if self.automaton.stop[state]:
                    self.pending[key] = []
            n = len(ids)
            floats = np.full(n, -0.5, np.float32)
            self._book(
                row,
                n,
                {
                    "id": np.array(ids, np.int32),
                    "state": np.array(states, np.int32),
                    "logprob": floats,
                    "policy_logprob": floats,
                    "entropy": -floats,
                },
            )
