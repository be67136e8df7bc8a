"""Early stop of output that repeats itself.

Thyme's paper stops a rollout when one fixed-length substring, found by a Rabin-Karp rolling hash, covers more than
half of the output; its released code looks at the last 1,000 characters, takes any length and a share of 0.3, and
counts occurrences that overlap. Here length, share and tail are parameters and occurrences never overlap. A loop whose
period p is longer than `length` is covered to a share of length / p at most: beyond p = length / share it is missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))


@dataclasses.dataclass(frozen=True)
class Repetition:
    """When to stop: one substring of `length` items covers more than `share` of the last `tail` items (0: of all).

    Items are whatever the sequence is made of: ids (what the engine checks), bytes or characters.
    """

    length: int = 32
    share: float = 0.5
    tail: int = 1_024
    minimum: int = 128  # shorter output is never stopped

    def __post_init__(self) -> None:
        if self.length < 1 or self.tail < 0 or not 0 < self.share <= 1:
            raise ValueError(f"need length >= 1, tail >= 0 and 0 < share <= 1, found {self}")

    def found(self, items: Sequence[int] | np.ndarray | bytes) -> bool:
        if len(items) < max(self.minimum, 2 * self.length):
            return False
        return repeated_share(items, self.length, self.tail) > self.share


def repeated_share(items: Sequence[int] | np.ndarray | bytes, length: int, tail: int = 0) -> float:
    """Largest share of the last `tail` items (0: of all) that copies of one substring cover.

    Copies do not overlap; 0 where no substring has two. Linear time but for the sort of the hashes.
    """
    data = np.frombuffer(items, np.uint8) if isinstance(items, bytes) else np.asarray(items)
    data = data[-tail:] if tail else data
    n = len(data)
    if n < 2 * length:
        return 0.0
    # hash of window i: sum over j of items[i + j] * base**j, from one running sum (all modulo 2**64)
    powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(n - 1, _BASE)]))
    unpowers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(n - length, _INVERSE)]))
    sums = np.concatenate([[np.uint64(0)], np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers)])
    hashes = (sums[length:] - sums[:-length]) * unpowers
    _, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    windows = np.lib.stride_tricks.sliding_window_view(data, length)
    best = 0
    for index in np.argsort(-counts, kind="stable"):
        if counts[index] <= max(best, 1):
            break  # even if none overlapped, it could not win
        starts = np.flatnonzero(group == index)
        starts = starts[(windows[starts] == windows[starts[0]]).all(axis=1)]  # a hash is not a proof
        best = max(best, _apart(starts, length))
    return best * length / n if best > 1 else 0.0


def _apart(starts: np.ndarray, length: int) -> int:
    """How many of the sorted `starts` can be kept at least `length` apart (earliest first is optimal)."""
    count, free = 0, 0
    for start in starts.tolist():
        if start >= free:
            count, free = count + 1, start + length
    return count
