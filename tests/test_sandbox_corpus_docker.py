"""The abuse corpus under a filter like Docker's: no namespaces, so the pool reaches `landlock` and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_corpus import Case, at
from sandbox_corpus.launch import CannotRun, worker
from sandbox_corpus.runs import Runs, marked, select

LEVEL = "landlock"
PLACES = {
    "root": {"level": LEVEL, "docker": "with landlock"},
    "user": {"level": LEVEL, "docker": "with landlock", "ordinary_user": True},
}
TRUSTED = next(case for case in at("seccomp") if case.id == "T12")

MARKED = marked(PLACES, fast="user")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    with Runs(PLACES, select(request)) as runs:
        yield runs


@pytest.mark.parametrize("place", MARKED)
def test_the_pool_says_why_it_has_no_namespaces(runs: Runs, place: str) -> None:
    hello = runs.answer(place, "hello")
    assert not hello["unavailable"], hello
    report = hello["report"]
    assert report["level"] == LEVEL
    assert "not permitted" in report["refused"]["namespaces"].lower(), report["refused"]


@pytest.mark.parametrize(
    ("place", "case"),
    [pytest.param(*p.values, c, marks=p.marks, id=f"{p.id}-{c.id}") for p in MARKED for c in at(LEVEL)],
)
def test_verdict(runs: Runs, place: str, case: Case) -> None:
    runs.verdict(place, case)


@pytest.mark.parametrize("place", MARKED)
def test_nothing_is_left_by_the_pool(runs: Runs, place: str) -> None:
    runs.ends_clean(place)


def test_an_older_docker_without_landlock_is_refused_by_name() -> None:
    older = {"docker": "without landlock", "ordinary_user": True}
    try:
        with worker("landlock", **older) as refused:
            why = refused.hello["unavailable"].lower()
            assert "landlock" in why and "seccomp" in why  # what is missing, and what it would take to run all the same
        with worker("seccomp", **older) as trusted:
            assert trusted.hello["report"]["level"] == "seccomp"
            assert not trusted.ask(case=TRUSTED.id)["complaints"]
    except CannotRun as e:
        pytest.skip(str(e))
