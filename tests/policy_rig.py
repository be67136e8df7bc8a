"""A policy whose turns a test writes, opened as `recipes.acting` opens a real one."""

from __future__ import annotations

import time

from pyvision_jax.agents.pyvision import PyVisionImage
from pyvision_jax.config import ImageConfig, ProtocolConfig, RLConfig, RolloutConfig, SandboxConfig
from pyvision_jax.recipes.acting import Acting
from pyvision_jax.recipes.build import Host
from pyvision_jax.worlds import needle, tiny
from pyvision_sandbox import SandboxPool
from tests.scripted import ScriptedEngine

ANSWER = "<answer>\n\\boxed{7}\n</answer><end>"


def code(text: str) -> str:
    return f"<code>\n```python\n{text}\n```\n</code>"


class SlowEngine(ScriptedEngine):
    """`delay`: seconds of a chunk. `fault`: raised by the next one."""

    delay = 0.0
    fault: Exception | None = None

    def _decode(self, rows):
        if self.fault is not None:
            raise self.fault
        time.sleep(self.delay)
        super()._decode(rows)


class Script:
    """What the policy says, turn by turn; the last turn again and again."""

    def __init__(self) -> None:
        self.turns: list[str] = [ANSWER]

    def __call__(self, sibling: int, turn: int) -> str:
        return self.turns[min(turn, len(self.turns) - 1)].replace("{sibling}", str(sibling))


def settings(slots: int = 4, max_length: int = 900) -> RLConfig:
    return RLConfig(
        protocol=ProtocolConfig(template="brief", max_calls=3, bind_figures=True),
        image=ImageConfig(tiny.MIN_PIXELS, tiny.MAX_PIXELS, 9.0),
        rollout=RolloutConfig(
            slots=slots,
            max_length=max_length,
            max_turn_length=600,
            chunk=8,
            prefill_buckets=(64,),
            patch_buckets=(36,),
        ),
        sandbox=SandboxConfig(profile="numpy_pil"),
    )


def scripted(pool: SandboxPool, script: Script, **sizes: int) -> Acting:
    config = settings(**sizes)
    tokens, processor = tiny.tokenizer(), tiny.processor()
    spec = tiny.model_spec(tokens)
    protocol = PyVisionImage(config.protocol, config.image, tokens, processor, spec, needle.GENERATORS)
    engine = SlowEngine(script, config.rollout, protocol.tags)
    return Acting(config, Host(spec, tokens, processor, protocol), pool, engine)
