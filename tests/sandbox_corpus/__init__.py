"""The open abuse corpus of the sandbox: what hostile code tries, and the verdict that each try must get.

`case.py` says what a case is, `files.py` to `protocol.py` hold the cases of sections A to F, `beyond*.py` and
`reports.py` more of their kind, `trial.py` runs one case, `worker.py` is the process that owns the pool, and
`launch.py` starts it.
"""

from .beyond import CASES as BEYOND
from .beyond_kernel import CASES as BEYOND_KERNEL
from .case import Case
from .files import CASES as FILES
from .network import CASES as NETWORK
from .pictures import CASES as PICTURES
from .processes import CASES as PROCESSES
from .protocol import CASES as PROTOCOL
from .reports import CASES as REPORTS
from .resources import CASES as RESOURCES

CASES: tuple[Case, ...] = (
    *FILES, *NETWORK, *PROCESSES, *RESOURCES, *PICTURES, *PROTOCOL, *BEYOND, *BEYOND_KERNEL, *REPORTS,
)  # fmt: skip
BY_ID = {case.id: case for case in CASES}


def at(level: str) -> list[Case]:
    """The cases whose verdict holds at this level."""
    return [case for case in CASES if level in case.levels]
