"""The corpus can fail: without confinement at least a third of its harmless cases do. And it is whole."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from sandbox_corpus import CASES
from sandbox_corpus.case import VERDICTS
from sandbox_corpus.launch import CannotRun, worker

PACKAGE = Path(__file__).parents[1] / "sandbox" / "pyvision_sandbox"
# What runs in the pool's process: it reads what sessions send.
HOST_SIDE = ("pool", "session", "aio", "wire", "process", "gate", "result", "text", "levels", "policy", "metrics")
# Slow without a sandbox, and no proof of anything there.
SLOW = {"T07", "T22", "T32", "T34", "T34f", "T39", "B04", "B17", "U47", "U49c"}


def test_cases_fail_without_confinement() -> None:
    # What must not be blocked cannot fail here.
    harmless = [case for case in CASES if case.harmless and case.id not in SLOW and case.verdict != "works"]
    try:
        with worker("none") as unconfined:
            assert not unconfined.hello["unavailable"], unconfined.hello
            failed = [case.id for case in harmless if unconfined.ask(case=case.id)["complaints"]]
    except CannotRun as e:
        pytest.skip(str(e))
    assert len(failed) >= len(harmless) / 3, failed
    # Those whose verdict is nothing but confinement all fail.
    assert {"T01", "T02", "T03", "T05", "T12", "T13", "T14", "T17", "T20", "T23", "K01", "K07"} <= set(failed)


def test_the_corpus_is_whole() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert {f"T{n:02}" for n in range(1, 61)} <= set(ids)
    for case in CASES:
        for level in case.levels:
            assert case.verdict_at(level) in VERDICTS, case.id


@pytest.mark.parametrize("name", HOST_SIDE)
def test_nothing_from_a_session_is_unpickled(name: str) -> None:
    """T56. By words and by the tree: neither is fooled by the other's blind spot."""
    source = (PACKAGE / f"{name}.py").read_text()
    assert not re.search(r"\b(pickle|cPickle|dill|marshal|shelve|allow_pickle|np\.load|numpy\.load)\b", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__"), f"{name}.py:{node.lineno}"
