"""The abuse corpus as root, at every level of confinement that the machine offers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_corpus import Case, at
from sandbox_corpus.runs import Runs, marked, select

PLACES = {level: {"level": level} for level in ("namespaces", "landlock", "seccomp")}
# At `seccomp`, where only trusted code runs, the numbered rows and what is about the filter.
ROWS = {c.id for c in at("seccomp") if c.id.startswith("T")} | {"B03", "B05", "B18", "K01", "K02", "K03", "K04"}

MARKED = marked(PLACES, fast="namespaces")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    with Runs(PLACES, select(request)) as runs:
        yield runs


@pytest.mark.parametrize(
    ("place", "case"),
    [
        pytest.param(*p.values, c, marks=p.marks, id=f"{p.id}-{c.id}")
        for p in MARKED
        for c in at(p.values[0])
        if p.values[0] != "seccomp" or c.id in ROWS
    ],
)
def test_verdict(runs: Runs, place: str, case: Case) -> None:
    runs.verdict(place, case)


@pytest.mark.parametrize("place", MARKED)
def test_nothing_is_left_by_the_pool(runs: Runs, place: str) -> None:
    runs.ends_clean(place)
