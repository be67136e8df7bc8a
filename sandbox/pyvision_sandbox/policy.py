"""What a pool is asked for (`Policy`), what it found out about the machine (`Report`), and the errors it raises."""

import dataclasses
import platform
from typing import Any

LEVELS = ("none", "seccomp", "landlock", "namespaces")  # weakest first
PROFILES: dict[str, tuple[str, ...]] = {
    "numpy_pil": ("numpy", "PIL"),
    "vision": ("numpy", "PIL", "matplotlib"),
}
# What each level adds to the one before: named when it is asked for and missing.
_ADDED_BY_LEVEL = {
    "seccomp": "a seccomp system-call filter",
    "landlock": "Landlock file rules",
    "namespaces": "user, pid, mount and network namespaces",
}


class SandboxError(RuntimeError):
    """The sandbox itself failed (its server died, no process could start): infrastructure, never the code's fault."""


class SandboxUnavailable(SandboxError):
    """The level of isolation that was asked for cannot be had here; the message names what is missing."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Limits of one session. Times are seconds of wall time unless said otherwise.

    Raises ValueError for a limit that is too small or a profile that does not exist.
    """

    profile: str = "vision"  # what is imported before the session starts: see PROFILES
    memory_mb: int = 512  # address space beyond what the preloaded process has mapped already
    tmp_mb: int = 64  # the largest file that a session may write
    cell_timeout: float = 10.0  # after this the cell gets a KeyboardInterrupt and the state is kept
    grace: float = 1.0  # after this much more it is killed
    session_cpu: int = 600  # CPU seconds of one session over all its cells
    max_text: int = 64_000  # bytes of UTF-8 kept of stdout, of stderr and of the repr each; head and tail are kept
    max_images: int = 16  # pictures returned by one cell
    max_pixels: int = 25_000_000  # of one picture
    max_total_pixels: int = 50_000_000  # of all pictures of one cell
    max_ratio: float = 200.0  # longer to shorter side of a picture; the vision processor refuses more
    max_code: int = 1_000_000  # bytes of UTF-8 of one cell
    restart: bool = True  # after a session died the next run starts a fresh one and says so
    freeze: bool = True  # sessions are stopped between cells, so threads left behind take no CPU

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"sandbox profile {self.profile!r} does not exist; there are {', '.join(PROFILES)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "max_images" else 1 if field.type is int else 1e-3
            if field.type in (int, float) and not value >= least:
                raise ValueError(f"sandbox limit {field.name} must be at least {least}, not {value}")

    @property
    def max_header(self) -> int:
        """Bytes that the header of an honest answer can have at most."""
        return 4 * self.max_text + (256 << 10)


@dataclasses.dataclass(frozen=True)
class Mechanism:
    name: str
    on: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What confines the sessions of a pool, as established at its start. Goes into a run's metadata by `to_dict`."""

    level: str
    mechanisms: tuple[Mechanism, ...]
    profile: str
    kernel: str
    python: str

    @property
    def summary(self) -> str:
        return f"isolation: {self.level}; rlimits only" if self.level == "none" else f"isolation: {self.level}"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "summary": self.summary}

    def __str__(self) -> str:
        lines = [self.summary, f"  profile {self.profile}, Python {self.python}, kernel {self.kernel}"]
        lines += [f"  [{'yes' if m.on else ' no'}] {m.name}: {m.why}" for m in self.mechanisms]
        if self.level == "none":
            lines.append(
                "  WARNING: the code can read this user's files, use the network and signal this user's processes. "
                "Run only code from policies and traces that you would run yourself."
            )
        return "\n".join(lines)


def probe(policy: Policy, min_level: str) -> Report:
    """The report of this machine. Raises SandboxUnavailable if it falls short of `min_level`."""
    if min_level not in LEVELS:
        raise ValueError(f"sandbox level {min_level!r} does not exist; there are {', '.join(LEVELS)}")
    if platform.system() != "Linux":
        raise SandboxUnavailable(f"the sandbox needs Linux (fork server, rlimits), this is {platform.system()}")
    reached = "none"
    missing = [_ADDED_BY_LEVEL[level] for level in LEVELS[1 : LEVELS.index(min_level) + 1]]
    if missing:
        raise SandboxUnavailable(
            f"min_level={min_level!r} was asked for, but this runner reaches only {reached!r}: "
            f"missing {', '.join(missing)}. It confines by processes and rlimits alone; min_level='none' accepts that."
        )
    mechanisms = (
        Mechanism("process", True, "one for each session, forked from a fresh server, never from the caller"),
        Mechanism(
            "rlimits", True, f"memory +{policy.memory_mb} MiB, file {policy.tmp_mb} MiB, CPU {policy.session_cpu} s"
        ),
        Mechanism("wall limit", True, f"interrupt after {policy.cell_timeout:g} s, kill after {policy.grace:g} s more"),
        Mechanism("environment", True, "fixed variables; no descriptor and no secret of the caller is inherited"),
        Mechanism("process group", True, "what a session started is killed with it"),
        Mechanism("seccomp", False, "not in this runner: every system call is allowed"),
        Mechanism("landlock", False, "not in this runner: files of this user can be read and written"),
        Mechanism("namespaces", False, "not in this runner: network and other processes can be reached"),
        Mechanism("capabilities", False, "not in this runner: the sessions keep this user's rights"),
    )
    return Report(reached, mechanisms, policy.profile, platform.release(), platform.python_version())
