"""The input pipeline: order, position, bad records."""

from __future__ import annotations

import json

import pytest

from pyvision_jax.data.loader import Loader
from pyvision_jax.data.records import Answer, Record


class World:
    """Records made from their index; every seventh is broken."""

    def __init__(self, size: int, broken: int = 7):
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Record:
        if self.broken and index % self.broken == 0:
            raise OSError(f"picture {index} is gone")
        return Record(str(index), (), (), Answer(""), "none", "world")


def loader(source, **options) -> Loader:
    return Loader(source, **{"batch_size": 4, "seed": 3, "prepare": lambda r: int(r.id), "finish": list, **options})


def flat(data: Loader, count: int) -> list[int]:
    return [index for batch in take(data, count) for index in batch]


def take(data: Loader, count: int) -> list[list[int]]:
    return [next(data) for _ in range(count)]


@pytest.mark.parametrize("threads, ahead", [(0, 0), (0, 2), (3, 2)])
def test_resumes_at_the_batch_after_the_last_yielded(threads, ahead):
    whole = loader(World(50), threads=threads, ahead=ahead)
    first = take(whole, 6)
    state = json.loads(json.dumps(whole.state()))
    rest = take(whole, 20)
    again = loader(World(50), threads=threads, ahead=ahead)
    again.restore(state)
    assert take(again, 20) == rest
    assert take(loader(World(50), ahead=0), 6) == first  # neither threads nor work ahead change the order
    whole.close()
    again.close()


def test_bad_records_are_skipped_counted_once_and_listed():
    data = loader(World(21), batch_size=9, ahead=0)
    seen = flat(data, 8)  # 18 good ones in an epoch: four epochs
    assert sorted(seen) == sorted([i for i in range(21) if i % 7] * 4)
    assert len(data.skipped) == 3
    assert data.skipped.listed()[1] == (7, "OSError: picture 7 is gone")


def test_epochs_differ_and_seeds_differ():
    data = loader(World(8, broken=0), ahead=0)
    epochs = [flat(data, 2) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert flat(loader(World(8, broken=0), ahead=0, seed=4), 2) != epochs[0]


def test_only_bad_records_is_an_error_and_so_is_none():
    with pytest.raises(RuntimeError, match="10 records in a row"):
        next(loader(World(5, broken=1), ahead=0))
    with pytest.raises(ValueError, match="no records"):
        loader(World(0))


def test_bad_records_at_the_end_of_an_epoch_and_the_start_of_the_next_are_not_all_records():
    for seed in range(20):
        data = loader(World(4, broken=2), ahead=0, seed=seed)  # half are bad: in some order four bad ones meet
        assert sorted(flat(data, 4)) == sorted([1, 3] * 8)


def test_very_large_worlds_are_not_enumerated():
    assert len(set(flat(loader(World(2**31, broken=0), ahead=0), 8))) == 32


def test_an_error_in_prepare_that_is_no_bad_record_ends_the_run():
    def broken(record):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        next(loader(World(8), prepare=broken))
