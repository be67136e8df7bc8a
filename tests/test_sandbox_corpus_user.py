"""The abuse corpus as an ordinary user that the test makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_corpus import Case, at
from sandbox_corpus.runs import Runs, marked, select

PLACES = {level: {"level": level, "ordinary_user": True} for level in ("namespaces", "landlock")}

MARKED = marked(PLACES, fast="namespaces")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    with Runs(PLACES, select(request)) as runs:
        yield runs


@pytest.mark.parametrize(
    ("place", "case"),
    [pytest.param(*p.values, c, marks=p.marks, id=f"{p.id}-{c.id}") for p in MARKED for c in at(p.values[0])],
)
def test_verdict(runs: Runs, place: str, case: Case) -> None:
    runs.verdict(place, case)


@pytest.mark.parametrize("place", MARKED)
def test_nothing_is_left_by_the_pool(runs: Runs, place: str) -> None:
    runs.ends_clean(place)
