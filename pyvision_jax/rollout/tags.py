"""Tags matched on the device: a byte automaton over tags and stop strings, lifted once to tokens.

A tag is seen in the bytes of the text, however the policy cuts it into tokens. The automaton's state is a pair: the
region the text is in (outside, inside `<code>`, ...) and how much of a tag has been read there. Each region matches
only the strings that mean something in it, so an answer quoted inside code is text. One gather per step,
`next[state, id]`, gives the new state; temperature, stop and event are tables over states.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tag:
    """A region between two strings, or (with `open` empty) a plain stop string.

    `close` ends the policy's turn when `stop` is set; `temperature` is that of tokens sampled from after `open` through
    `close` (None: as outside). Inside the region only `close` and the tags named in `inside` are matched.
    """

    name: str
    close: str
    open: str = ""
    stop: bool = True
    temperature: float | None = None
    inside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mark:
    """A tag seen by `TagAutomaton.marks`: it ends `trim` bytes before the end of `ids[index]`."""

    name: str
    kind: str  # "open" | "close" | "end" (an end token)
    index: int
    trim: int


@dataclasses.dataclass(frozen=True)
class TagAutomaton:
    """Tables over S states and v ids. State 0 (`start`) is outside every region with nothing matched.

    `rest` is the state to go on from after a stop (the enclosing region; `start` after an end token), itself elsewhere.
    """

    next: np.ndarray  # int16 [S, v]
    stop: np.ndarray  # bool [S]: the turn ends on entering the state
    event: np.ndarray  # int16 [S]: index into `events` for states with `stop`, else -1
    region: np.ndarray  # int16 [S]: index into `regions`
    rest: np.ndarray  # int16 [S]
    events: tuple[str, ...]  # names of tags and of end tokens
    regions: tuple[tuple[str, ...], ...]  # names of the open tags, outermost first; () is outside
    byte_next: np.ndarray  # int16 [S, 256]
    fires: np.ndarray  # int16 [S, 256]: 2 * event (open) or 2 * event + 1 (close) completed by the byte, else -1
    token_bytes: tuple[bytes, ...]
    ends: Mapping[int, int]  # end id -> its state
    resets: frozenset[int]
    tag_temperatures: Mapping[str, float | None]
    start: int = 0

    @classmethod
    def build(
        cls,
        token_bytes: Sequence[bytes],
        tags: Sequence[Tag],
        ends: Mapping[int, str],
        resets: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> TagAutomaton:
        """Lift the tags to the vocabulary.

        Args:
          token_bytes: the exact bytes of each id.
          tags: what to match; names are unique.
          ends: ids that end a turn, with the name of their event (`{im_end: "im_end"}`). They are matched by id: the
            same characters written as text do not end anything.
          resets: ids that put the automaton back to `start` (a new role).
          vocab_size: rows of the model's embedding where that is more than `len(token_bytes)`; the rest read as empty.

        Raises:
          ValueError: for an empty `close`, a name used twice or unknown, regions inside themselves, or two tags that
            are written alike in one region.
        """
        named = {tag.name: tag for tag in tags}
        if len(named) < len(tags):
            raise ValueError(f"tag names are not unique: {[tag.name for tag in tags]}")
        events = (*named, *ends.values())
        dfa = _Bytes({name: i for i, name in enumerate(events)}, named)
        dfa.add_region((), tuple(named), -1)
        end_states = {token: dfa.new_state(region=0, rest=0, event=events.index(name)) for token, name in ends.items()}
        byte_next = np.array(dfa.next, np.int16)
        size = max(vocab_size or 0, len(token_bytes))
        table = _lift(byte_next, [*token_bytes, *[b""] * (size - len(token_bytes))])
        for token, state in end_states.items():
            table[:, token] = state
        for token in resets:
            table[:, token] = 0
        event = np.array(dfa.event, np.int16)
        return cls(
            next=table,
            stop=event >= 0,
            event=event,
            region=np.array(dfa.region, np.int16),
            rest=np.array(dfa.rest, np.int16),
            events=events,
            regions=tuple(dfa.regions),
            byte_next=byte_next,
            fires=np.array(dfa.fires, np.int16),
            token_bytes=tuple(token_bytes),
            ends=end_states,
            resets=frozenset(resets),
            tag_temperatures={tag.name: tag.temperature for tag in tags},
        )

    def temperatures(self, default: float, **overrides: float | None) -> np.ndarray:
        """Temperature of each region, float32 [regions]: the innermost tag that has one, else `default`.

        An override that is not None stands for the temperature of the tag of that name.
        """
        chosen = {**self.tag_temperatures, **{name: value for name, value in overrides.items() if value is not None}}
        out = np.full(len(self.regions), default, np.float32)
        for index, path in enumerate(self.regions):
            for name in path:
                value = chosen[name]
                if value is not None:
                    out[index] = value
        return out

    def scan(self, ids: Sequence[int], state: int = 0) -> int:
        """State after `ids`; stops on the way are passed over (text that nobody sampled ends nothing)."""
        for token in ids:
            state = int(self.rest[self.next[state, token]])
        return state

    def prompt_state(self, ids: Sequence[int]) -> int:
        """State after a prompt: what follows its last role id decides (a forced `<answer>` opens its region)."""
        last = max((i for i, token in enumerate(ids) if token in self.resets), default=-1)
        return self.scan(ids[last + 1 :])

    def trim(self, state: int, token: int) -> int:
        """Bytes of `token`, sampled in `state`, that lie past the stop it completes; 0 where it completes none."""
        if token in self.ends or token in self.resets:
            return 0
        data = self._bytes(token)
        for position, byte in enumerate(data):
            state = int(self.byte_next[state, byte])
            if self.stop[state]:
                return len(data) - position - 1
        return 0

    def marks(self, ids: Sequence[int], state: int = 0) -> list[Mark]:
        """Every tag completed in `ids`, which were sampled from `state` on, in order; a stop is passed over."""
        found: list[Mark] = []
        for index, token in enumerate(ids):
            if token in self.ends:
                found.append(Mark(self.events[self.event[self.ends[token]]], "end", index, 0))
                state = self.start
                continue
            if token in self.resets:
                state = self.start
                continue
            data = self._bytes(token)
            for position, byte in enumerate(data):
                fired = int(self.fires[state, byte])
                state = int(self.byte_next[state, byte])
                if fired >= 0:
                    kind = "close" if fired % 2 else "open"
                    found.append(Mark(self.events[fired // 2], kind, index, len(data) - position - 1))
                if self.stop[state]:  # the rest of this token is past the stop, and means nothing to the automaton
                    state = int(self.rest[state])
                    break
        return found

    def _bytes(self, token: int) -> bytes:
        return self.token_bytes[token] if token < len(self.token_bytes) else b""


class _Bytes:
    """The byte automaton while it grows: one Aho-Corasick machine per region, joined by the tags that lead between."""

    def __init__(self, events: dict[str, int], tags: dict[str, Tag]):
        self.events, self.tags = events, tags
        self.next: list[list[int]] = []
        self.fires: list[list[int]] = []
        self.region: list[int] = []
        self.rest: list[int] = []
        self.event: list[int] = []
        self.regions: list[tuple[str, ...]] = []

    def new_state(self, region: int, rest: int | None = None, event: int = -1) -> int:
        state = len(self.next)
        self.next.append([state] * 256)  # a stop is left by nothing: the bytes past it stay unread
        self.fires.append([-1] * 256)
        self.region.append(region)
        self.rest.append(state if rest is None else rest)
        self.event.append(event)
        return state

    def add_region(self, path: tuple[str, ...], allowed: tuple[str, ...], parent_root: int) -> int:
        """Add the region `path` and those inside it; returns the state in which nothing of a tag has been read."""
        region = len(self.regions)
        self.regions.append(path)
        root = self.new_state(region)
        words: dict[bytes, tuple[int, int]] = {}  # string -> (state it leads to, fired code)

        def word(text: str, target: int, fired: int) -> None:
            data = text.encode()
            if not data:
                raise ValueError(f"a tag inside region {path or 'outside'} has an empty string")
            if data in words:
                raise ValueError(f"{text!r} means two things inside region {path or 'outside'}")
            words[data] = (target, fired)

        if path:
            word(self.tags[path[-1]].close, *self._closed(self.tags[path[-1]], region, parent_root))
        for name in allowed:
            if name not in self.tags:
                raise ValueError(f"tag {path[-1]!r} allows an unknown tag {name!r} inside")
            tag = self.tags[name]
            if not tag.open:
                word(tag.close, *self._closed(tag, region, root))
            elif name in path:
                raise ValueError(f"tag {name!r} is allowed inside itself: {'/'.join((*path, name))}")
            else:
                word(tag.open, self.add_region((*path, name), tag.inside, root), 2 * self.events[name])
        self._machine(root, region, words)
        return root

    def _closed(self, tag: Tag, region: int, after: int) -> tuple[int, int]:
        """State and code of a completed `close`: a stop, or the enclosing region."""
        event = self.events[tag.name]
        return (self.new_state(region, after, event) if tag.stop else after), 2 * event + 1

    def _machine(self, root: int, region: int, words: dict[bytes, tuple[int, int]]) -> None:
        """Aho-Corasick over `words`. Completing one leads out of the machine, so whole words get no state."""
        trie: list[dict[int, int]] = [{}]
        whole: dict[int, tuple[int, int]] = {}
        for data, target in words.items():
            node = 0
            for byte in data:
                if byte not in trie[node]:
                    trie[node][byte] = len(trie)
                    trie.append({})
                node = trie[node][byte]
            whole[node] = target
        fail = [0] * len(trie)
        order: list[int] = []
        queue = deque([0])
        while queue:  # breadth first: a node's suffix is always done before it
            node = queue.popleft()
            order.append(node)
            for byte, child in trie[node].items():
                back = fail[node]
                while back and byte not in trie[back]:
                    back = fail[back]
                fail[child] = trie[back].get(byte, 0) if node else 0
                if child not in whole and fail[child] in whole:
                    whole[child] = whole[fail[child]]  # a shorter tag ends here, inside a longer one
                if child not in whole:
                    queue.append(child)
        state = {0: root}
        for node in order[1:]:
            state[node] = self.new_state(region)
        for node in order:
            here = state[node]
            # start from the suffix's row, which is complete (breadth first), then follow the trie
            self.next[here] = list(self.next[state[fail[node]]]) if node else [root] * 256
            self.fires[here] = list(self.fires[state[fail[node]]]) if node else [-1] * 256
            for byte, child in trie[node].items():
                self.next[here][byte], self.fires[here][byte] = whole.get(child) or (state[child], -1)


def _lift(byte_next: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """`next[state, id]` int16 [S, v]: all tokens advance together, one byte position at a time."""
    lengths = np.array([len(data) for data in token_bytes], np.int64)
    order = np.argsort(-lengths, kind="stable")  # the tokens that still have bytes are always a prefix
    offsets = (np.cumsum(lengths) - lengths)[order]
    buffer = np.frombuffer(b"".join(token_bytes), np.uint8)
    states = np.repeat(np.arange(len(byte_next), dtype=np.int16)[:, None], len(token_bytes), axis=1)
    flat = np.ascontiguousarray(byte_next).reshape(-1)
    for position in range(int(lengths.max(initial=0))):
        count = int(np.searchsorted(-lengths[order], -position))
        column = buffer[offsets[:count] + position]
        for row in states:
            row[:count] = flat[row[:count].astype(np.int32) * 256 + column]
    out = np.empty_like(states)
    out[:, order] = states
    return out
