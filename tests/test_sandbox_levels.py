"""Which level a pool takes: tried from the top, proven by probes, refused below the minimum, never in silence."""

import contextlib
import dataclasses
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pyvision_jax.config import RLConfig, SandboxConfig
from pyvision_jax.config_load import ConfigError, load
from pyvision_jax.recipes import collect
from pyvision_sandbox import Policy, SandboxPool, SandboxUnavailable, cgroup, levels, probes, remedies
from pyvision_sandbox.__main__ import check
from pyvision_sandbox.policy import LEVELS, LevelUnavailable, Mechanism, Probe, Report, SandboxError

POLICY = Policy(profile="numpy_pil")
FACTS = {"landlock_abi": 7, "gate": True, "missing": ["cv2"], "mechanisms": [["seccomp", True, "allow-list"]]}


def reached() -> list[str]:
    """The levels that this machine can do, strongest first."""
    found = []
    for level in reversed(LEVELS[1:]):
        try:
            zygote, _ = levels.open_level(POLICY, level, level)
        except SandboxUnavailable:
            continue
        zygote.close()
        found.append(level)
    return found


@pytest.fixture(scope="module")
def here() -> list[str]:
    return reached()


class FakeZygote:
    """Starts nothing; `broken` says how a level fails."""

    broken: ClassVar[dict[str, SandboxError]] = {}
    made: ClassVar[list["FakeZygote"]] = []

    def __init__(self, policy: Policy, level: str):
        self.level, self.closed = level, False
        self.made.append(self)

    def wait_ready(self) -> dict[str, Any]:
        if self.level in self.broken:
            raise self.broken[self.level]
        return FACTS

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch):
    FakeZygote.broken.clear()
    FakeZygote.made.clear()
    answers: dict[str, tuple[Probe, ...]] = {}

    class FakeSession:
        def __init__(self, *args: Any):
            pass

        def begin(self) -> Any:
            return contextlib.nullcontext()

    monkeypatch.setattr(levels, "Zygote", FakeZygote)
    monkeypatch.setattr(levels, "Session", FakeSession)
    monkeypatch.setattr(probes, "run", lambda session, policy, level: answers.get(level, (Probe("one", True, "fine"),)))
    return FakeZygote, answers


def test_the_strongest_level_that_works_is_taken(fakes: Any) -> None:
    fake, _ = fakes
    zygote, report = levels.open_level(POLICY)
    assert zygote is fake.made[0] and not fake.made[0].closed
    assert report.level == "namespaces" and report.refused == {} and report.held
    assert report.missing_modules == ("cv2",) and report.mechanisms == (Mechanism("seccomp", True, "allow-list"),)


def test_a_weaker_level_says_why_the_stronger_ones_were_refused(fakes: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake, _ = fakes
    fake.broken["namespaces"] = LevelUnavailable("namespaces", "user namespaces", "unshare: Operation not permitted")
    with caplog.at_level(logging.INFO):
        _, report = levels.open_level(POLICY)
    assert report.level == "landlock"
    assert "user namespaces: unshare: Operation not permitted. Remedy: " in report.refused["namespaces"]
    assert [zygote.closed for zygote in fake.made] == [True, False]
    assert "level namespaces cannot be had here, landlock is used: user namespaces" in caplog.text
    assert report.summary == "isolation: landlock (namespaces refused); 1 of 1 probes held"
    assert "refused: namespaces: user namespaces" in str(report)


def test_a_server_that_dies_at_its_start_counts_as_a_refusal(fakes: Any) -> None:
    fake, _ = fakes
    fake.broken["namespaces"] = SandboxError("the sandbox server did not start:\nImportError: libfoo.so")
    _, report = levels.open_level(POLICY)
    assert report.level == "landlock" and report.refused["namespaces"].endswith("start: ImportError: libfoo.so")


def test_a_required_probe_that_fails_makes_the_level_unusable(fakes: Any) -> None:
    fake, answers = fakes
    answers["namespaces"] = (Probe("one", True, "fine"), Probe("files", False, "['/etc/x'] could be read"))
    answers["landlock"] = (Probe("one", True, "fine"), Probe("beyond", False, "open", required=False))
    _, report = levels.open_level(POLICY)
    assert report.level == "landlock" and report.held
    assert "files (['/etc/x'] could be read)" in report.refused["namespaces"]
    assert fake.made[0].closed


def test_below_the_minimum_there_is_no_pool(fakes: Any) -> None:
    fake, _ = fakes
    for level in LEVELS:
        fake.broken[level] = LevelUnavailable(level, f"mechanism of {level}", "no")
    with pytest.raises(SandboxUnavailable) as caught:
        levels.open_level(POLICY, "landlock")
    text = str(caught.value)
    assert "min_level='landlock'" in text and "\n" not in text
    assert "namespaces: mechanism of namespaces: no. Remedy: " in text
    assert "landlock: mechanism of landlock: no. Remedy: " in text
    assert "The next weaker level is 'seccomp'" in text
    assert [zygote.level for zygote in fake.made] == ["namespaces", "landlock"]
    assert all(zygote.closed for zygote in fake.made)
    with pytest.raises(SandboxUnavailable) as caught:
        levels.open_level(POLICY, "seccomp")
    assert "none" not in str(caught.value), "no advice to run without confinement"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_session_that_does_not_start_is_tried_again_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, here: list[str], failures: int
) -> None:
    """By a real server: what the probes' own session needs of its host is what `Session` asks of any."""
    made: list[int] = []
    start = levels.Process

    def process(zygote: Any, n: int) -> Any:
        made.append(n)
        if len(made) <= failures:
            raise SandboxError("no session today")
        return start(zygote, n)

    monkeypatch.setattr(levels, "Process", process)
    if failures == 1:
        zygote, report = levels.open_level(POLICY, here[-1], here[-1])
        zygote.close()
        assert report.held and len(made) == 2
    else:
        with pytest.raises(SandboxUnavailable, match="no session today"):
            levels.open_level(POLICY, here[-1], here[-1])


def test_other_errors_close_the_server_and_pass(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _ = fakes

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        levels.open_level(POLICY)
    assert [zygote.closed for zygote in fake.made] == [True]


def test_levels_to_try() -> None:
    assert levels.candidates("landlock", "namespaces", False) == ["namespaces", "landlock"]
    assert levels.candidates("seccomp", "seccomp", False) == ["seccomp"]
    assert levels.candidates("none", "none", True) == ["none"]
    assert levels.candidates("landlock", "namespaces", True) == ["namespaces", "landlock"]
    with pytest.raises(ValueError, match="'fort' does not exist; there are none, seccomp, landlock, namespaces"):
        levels.candidates("fort", "namespaces", False)
    with pytest.raises(ValueError, match="weaker"):
        levels.candidates("namespaces", "landlock", False)
    with pytest.raises(SandboxUnavailable, match="unsafe=True"):
        levels.candidates("none", "namespaces", False)


def test_none_is_loud_and_only_for_unsafe_callers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SandboxUnavailable, match="confines nothing"):
        SandboxPool(POLICY, min_level="none")
    with caplog.at_level(logging.WARNING):
        zygote, report = levels.open_level(POLICY, "none", "none", unsafe=True)
        zygote.close()
    assert "rlimits only" in caplog.text and "WARNING" in str(report)
    assert report.held, [probe for probe in report.probes if probe.required and not probe.held]
    found = {probe.name: probe for probe in report.probes}
    outside = [probe for name, probe in found.items() if "files outside" in name]
    assert outside and not any(probe.held or probe.required for probe in outside), "the probes can fail"


# ------------------------------------------------------------------------------------------------------- remedies


@pytest.mark.parametrize(
    ("files", "level", "mechanism", "told"),
    [
        ({"sys/kernel/unprivileged_userns_clone": "0"}, "namespaces", "", "kernel.unprivileged_userns_clone=1"),
        ({"sys/user/max_user_namespaces": "0"}, "namespaces", "", "user.max_user_namespaces="),
        (
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "namespaces",
            "",
            "AppArmor profile with `userns,`",
        ),
        ({"self/status": "Seccomp:\t2\n"}, "namespaces", "", "--security-opt seccomp=unconfined"),
        ({"self/attr/current": "docker-default (enforce)\n"}, "namespaces", "", "--security-opt apparmor=unconfined"),
        ({"self/attr/current": "unconfined\n"}, "namespaces", "", "allow unprivileged user namespaces, or run as root"),
        ({}, "namespaces", "mounts", "CAP_SYS_ADMIN"),
        ({}, "landlock", "Landlock", "lsm="),
        ({"self/status": "Seccomp:\t2\n"}, "landlock", "Landlock", "landlock_restrict_self"),
        ({}, "landlock", "seccomp", "CONFIG_SECCOMP_FILTER"),
        ({}, "seccomp", "seccomp", "CONFIG_SECCOMP_FILTER"),
        ({"version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016"}, "landlock", "Landlock", "gVisor"),
    ],
)
def test_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], level: str, mechanism: str, told: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(remedies, "_PROC", str(tmp_path))
    assert told in "; ".join(remedies.remedies(level, mechanism))


# ------------------------------------------------------------------------------------------------ on this machine


def test_probes_hold_at_every_level_of_this_machine(here: list[str]) -> None:
    assert here, "not even seccomp works"
    for level in here:
        zygote, report = levels.open_level(POLICY, level, level)
        zygote.close()
        assert report.level == level and report.held and len(report.probes) >= 12
        spent = sum(probe.ms for probe in report.probes)
        assert spent < 2_000, f"{level}: {spent:.0f} ms; about 100 on a quiet machine"
        text = str(report)
        assert f"isolation: {level}" in text and "[held]" in text and "FAILED" not in text
        assert ("WARNING" in text) == (level == "seccomp")
        assert json.loads(json.dumps(report.to_dict()))["level"] == level
        must = {probe.name for probe in report.probes if probe.required}
        assert any("outside cannot be read" in name for name in must) == (level != "seccomp")


def test_nothing_is_left_of_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    zygote, _ = levels.open_level(POLICY, here[-1])
    zygote.close()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before) and threading.active_count() == threads


def test_what_the_policy_allows_is_not_promised(here: list[str]) -> None:
    policy = dataclasses.replace(POLICY, allow_fork=True, freeze=False)
    if not cgroup.find():
        with pytest.raises(SandboxUnavailable, match="allow_fork needs a control group"):
            levels.open_level(policy, here[-1])
        return
    zygote, report = levels.open_level(policy, here[-1])
    zygote.close()
    found = {probe.name: probe for probe in report.probes}
    assert not found["no second process can be made"].required
    assert not found["a session that waits uses no CPU"].required


def test_a_broken_sandbox_fails_the_probes(here: list[str]) -> None:
    """A session without confinement is judged as if it were at a level: the level must be refused."""
    with SandboxPool(POLICY, "none", max_level="none", unsafe=True) as pool, pool.session() as session:
        found = probes.run(session, POLICY, "namespaces")
    failed = {probe.name for probe in found if probe.required and not probe.held}
    for part in ("cannot be read", "written", "environment", "listeners", "signalled", "programs", "second", "seccomp"):
        assert any(part in name for name in failed), (part, failed)


def test_report_of_a_pool_is_what_was_proven(here: list[str]) -> None:
    with SandboxPool(POLICY, min_level=here[-1]) as pool:
        assert pool.report.level == here[0] and pool.report.held
        assert list(pool.report.refused) == [level for level in reversed(LEVELS[1:]) if level not in here]


def test_check_prints_report_probes_and_behaviour(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check("numpy_pil", here[0])
    out = capsys.readouterr().out
    assert f"isolation: {here[0]}" in out and "the next call gets a fresh session" in out and "FAILED" not in out
    assert not check("numpy_pil", "landlock", "seccomp"), "less than asked for"
    assert "BELOW landlock" in capsys.readouterr().out
    for wrong in ("none", "vault"):
        with pytest.raises(ValueError, match=f"not '{wrong}'"):
            check("numpy_pil", wrong)


# ------------------------------------------------------------------------------------------- training configurations


def test_no_configuration_reaches_none() -> None:
    assert RLConfig().sandbox.min_level == "landlock"
    with pytest.raises(ConfigError, match=r"sandbox.min_level must be one of seccomp, landlock, namespaces.*no config"):
        load(RLConfig, None, ["sandbox.min_level=none"])
    with pytest.raises(SandboxUnavailable, match="confines nothing"):
        collect.open_pool(SandboxConfig(profile="numpy_pil", min_level="none"), trusted=True)  # pyright: ignore


def test_sampled_code_is_refused_where_only_seccomp_is_reached(fakes: Any) -> None:
    fake, _ = fakes
    fake.broken["namespaces"] = LevelUnavailable("namespaces", "user namespaces", "no")
    fake.broken["landlock"] = LevelUnavailable("landlock", "Landlock", "no")
    config = SandboxConfig(profile="numpy_pil", min_level="seccomp")
    with pytest.raises(SandboxUnavailable, match=r"trusted traces.*samples runs at level landlock") as caught:
        collect.open_pool(config)
    assert "\n" not in str(caught.value)


def test_report_text_names_what_is_missing() -> None:
    report = Report(
        level="landlock", mechanisms=(Mechanism("fork", False, "no notification"),),
        probes=(Probe("a", True, "fine"), Probe("b", False, "possible", required=False), Probe("c", False, "bad")),
        profile="vision", missing_modules=("cv2",), kernel="6.1", landlock_abi=0, python="3.11",
        refused={"namespaces": "user namespaces: no. Remedy: x"},
    )  # fmt: skip
    text = str(report)
    assert "[ no] fork: no notification" in text and "cv2" in text and "Landlock none" in text and "kernel 6.1" in text
    assert "[held] a" in text and "[open] b" in text and "[FAILED] c" in text
    assert not report.held and "1 of 2 probes held" in report.summary
    data = report.to_dict()
    assert data["probes"][1] == {"name": "b", "held": False, "what": "possible", "required": False, "ms": 0.0}
    assert json.loads(json.dumps(data)) == data
