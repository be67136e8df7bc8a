"""What goes into the engine and what comes out of it, and the books it keeps about one trajectory."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from pyvision_jax.config import SamplingConfig
from pyvision_jax.data.image_processing import ProcessedImage


class Stop(enum.StrEnum):
    """Why a segment ended."""

    TAG = "tag"  # a tag or stop string with `Tag.stop`: `Segment.event` is its name
    END = "end"  # an end token: `Segment.event` is its name
    TURN_LENGTH = "turn_length"  # max_turn_length sampled
    LENGTH = "length"  # max_length reached: the trajectory can not go on
    REPETITION = "repetition"


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt from which `n` siblings are sampled; its text, pictures and KV are computed once.

    `seeds` are the siblings' own (64 bits each); by default they follow from `seed` and the sibling's index, and from
    `RolloutConfig.seed`. `sampling` replaces the engine's temperatures (all else is compiled in and must be equal).
    `state` is the automaton's state after the prompt, by default read off the ids after the last role token.
    """

    ids: Sequence[int]
    images: Sequence[ProcessedImage] = ()
    group: str = ""
    n: int = 1
    seed: int = 0
    seeds: Sequence[int] | None = None
    max_turn_length: int | None = None
    max_length: int | None = None
    sampling: SamplingConfig | None = None
    state: int | None = None


@dataclasses.dataclass(frozen=True)
class Handle:
    """Names one trajectory in the engine."""

    id: int
    group: str
    index: int  # of the sibling in its group
    seed: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """What one turn sampled: `ids` follow `start` ids of the trajectory. Arrays have one entry per id.

    `states` and `temperatures` are those the id was sampled in. `logprobs` and `policy_logprobs`: see
    `rollout.sampling.Sample`. `trim` bytes of the last id lie past the tag that stopped the turn; they stay in the
    context.
    """

    handle: Handle
    start: int
    ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    policy_logprobs: np.ndarray  # float32
    entropies: np.ndarray  # float32, nats
    states: np.ndarray  # int32
    temperatures: np.ndarray  # float32
    versions: np.ndarray  # int32
    stop: Stop
    event: str = ""
    trim: int = 0
    top_entropies: np.ndarray | None = None  # float32, nats: of the SamplingConfig.top_entropy most likely ids

    @property
    def version(self) -> int:
        """Weight version of the last id."""
        return int(self.versions[-1])


@dataclasses.dataclass(frozen=True)
class View:
    """A trajectory as it stands: ids int32 [T], positions int32 [3, T], pictures in order of appearance."""

    ids: np.ndarray
    positions: np.ndarray
    images: tuple[ProcessedImage, ...]


@dataclasses.dataclass(eq=False)
class Prefix:
    """The first `length` ids that several rows have in common: any of them may copy its KV from another."""

    length: int
    rows: set[Row] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Row:
    """The engine's books of one trajectory. KV of the first `cached` ids lie in `slot`; the last id is never among them
    (the next decode step takes it)."""

    handle: Handle
    seed: tuple[int, int]  # the two words of the key
    temperature: np.ndarray  # float32 [regions]
    max_turn_length: int
    max_length: int
    ids: list[int] = dataclasses.field(default_factory=list)
    positions: list[np.ndarray] = dataclasses.field(default_factory=list)  # int32 [3, n] each; together all of `ids`
    images: list[tuple[int, ProcessedImage]] = dataclasses.field(default_factory=list)  # (index of the first token, it)
    next_position: int = 0
    state: int = 0
    running: bool = False
    slot: int = -1  # none
    cached: int = 0
    turn_start: int = 0
    # pieces: Segment's ids ... versions, and top_entropies if they are recorded
    turn: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    # finished turns: (start, states, said)
    policy: list[tuple[int, np.ndarray, int]] = dataclasses.field(default_factory=list)
    prefixes: list[Prefix] = dataclasses.field(default_factory=list)  # the newest is the one to copy from
    forks: int = 0
    said: int = 0  # where the turn begins that the repetition stop looks at; a fork inside a turn goes on with it
    heard: int = 0  # ids up to which the slot's repetition watch knows that turn; 0: nothing of it
    marked: int = 0  # ids that stand in the slot's mask for the repetition penalty; 0: the mask is another row's

    @property
    def left(self) -> int:
        """Ids that may still be sampled in this turn."""
        return min(self.turn_start + self.max_turn_length, self.max_length) - len(self.ids)

    @property
    def missing(self) -> int:
        """Ids to put into the cache before the row can decode."""
        return len(self.ids) - 1 - self.cached

    def position_range(self, start: int, end: int) -> np.ndarray:
        """int32 [3, end - start]."""
        if len(self.positions) != 1:
            self.positions[:] = [np.concatenate(self.positions, axis=1)]
        return self.positions[0][:, start:end]


def mixed_seed(*numbers: int) -> int:
    """A 64-bit seed from several numbers of any size."""
    low, high = np.random.SeedSequence(numbers).generate_state(2)
    return int(high) << 32 | int(low)
