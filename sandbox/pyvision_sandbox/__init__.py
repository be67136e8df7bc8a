"""Out-of-process Python sessions for policies that write code: millisecond starts, typed results, pictures as arrays.

from pyvision_sandbox import Policy, SandboxPool
with SandboxPool(Policy(cell_timeout=5)) as pool, pool.session(seed=1, images={"image_clue_0": image}) as session:
    result = session.run("image_clue_0.crop((0, 0, 64, 64))")
    result.status, result.images[0].shape
"""

from .policy import LEVELS, Mechanism, Policy, Report, SandboxError, SandboxUnavailable
from .pool import SandboxPool, Session
from .result import STATUSES, Result, Usage
from .text import observation_text

__all__ = [
    "LEVELS", "STATUSES", "Mechanism", "Policy", "Report", "Result", "SandboxError", "SandboxPool",
    "SandboxUnavailable", "Session", "Usage", "observation_text",
]  # fmt: skip
