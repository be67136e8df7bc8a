"""Early stop of output that repeats itself, exact to the token.

Thyme's paper stops a rollout when one fixed-length substring, found by a Rabin-Karp rolling hash, covers more than half
of the output. Its released code (`has_repeated_content`) looks at the last 1,000 characters once a segment has ended,
takes substrings of any length, counts copies that overlap, and stops at a share of 0.3. Both are here as one rule over
ids, `Repetition`; `found` is its definition in numpy, and `Watch` the same thing in the decode program.

The device needs no hash. It keeps, for every distance d, for how many ids by now the output has repeated what stood d
ids before (`Watch.run`): one comparison with the past and one addition a step. A run of at least `length` at distance d
says that the last `length` ids also stand d ids earlier, without collisions, and for every length at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from pyvision_jax.config import RepetitionConfig

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
_NEVER = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """When to stop: copies of one substring of `length` items cover more than `share` of the last `tail` items.

    `tail` 0 looks at all items; output shorter than `minimum` is never stopped. Copies do not overlap. Thus a loop
    whose period p is longer than `length` is covered to a share of length / p at most: beyond p = length / share it is
    missed. `length` 0 is Thyme's released rule: a substring of any length up to a third of the items counts, and its
    copies may overlap, which comes to asking for two copies of the shortest substring of which two exceed the share.

    Items are whatever the sequence is made of: ids (what the engine looks at), bytes or characters.
    """

    length: int = 32
    share: float = 0.5
    tail: int = 1_024
    minimum: int = 128

    def __post_init__(self) -> None:
        if self.length < 0 or self.tail < 0 or not 0 < self.share < 1:
            raise ValueError(f"need length >= 0, tail >= 0 and 0 < share < 1, found {self}")
        if 0 < self.tail < 2 * self.length:
            raise ValueError(f"a tail of {self.tail} has no room for two copies of {self.length}")
        if not self.length and self.share >= 2 / 3:
            raise ValueError(f"two copies of at most a third of the items never exceed a share of {self.share}")

    @classmethod
    def of(cls, config: RepetitionConfig) -> Repetition | None:
        if config.rule == "off":
            return None
        length = config.length if config.rule == "fixed_length" else 0
        return cls(length, config.share, config.tail, config.minimum)

    def found(self, items: Sequence[int] | np.ndarray | bytes) -> bool:
        if len(items) < max(self.minimum, 2 * self.length):
            return False
        if self.length:
            return repeated_share(items, self.length, self.tail) > self.share
        n = min(len(items), self.tail or len(items))
        length = int(_shortest(np.array([n]), self.share)[0])
        return bool(length < _NEVER) and _repeats(_array(items)[-n:], length)

    def needed(self, limit: int) -> np.ndarray:
        """int32 [limit + 1]: of n items, the copies of a fixed length that exceed the share, or the length of which two
        copies do."""
        n = np.arange(limit + 1)
        if not self.length:
            return _shortest(n, self.share)
        floor = np.maximum(n, 1)
        copies = np.maximum(2, (self.share * n / self.length).astype(np.int64) - 1)
        for _ in range(3):  # the comparison is `found`'s own, so that rounding is too
            copies += copies * self.length / floor <= self.share
        return copies.astype(np.int32)


def repeated_share(items: Sequence[int] | np.ndarray | bytes, length: int, tail: int = 0) -> float:
    """Largest share of the last `tail` items (0: of all) that copies of one substring cover.

    Copies do not overlap; 0 where no substring has two. Linear time but for the sort of the hashes.
    """
    data = _array(items)
    data = data[-tail:] if tail else data
    n = len(data)
    if n < 2 * length:
        return 0.0
    hashes = _hashes(data, length)
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


def _array(items: Sequence[int] | np.ndarray | bytes) -> np.ndarray:
    return np.frombuffer(items, np.uint8) if isinstance(items, bytes) else np.asarray(items)


def _hashes(data: np.ndarray, length: int) -> np.ndarray:
    """uint64 [n - length + 1], of each window i: sum over j of items[i + j] * base**j, from one running sum."""
    n = len(data)
    powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(n - 1, _BASE)]))
    unpowers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(n - length, _INVERSE)]))
    sums = np.concatenate([[np.uint64(0)], np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers)])
    return (sums[length:] - sums[:-length]) * unpowers


def _apart(starts: np.ndarray, length: int) -> int:
    """How many of the sorted `starts` can be kept at least `length` apart (earliest first is optimal)."""
    count, free = 0, 0
    for start in starts.tolist():
        if start >= free:
            count, free = count + 1, start + length
    return count


def _repeats(data: np.ndarray, length: int) -> bool:
    """Whether any substring of `length` stands twice in `data`; copies may overlap."""
    _, group, counts = np.unique(_hashes(data, length), return_inverse=True, return_counts=True)
    windows = np.lib.stride_tricks.sliding_window_view(data, length)
    return any(
        bool((windows[a] == windows[b]).all())
        for index in np.flatnonzero(counts > 1)
        for a, b in itertools.combinations(np.flatnonzero(group == index), 2)
    )


def _shortest(n: np.ndarray, share: float) -> np.ndarray:
    """int32: the least length of which two copies exceed `share` of n items, `_NEVER` where it is over a third of n."""
    length = np.maximum(1, (share * n / 2).astype(np.int64) - 1)
    for _ in range(3):
        length += 2 * length / np.maximum(n, 1) <= share
    return np.where(length <= n // 3, length, _NEVER).astype(np.int32)


# -- on the device ----------------------------------------------------------------------------------------------------


@struct.dataclass
class Watch:
    """What a rule remembers of the turn of each slot. w: its tail, or all ids that a trajectory may have.

    A turn that has not been stopped can only meet the rule by its newest window or, on reaching `minimum`, by an older
    one. So two numbers carry the whole past: `best` decides while all of the turn is in view, `reach` once ids leave.
    """

    count: Int[Array, " b"]  # ids of the turn so far
    past: Int[Array, "b w"]  # the id d + 1 before the next one; -1 before the turn
    run: Int[Array, "b w"]  # for how many ids by now the turn has repeated what stood d + 1 ids before
    best: Int[Array, " b"]  # most copies of one substring (length 0: length of the longest with two) so far
    reach: Int[Array, " b"]  # where the first of as many copies began as a full tail takes; the latest such, or -1
    # [count % w] of each window: copies up to it (all of the turn in view), or where the copies before it began
    links: Int[Array, "b w k"]

    @classmethod
    def empty(cls, rule: Repetition, slots: int, limit: int) -> Watch:
        """For turns of at most `limit` ids."""
        width = rule.tail if 0 < rule.tail < limit else limit
        k = 0 if not rule.length else 1 if width != rule.tail else int(rule.needed(width)[width]) - 1
        return cls(
            count=jnp.zeros(slots, jnp.int32),
            past=jnp.full((slots, width), -1, jnp.int32),
            run=jnp.zeros((slots, width), jnp.int32),
            best=jnp.zeros(slots, jnp.int32),
            reach=jnp.full(slots, -1, jnp.int32),
            links=jnp.full((slots, width, k), -1, jnp.int32),
        )


@jax.named_scope("repetition")
def hear(watch: Watch, rule: Repetition, ids: Int[Array, " b"], going: Bool[Array, " b"]) -> tuple[Watch, Array]:
    """(the watch with one more id in the rows that are `going`, bool [b]: this id meets the rule)."""
    b, w = watch.past.shape
    rows, lags = jnp.arange(b), jnp.arange(1, w + 1)
    needed = jnp.asarray(rule.needed(w))
    count = watch.count + 1
    run = jnp.where(watch.past == ids[:, None], watch.run + 1, 0)
    links, best, reach = watch.links, watch.best, watch.reach
    if rule.length:
        # the nearest copy of the newest window that it does not overlap: chains of these hold the most copies
        lag = jnp.min(jnp.where((run >= rule.length) & (lags >= rule.length), lags, _NEVER), axis=1)
        again = lag < _NEVER
        before = links[rows, jnp.where(again, count - lag, 0) % w]
        if rule.tail != w:  # all of a turn is in view at all times
            link = jnp.where(again[:, None], before, 0) + 1
            copies = link[:, 0]
        else:
            start = jnp.where(again, count - lag - rule.length, -1)
            link = jnp.concatenate([start[:, None], jnp.where(again[:, None], before[:, :-1], -1)], axis=1)
            copies = 1 + jnp.sum(link >= 0, axis=1)  # no more are counted than a full tail takes
            reach = jnp.maximum(reach, link[:, -1])
        best = jnp.maximum(best, copies)
        links = links.at[jnp.where(going, rows, b), count % w].set(link, mode="drop")
    else:
        best = jnp.maximum(best, jnp.max(run, axis=1))
        lag = jnp.min(jnp.where(run >= needed[w], lags, _NEVER), axis=1)
        reach = jnp.maximum(reach, jnp.where(lag < _NEVER, count - lag - needed[w], -1))
    found = jnp.where(count <= w, best >= needed[jnp.minimum(count, w)], reach >= count - w)
    found &= going & (count >= rule.minimum)
    past = jnp.concatenate([ids[:, None], watch.past[:, :-1]], axis=1)
    heard = Watch(count, past, run, best, reach, links)
    kept = jax.tree.map(
        lambda new, old: jnp.where(_column(going, new), new, old),
        dataclasses.replace(heard, links=None),
        dataclasses.replace(watch, links=None),
    )
    return dataclasses.replace(kept, links=links), found


def _column(rows: Bool[Array, " b"], like: Array) -> Array:
    return rows.reshape(-1, *[1] * (like.ndim - 1))


@functools.partial(jax.jit, static_argnames=("rule",), donate_argnums=(0,))
def catch_up(
    watch: Watch,
    fresh: Bool[Array, " b"],
    begin: Int[Array, " b"],
    ids: Int[Array, "b t"],
    length: Int[Array, " b"],
    *,
    rule: Repetition,
) -> Watch:
    """Start the rows that are `fresh` anew and let them hear the first `length` of `ids`, of which `begin` others of
    the same turn stand before (beyond the tail)."""

    def forget(old: Array, value: int) -> Array:
        return jnp.where(_column(fresh, old), value, old)

    watch = Watch(
        count=jnp.where(fresh, begin, watch.count),
        past=forget(watch.past, -1),
        run=forget(watch.run, 0),
        best=forget(watch.best, 0),
        reach=forget(watch.reach, -1),
        links=watch.links,  # only those written since are read
    )

    def step(i: Array, watch: Watch) -> Watch:
        return hear(watch, rule, ids[:, i], fresh & (i < length))[0]

    return jax.lax.fori_loop(0, jnp.max(jnp.where(fresh, length, 0)), step, watch)
