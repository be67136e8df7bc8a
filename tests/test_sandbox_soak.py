"""Sessions by the hundred with ordinary and hostile cells: nothing is left of them, no answer goes astray."""

from __future__ import annotations

import pytest

from pyvision_jax.bench import soak
from pyvision_jax.bench.soak_cells import HOSTILE, ORDINARY, source
from pyvision_sandbox import Result

LEAST = 0.999


def test_300_sessions() -> None:
    report = soak.run(sessions=300, seed=1, minutes=2)
    assert not report.faults, str(report)
    assert report.sessions == 300 and report.cells >= 300
    assert {"ok", "error", "soft_timeout", "hard_timeout", "crashed"} <= set(report.statuses)
    assert report.after is not None and report.after.pool_mb > 0 and report.after.servers_files > 0


@pytest.mark.slow
def test_10_000_sessions() -> None:
    report = soak.run(sessions=10_000, seed=2, minutes=10)
    assert not report.faults, str(report)
    assert report.sessions == 10_000


def test_an_answer_that_is_wrong_is_seen() -> None:
    kind, token, other = ORDINARY[0], "tok-" + "a" * 16, "tok-" + "b" * 16
    good = Result("ok", stdout=f"{token}\n", repr="499500")
    assert soak.faults_of(good, kind, token) == []
    for bad, words in (
        (Result("done"), "does not exist"),
        (Result("crashed", error={"message": "gone", "traceback": ""}), "ended as crashed"),
        (Result("ok", stdout=f"{other}\n{token}\n"), "token of another cell"),
        (Result("ok", stdout=token, repr=other), "token of another cell"),
        (Result("ok", stdout=""), "its own token is missing"),
        (Result("memory", stdout=token), "with error None"),
        (Result("ok", stdout=token, error={"message": "?"}), "with error"),
    ):
        assert any(words in fault for fault in soak.faults_of(bad, kind, token)), words
    assert soak.faults_of(Result("crashed", error={"message": ""}), HOSTILE[4], token) == []


def test_growth_and_leaks_are_seen() -> None:
    before = soak.Usage(100.0, 20, 50.0, 10)
    assert soak._growth(before, soak.Usage(105.0, 21, 54.0, 12)) == []
    grown = soak._growth(before, soak.Usage(130.0, 60, 90.0, 40))
    assert [fault.split()[0] for fault in grown] == ["pool_mb", "pool_files", "servers_mb", "servers_files"]
    assert soak._left({soak._command_line(1)}, 0, set()), "a process with a known command line and open descriptors"


def test_every_kind_of_cell_is_a_program_but_one() -> None:
    for kind in (*ORDINARY, *HOSTILE):
        if kind.name != "syntax":
            compile(source(kind, "tok-" + "0" * 16), kind.name, "exec")
