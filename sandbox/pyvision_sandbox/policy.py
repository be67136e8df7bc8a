"""What a pool is asked for (`Policy`), what it found out about the machine (`Report`), and the errors it raises."""

import dataclasses
from typing import Any

from .profiles import PROFILES

LEVELS = ("none", "seccomp", "landlock", "namespaces")  # weakest first
TRUSTED_ONLY = ("none", "seccomp")  # sampled code never runs at these: it could read the files of this user


class SandboxError(RuntimeError):
    """The sandbox itself failed (its server died, no process could start): infrastructure, never the code's fault."""


class SandboxUnavailable(SandboxError):
    """The isolation that was asked for cannot be had here; the message names what is missing and what helps."""


class LevelUnavailable(SandboxUnavailable):
    """This machine, as it is set up, cannot do `level`: `mechanism` failed, because of `why`.

    mechanism: a key of `levels.REMEDIES`, or free text. Raised by a server that cannot start, and where a probe failed.
    """

    def __init__(self, level: str, mechanism: str, why: str):
        super().__init__(f"{level}: {mechanism}: {why}")
        self.level, self.mechanism, self.why = level, mechanism, why


class BranchUnsafe(SandboxError):
    """This session cannot be cloned as it is: it has threads, or this machine has no way to let one fork through."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Limits of one session. Times are seconds of wall time unless said otherwise.

    Raises ValueError for a limit that is too small or a profile that does not exist.
    """

    profile: str = "vision"  # which packages a session sees and has imported when it starts: profiles.PROFILES
    memory_mb: int = 512  # address space beyond what the preloaded process has mapped already
    tmp_mb: int = 64  # all files of a session together
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
    allow_exec: bool = False  # the code may start programs; they are confined as it is
    allow_fork: bool = False  # it may fork; memory_mb is then a limit for each process, and there is no live branch
    threads: int = 64  # of one session; its processes count as well

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
    """One thing that confines a session; `why` says with which figures it is on, or what keeps it off."""

    name: str
    on: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one attempt inside a real session came to.

    held: the attempt was refused (or, where the probe asks for something that must work, it worked). required: the
    level promises that; a level of which a required probe failed is not used. ms: what the attempt took.
    """

    name: str
    held: bool
    what: str
    required: bool = True
    ms: float = 0.0

    @property
    def mark(self) -> str:
        return "held" if self.held else "FAILED" if self.required else "open"


@dataclasses.dataclass(frozen=True)
class Report:
    """What confines the sessions of a pool, as tried at its start. `to_dict` goes into a run's metadata.

    refused: stronger levels that were tried first -> why this machine cannot do them, and what would help.
    missing_modules: optional ones of the profile that are not installed. landlock_abi: 0 where there is none.
    """

    level: str
    mechanisms: tuple[Mechanism, ...]
    probes: tuple[Probe, ...]
    profile: str
    missing_modules: tuple[str, ...]
    kernel: str
    landlock_abi: int
    python: str
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Every probe that this level promises held."""
        return all(probe.held for probe in self.probes if probe.required)

    @property
    def summary(self) -> str:
        """One line for a log."""
        if self.level == "none":
            return "isolation: none; rlimits only"
        promised = [probe for probe in self.probes if probe.required]
        refused = f" ({', '.join(self.refused)} refused)" if self.refused else ""
        return f"isolation: {self.level}{refused}; {sum(p.held for p in promised)} of {len(promised)} probes held"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, lists, strings, numbers."""
        return {
            **dataclasses.asdict(self),
            "mechanisms": [dataclasses.asdict(m) for m in self.mechanisms],
            "probes": [dataclasses.asdict(p) for p in self.probes],
            "missing_modules": list(self.missing_modules),
            "summary": self.summary,
        }

    def __str__(self) -> str:
        landlock = f"ABI {self.landlock_abi}" if self.landlock_abi else "none"
        lines = [
            f"isolation: {self.level}",
            f"  profile {self.profile}, Python {self.python}, kernel {self.kernel}, Landlock {landlock}",
        ]
        if self.missing_modules:
            lines.append(f"  not installed, so not importable in a session: {', '.join(self.missing_modules)}")
        lines += [f"  refused: {level}: {why}" for level, why in self.refused.items()]
        lines += [f"  [{'yes' if m.on else ' no'}] {m.name}: {m.why}" for m in self.mechanisms]
        lines += [f"  [{p.mark}] {p.name}: {p.what} ({p.ms:.1f} ms)" for p in self.probes]
        if self.level in TRUSTED_ONLY:
            lines.append(f"  {WARNINGS[self.level]}")
        return "\n".join(lines)


WARNINGS = {
    "none": "WARNING: nothing but rlimits. The code can read and write this user's files, use the network and signal "
    "this user's processes: run only code that you would run yourself.",
    "seccomp": "WARNING: the code can read and write this user's files. Only trusted replay runs at this level, no "
    "sampled code.",
}
