"""Out-of-process Python sessions for policies that write code: millisecond starts, typed results, pictures as arrays.

from pyvision_sandbox import Policy, SandboxPool
with SandboxPool(Policy(cell_timeout=5)) as pool, pool.session(seed=1, images={"image_clue_0": image}) as session:
    result = session.run("image_clue_0.crop((0, 0, 64, 64))")
    result.status, result.images[0].shape
    other = session.branch()  # the same variables and files, from here on its own
"""

from .aio import AsyncSandboxPool, AsyncSession
from .metrics import Metrics, Spread
from .policy import (
    LEVELS,
    BranchUnsafe,
    LevelUnavailable,
    Mechanism,
    Policy,
    Probe,
    Report,
    SandboxError,
    SandboxUnavailable,
)
from .pool import SandboxPool
from .result import STATUSES, Result, Usage
from .session import Session
from .text import observation_text

__all__ = [
    "LEVELS", "STATUSES", "AsyncSandboxPool", "AsyncSession", "BranchUnsafe", "LevelUnavailable", "Mechanism",
    "Metrics", "Policy", "Probe", "Report", "Result", "SandboxError", "SandboxPool", "SandboxUnavailable", "Session",
    "Spread", "Usage", "observation_text",
]  # fmt: skip
