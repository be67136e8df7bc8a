"""Records to batches through Grain: deterministic order, a position that can be saved, work ahead in one thread."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

import grain
import grain.experimental

from pyvision_jax.data.records import Record


class UnusableData(RuntimeError):
    """Not a record is at fault but the data: nothing of them could be used for a while."""


Item = TypeVar("Item")
Out = TypeVar("Out")

log = logging.getLogger(__name__)


class Source(Protocol):
    """Map-style records: a list of them will do. A generated world makes a record from its index and its own seed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...


@dataclasses.dataclass
class Skipped:
    """Records that could not be used, by index in the source: counted once however often the data are passed over."""

    on_skip: Callable[[str, str], object] | None = None
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    _in_a_row: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, index: int, reason: str, limit: int, name: str = "") -> None:
        """`name`: the record's id, if it has one.

        Raises `UnusableData` when `limit` records in a row were bad: the data are wrong, not a record.
        """
        with self._lock:
            if index not in self.reasons:
                name = name or f"record {index}"
                log.warning("%s skipped: %s", name, reason)
                if self.on_skip is not None:
                    self.on_skip(name, reason)
            self.reasons[index] = reason
            self._in_a_row += 1
            if self._in_a_row >= limit:
                raise UnusableData(f"{self._in_a_row} records in a row could not be used; the last one: {reason}")

    def good(self) -> None:
        with self._lock:
            self._in_a_row = 0

    def __len__(self) -> int:
        return len(self.reasons)

    def listed(self) -> list[tuple[int, str]]:
        with self._lock:
            return sorted(self.reasons.items())


class Loader(Generic[Item, Out]):
    """Endless batches of `batch_size` prepared records, in an order that depends on `seed` and the epoch alone.

    prepare: record -> item, run per record; a `ValueError`, `KeyError` or `OSError` (MediaError is one) skips the
    record, counts and lists it in `skipped`, and the next record takes its place.
    finish: list of items -> what the loader yields, run per batch, in order, in the one thread that works ahead.
    threads: readers that prepare records side by side (pictures on disk); 0 prepares in the thread that works ahead.
    ahead: batches made before they are asked for.
    on_skip: (id, else place in the source; reason), called once a bad record, from whichever thread met it.

    `state()` is the position behind the batch that was yielded last, whatever has been made ahead since.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        prepare: Callable[[Record], Item],
        finish: Callable[[list[Item]], Out],
        seed: int = 0,
        shuffle: bool = True,
        threads: int = 0,
        ahead: int = 2,
        on_skip: Callable[[str, str], object] | None = None,
    ):
        if len(source) == 0:
            raise ValueError("the source holds no records")
        self.skipped = Skipped(on_skip)
        limit = min(2 * len(source), 1_000)  # a whole epoch lies in any run of so many; fewer may straddle two

        def fetch(index: int) -> Item | None:
            record = None
            try:
                record = source[index]
                item = prepare(record)
            except (ValueError, KeyError, OSError) as error:
                name = "" if record is None else record.id
                self.skipped.add(index, f"{type(error).__name__}: {error}", limit, name)
                return None
            self.skipped.good()
            return item

        order = grain.MapDataset.range(len(source)).seed(seed)
        if shuffle:
            order = order.shuffle()
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * batch_size if threads else 0)
        items = order.repeat().map(fetch).to_iter_dataset(options)  # leaves out None
        batches = items.batch(batch_size, batch_fn=lambda batch: finish(cast(list[Item], list(batch))))
        if ahead:
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=ahead)
        self._iterator = iter(batches)

    def __iter__(self) -> Iterator[Out]:
        return self

    def __next__(self) -> Out:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """JSON data."""
        return {"position": self._iterator.get_state(), "skipped": self.skipped.listed()}

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state["position"])
        self.skipped.reasons = {int(index): reason for index, reason in state["skipped"]}

    def close(self) -> None:
        """Stops the thread that works ahead."""
        self._iterator.close()
