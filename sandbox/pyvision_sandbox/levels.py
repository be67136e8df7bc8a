"""Which isolation this machine can do: each level is started for real, from the top, and proven by probes in a session.

Nothing is lowered in silence: a level that does not start, or of which a probe fails, is named in the report with the
reason and what would help; below `min_level` there is no pool. After the start a pool never changes its level.
"""

import dataclasses
import logging
import platform

from . import probes
from .policy import LEVELS, WARNINGS, LevelUnavailable, Mechanism, Policy, Report, SandboxError, SandboxUnavailable
from .process import Process, Zygote
from .remedies import reason
from .session import Host, Session
from .wire import Inputs

log = logging.getLogger(__name__)


def open_level(
    policy: Policy, min_level: str = "landlock", max_level: str = "namespaces", unsafe: bool = False
) -> tuple[Zygote, Report]:
    """A running server at the strongest level from `max_level` down to `min_level` that works here, and the report.

    unsafe: allows the level `none`, which confines nothing. Raises ValueError for levels that do not exist or stand the
    wrong way round, SandboxUnavailable if no level works (with each reason and its remedy), SandboxError if the profile
    cannot be had at all.
    """
    tried = candidates(min_level, max_level, unsafe)
    if platform.system() != "Linux":
        raise SandboxUnavailable(f"the sandbox needs Linux (namespaces, Landlock, seccomp), not {platform.system()}")
    refused: dict[str, str] = {}
    for level in tried:
        zygote = Zygote(policy, level)
        try:
            report = prove(zygote, policy, level, dict(refused))
        except SandboxError as e:
            zygote.close()
            refused[level] = reason(level, e)
        except BaseException:
            zygote.close()
            raise
        else:
            announce(report)
            return zygote, report
    told = "; ".join(f"{level}: {why}" for level, why in refused.items())
    weaker = LEVELS[1 : LEVELS.index(min_level)][-1:]  # `none` is no advice
    advice = "".join(f". The next weaker level is {level!r} (docs/sandbox.md says what it lacks)" for level in weaker)
    raise SandboxUnavailable(f"min_level={min_level!r} was asked for and cannot be had here. {told}{advice}")


def candidates(min_level: str, max_level: str, unsafe: bool) -> list[str]:
    """The levels to try, strongest first. Raises ValueError or SandboxUnavailable as `open_level`."""
    for level in (min_level, max_level):
        if level not in LEVELS:
            raise ValueError(f"sandbox level {level!r} does not exist; there are {', '.join(LEVELS)}")
    low, high = LEVELS.index(min_level), LEVELS.index(max_level)
    if low > high:
        raise ValueError(f"max_level={max_level!r} is weaker than min_level={min_level!r}")
    if low == 0 and not unsafe:
        raise SandboxUnavailable(
            "level 'none' confines nothing: the code could read this user's files and use the network. It is for tests "
            "only, where SandboxPool(..., min_level='none', unsafe=True) says so; no configuration can ask for it"
        )
    return list(reversed(LEVELS[low : high + 1]))


def prove(zygote: Zygote, policy: Policy, level: str, refused: dict[str, str]) -> Report:
    """The report of a server at a level. Raises LevelUnavailable if a probe that the level promises fails."""
    facts = zygote.wait_ready()
    # If an attempt ends the session it stays dead: what follows is then not held, and the level not used. A long grace:
    # on a busy machine a late interrupt is no reason for a weaker level.
    patient = dataclasses.replace(policy, restart=False, grace=max(policy.grace, 10), max_code=Policy.max_code)
    host = _Alone(zygote, patient)
    with Session(host, Inputs.make(seed=0)).begin() as session:
        found = probes.run(session, policy, level)
    report = Report(
        level=level,
        mechanisms=tuple(Mechanism(name, bool(on), why) for name, on, why in facts["mechanisms"]),
        probes=found,
        profile=policy.profile,
        missing_modules=tuple(facts["missing"]),
        kernel=platform.release(),
        landlock_abi=facts["landlock_abi"],
        python=platform.python_version(),
        refused=refused,
    )
    failed = [f"{p.name} ({p.what})" for p in found if p.required and not p.held]
    if failed:
        raise LevelUnavailable(level, "probes", f"tried in a session and not held: {'; '.join(failed)}")
    return report


class _Alone(Host):
    """What a session needs of a pool, before there is one."""

    def __init__(self, zygote: Zygote, policy: Policy):
        super().__init__(policy, zygote.level, workers=1)
        self.zygote = zygote

    def start(self, fresh: bool = False) -> Process:
        return Process(self.zygote, 1)


def announce(report: Report) -> None:
    """Logs what was refused, and the level: loudly where the code is not confined to its own files."""
    for level, why in report.refused.items():
        log.warning("sandbox level %s cannot be had here, %s is used: %s", level, report.level, why)
    if report.level in WARNINGS:
        log.warning("sandbox %s. %s", report.summary, WARNINGS[report.level])
    else:
        log.info("sandbox %s", report.summary)
