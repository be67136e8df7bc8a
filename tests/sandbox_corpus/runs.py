"""Workers in several places at once: most of a case is waiting, so two of them share the machine well."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from .case import Case
from .launch import CannotRun, worker

HELLO, END = "hello", "end"
_AT_ONCE = 2


def marked(places: Mapping[str, Any], fast: str) -> list[Any]:
    """Parameters of the places; all but `fast` are slow, for each takes as long again (scripts/test_slow.sh)."""
    return [pytest.param(place, marks=() if place == fast else pytest.mark.slow, id=place) for place in places]


def select(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """place -> ids of the cases that this run of pytest selected in the module of the request."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and "place" in item.fixturenames:
            params = item.callspec.params
            cases = selected.setdefault(params["place"], [])
            if isinstance(params.get("case"), Case):
                cases.append(params["case"].id)
    return selected


class Runs:
    """Runs `selected` in the background; tests wait for their answers. A context manager.

    places: name -> arguments of `worker`, two at a time, in this order.
    """

    def __init__(self, places: Mapping[str, Mapping[str, Any]], selected: Mapping[str, Sequence[str]]):
        self.places, self.selected = places, {place: selected[place] for place in places if place in selected}
        self.answers: dict[tuple[str, str], Future[dict[str, Any]]] = {
            (place, what): Future() for place, cases in self.selected.items() for what in (HELLO, *cases, END)
        }
        self.stopped = threading.Event()
        self.threads = ThreadPoolExecutor(_AT_ONCE)
        for place in self.selected:
            self.threads.submit(self._run, place)

    def _run(self, place: str) -> None:
        try:
            with worker(**self.places[place]) as running:
                self.answers[place, HELLO].set_result(running.hello)
                for case in self.selected[place]:
                    if self.stopped.is_set():
                        return
                    if not running.hello["unavailable"]:
                        self.answers[place, case].set_result(running.ask(case=case))
                self.answers[place, END].set_result(running.ask(close=True))
        except (CannotRun, OSError, ValueError, RuntimeError) as e:
            for (where, _), answer in self.answers.items():
                if where == place and not answer.done():
                    answer.set_exception(e)

    def answer(self, place: str, what: str) -> dict[str, Any]:
        """A worker's answer. Skips, with the reason, what this machine cannot do."""
        try:
            hello = self.answers[place, HELLO].result()
            if hello["unavailable"] and what not in (HELLO, END):
                pytest.skip(hello["unavailable"])
            return self.answers[place, what].result()
        except CannotRun as e:
            pytest.skip(str(e))

    def verdict(self, place: str, case: Case) -> None:
        """Fail with what was wrong with the case. A policy that cannot be had here must be refused by name."""
        answer = self.answer(place, case.id)
        if answer["unavailable"]:
            assert "allow_fork needs a control group" in answer["unavailable"]
            return
        assert not answer["complaints"], "\n".join(answer["complaints"])

    def ends_clean(self, place: str) -> None:
        """Fail with what was left when all pools were closed."""
        assert not self.answer(place, END)["complaints"]

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()
        self.threads.shutdown()
