"""The rollout engine: a host loop over slots that prefills, decodes in chunks, pauses at tags, and goes on where told.

    handles = engine.submit(Request(ids, images, n=8))
    for segment in engine.run():              # one turn of one trajectory, as soon as it ends
        ...
        engine.extend(segment.handle, observation_ids, observation_images)      # or engine.release(segment.handle)

Ids are never re-tokenised: what was sampled stays as it is, an observation is appended as ids, pictures by hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pyvision_jax.config import RolloutConfig, SamplingConfig
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.rollout.cache import Slots, bucket_of
from pyvision_jax.rollout.fill import Filler, Item
from pyvision_jax.rollout.repetition import Repetition, Watch, catch_up
from pyvision_jax.rollout.requests import Handle, Prefix, Request, Row, Segment, Stop, View, mixed_seed
from pyvision_jax.rollout.sampling import Filters, add_ids, no_ids
from pyvision_jax.rollout.step import FIELDS, Control, Tables, decode, fields, unpack
from pyvision_jax.rollout.tags import Tag, TagAutomaton


class Engine:
    """Samples trajectories from one set of weights on this host's devices, outside any `jax.set_mesh` of the trainer.

    `prefill_tokens` bounds rows x ids of one prefill program (at least the largest bucket).
    """

    def __init__(
        self,
        params: Any,
        cfg: ModelSpec,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        tokenizer: Tokenizer,
        tags: Sequence[Tag],
        processor: ImageProcessor,
        *,
        version: int = 0,
        implementation: str = "xla",
        prefill_tokens: int = 1_024,
    ):
        size = cfg.text.vocab_size
        if tokenizer.vocab_size > size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {size}")
        self.cfg, self.rollout, self.sampling = cfg, rollout, sampling
        self.version, self.implementation = version, implementation
        self.filters, self.repetition = Filters.of(sampling), Repetition.of(rollout.repetition)
        ends = {tokenizer.im_end: "im_end", tokenizer.endoftext: "endoftext"}
        token_bytes = [tokenizer.bytes_of(token) for token in range(tokenizer.vocab_size)]
        self.automaton = TagAutomaton.build(token_bytes, tags, ends, [tokenizer.im_start], size)
        self.forbidden = tokenizer.forbidden_mask(size)  # bool [v]: never sampled; the trainer masks the same ids
        tables = (self.automaton.next, self.automaton.stop, self.automaton.region, self.forbidden)
        self._tables = Tables(*map(jnp.asarray, tables))
        self._filler = Filler(params, cfg, rollout, processor, implementation, prefill_tokens)
        self._slots = Slots(rollout.slots)
        self._temperature = np.ones((rollout.slots, len(self.automaton.regions)), np.float32)
        self._watch = self.repetition and Watch.empty(self.repetition, rollout.slots, rollout.max_length)
        self._seen = no_ids(rollout.slots, size) if self.filters.repetition_penalty != 1 else None
        self._rows: dict[Handle, Row] = {}
        self._queue: deque[Row] = deque()  # rows that want a slot, first come first served
        self._done: deque[Segment] = deque()  # segments not handed out yet
        self._submitted = 0
        self.decode_steps = 0  # chunks x steps dispatched, for throughput figures

    # -- what the caller does ---------------------------------------------------------------------------------------

    def submit(self, request: Request) -> list[Handle]:
        """Queue the siblings of a request. Raises ValueError for ids or pictures that cannot be run."""
        sampling = request.sampling or self.sampling
        if (Filters.of(sampling), sampling.top_entropy) != (self.filters, self.sampling.top_entropy):
            raise ValueError(
                "a request can change temperatures; top_p, top_k, min_p, repetition_penalty and top_entropy are "
                "compiled into the engine's program"
            )
        seeds = list(request.seeds) if request.seeds is not None else self._seeds(request.seed, request.n)
        if len(seeds) != request.n:
            raise ValueError(f"{len(seeds)} seeds for {request.n} siblings")
        temperature = self.automaton.temperatures(sampling.temperature, code=sampling.code_temperature)
        max_length = min(request.max_length or self.rollout.max_length, self.rollout.max_length)
        prefix, rows, state = Prefix(len(request.ids) - 1), [], 0
        for index, seed in enumerate(seeds):
            row = Row(
                handle=Handle(self._submitted + index, request.group, index, seed),
                seed=_words(seed),
                temperature=temperature,
                max_turn_length=request.max_turn_length or self.rollout.max_turn_length,
                max_length=max_length,
                running=True,
            )
            if rows:  # positions and pictures of the prompt are worked out once
                row.ids, row.positions, row.images = list(rows[0].ids), list(rows[0].positions), list(rows[0].images)
                row.next_position, row.turn_start = rows[0].next_position, rows[0].turn_start
                row.said = rows[0].said
            else:
                self._append(row, request.ids, request.images)
                state = self.automaton.prompt_state(request.ids) if request.state is None else request.state
            row.state = state
            rows.append(row)
        self._submitted += request.n
        for row in rows:
            self._join(row, prefix)
            self._rows[row.handle] = row
            self._queue.append(row)
        return [row.handle for row in rows]

    def extend(
        self,
        handle: Handle,
        ids: Sequence[int] = (),
        images: Sequence[ProcessedImage] = (),
        state: int | None = None,
    ) -> None:
        """Append an observation to a waiting trajectory and let it go on; no ids: go on from where it stopped.

        The automaton goes on in the region that the turn ended in, unless the ids hold a role token: then in what
        follows the last one. `state` overrides that. Raises ValueError if the trajectory is running or has no room.
        """
        row = self._waiting(handle)
        self._append(row, ids, images)
        row.state = self._observed(row.state, ids) if state is None else state
        row.running = True
        if row.slot < 0:
            self._queue.append(row)

    def fork(self, handle: Handle, at: int | None = None, seed: int | None = None) -> Handle:
        """A new waiting trajectory with the first `at` ids (default: all) of another; `extend` sets it going.

        `at` must lie in what the policy sampled (the child then samples `ids[at]` anew, in the same automaton state) or
        at its end. KV is copied if the parent still holds its slot when the child gets one, else computed again.
        """
        parent = self._rows[handle]
        at = len(parent.ids) if at is None else at
        state = self._state_at(parent, at)
        if seed is None:
            seed = mixed_seed(handle.seed, at, parent.forks)
        parent.forks += 1
        positions = parent.position_range(0, at)
        child = Row(
            handle=Handle(self._submitted, handle.group, handle.index, seed),
            seed=_words(seed),
            temperature=parent.temperature,
            max_turn_length=parent.max_turn_length,
            max_length=parent.max_length,
            ids=parent.ids[:at],
            positions=[positions],
            images=[(begin, image) for begin, image in parent.images if begin < at],
            next_position=int(positions[0, -1]) + 1,
            state=state,
            turn_start=at,
            said=self._said_at(parent, at),
            policy=[(begin, states[: at - begin], said) for begin, states, said in parent.policy if begin < at],
        )
        self._submitted += 1
        prefix = Prefix(at - 1)
        self._join(parent, prefix, newest=False)
        self._join(child, prefix)
        self._rows[child.handle] = child
        return child.handle

    def release(self, handle: Handle) -> None:
        """Forget a trajectory, running or not, and free its slot."""
        row = self._rows.pop(handle)
        row.running = False
        for prefix in row.prefixes:
            prefix.rows.discard(row)
        if row.slot >= 0:
            self._slots.give(row.slot)
            row.slot = -1

    def view(self, handle: Handle) -> View:
        row = self._rows[handle]
        return View(
            np.array(row.ids, np.int32), row.position_range(0, len(row.ids)), tuple(image for _, image in row.images)
        )

    def room(self, handle: Handle) -> int:
        """Ids that an observation may have at most, so that one more can still be sampled."""
        row = self._rows[handle]
        return max(0, row.max_length - len(row.ids) - 1)

    @property
    def programs(self) -> frozenset[tuple[Any, ...]]:
        """(name, shape) of every program dispatched so far."""
        return frozenset(self._filler.programs)

    def update(self, params: Any, version: int) -> None:
        """New weights. Every cache of the old ones is void; trajectories in flight keep their ids, which are prefilled
        anew when they go on."""
        self.version = version
        self._filler.update(params)
        for row in self._rows.values():
            row.cached = 0

    def run(self, between: Callable[[], None] | None = None) -> Iterator[Segment]:
        """Yield turns as they end, in the order of their slots within a chunk, while the other rows go on.

        Returns when nothing can run: every unreleased trajectory waits for the caller (its segment was yielded, or it
        was forked), or is queued while waiting ones hold all slots. `between` is called before each chunk and may
        extend, submit and release too. May be called again at any time; segments left over from a loop that was broken
        off come first.
        """
        while True:
            while self._done:
                segment = self._done.popleft()
                if segment.handle in self._rows:
                    yield segment
            if between is not None:
                between()
            self._admit()
            running = [row for row in self._rows.values() if row.running and row.slot >= 0]
            if not running:
                return
            self._decode(running)

    # -- books ------------------------------------------------------------------------------------------------------

    def _seeds(self, seed: int, n: int) -> list[int]:
        return [mixed_seed(self.rollout.seed, seed, index) for index in range(n)]

    def _waiting(self, handle: Handle) -> Row:
        row = self._rows[handle]
        if row.running or any(segment.handle == handle for segment in self._done):
            raise ValueError(f"{handle} is running: it can be extended when its segment has been yielded")
        return row

    def _join(self, row: Row, prefix: Prefix, newest: bool = True) -> None:
        prefix.rows.add(row)
        row.prefixes.insert(len(row.prefixes) if newest else 0, prefix)

    def _append(self, row: Row, ids: Sequence[int], images: Sequence[ProcessedImage]) -> None:
        """Add ids that nobody sampled. Nothing is changed if they are refused."""
        new = np.asarray(ids, np.int32).reshape(-1)
        total = len(row.ids) + len(new)
        if total >= row.max_length:
            raise ValueError(f"{len(row.ids)} + {len(new)} ids leave no room below max_length {row.max_length}")
        if not total:
            raise ValueError("an empty prompt")
        if len(new):
            if new.min() < 0 or new.max() >= self.cfg.text.vocab_size:
                bad = int(new[(new < 0) | (new >= self.cfg.text.vocab_size)][0])
                raise ValueError(f"id {bad} is outside the vocabulary of {self.cfg.text.vocab_size}")
            if new[-1] in (self.cfg.image_token, self.cfg.video_token):
                raise ValueError("ids end with a picture: the id before the first sampled one must be text")
        for image in images:
            bucket_of(image.grid, self._filler.patch_buckets, self.cfg.vision)
        positions, following = mrope_positions(
            new, [image.grid for image in images], [], self.cfg, start=row.next_position
        )
        picture = np.concatenate([[False], new == self.cfg.image_token])
        begins = np.flatnonzero(picture[1:] & ~picture[:-1]) + len(row.ids)
        row.images += zip(begins.tolist(), images, strict=True)
        row.ids += new.tolist()
        row.positions.append(positions)
        row.next_position, row.turn_start = following, total
        row.said = total if len(new) else row.said

    def _observed(self, state: int, ids: Sequence[int]) -> int:
        if any(token in self.automaton.resets for token in ids):
            return self.automaton.prompt_state(ids)
        return int(self.automaton.rest[state])

    def _state_at(self, row: Row, at: int) -> int:
        """State in which `ids[at]` was sampled, or would be next."""
        if at == len(row.ids):
            return row.state
        turns = [(begin, states) for begin, states, _ in row.policy]
        if row.turn:
            turns.append((row.turn_start, np.concatenate([piece[4] for piece in row.turn])))
        for begin, states in turns:
            if begin <= at < begin + len(states):
                return int(states[at - begin])
            if at == begin + len(states) and len(states):
                return int(self.automaton.rest[self.automaton.next[states[-1], row.ids[at - 1]]])
        raise ValueError(f"cannot fork at {at}: ids[{at}] was not sampled, and no turn ends there")

    def _said_at(self, row: Row, at: int) -> int:
        """`Row.said` of a row that goes on at `at`: where the turn began that `ids[at]` belongs to."""
        if at == len(row.ids) or (row.turn and at >= row.turn_start):
            return row.said
        return next((said for begin, states, said in row.policy if begin <= at < begin + len(states)), at)

    # -- device work ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give slots to queued rows, and bring the cache of every running row up to its last id."""
        items = [
            Item([row], row.slot, row.cached)
            for row in self._rows.values()
            if row.running and row.slot >= 0 and row.missing
        ]
        leaders: dict[int, Item] = {}  # by prefix: the item of this round whose result siblings share
        while self._queue and self._slots.free:
            row = self._queue.popleft()
            if not row.running or row.slot >= 0:
                continue  # released meanwhile
            row.slot = self._slots.take()
            self._temperature[row.slot] = row.temperature
            prefix = row.prefixes[-1]
            exact = len(row.ids) - 1 == prefix.length  # nothing of its own yet
            source = next((r for r in prefix.rows if r.slot >= 0 and r.cached >= prefix.length > 0), None)
            if exact and id(prefix) in leaders:
                leaders[id(prefix)].rows.append(row)
                continue
            item = Item([row], row.slot, 0) if source is None else Item([row], source.slot, prefix.length)
            if exact:
                leaders[id(prefix)] = item
            items.append(item)
        self._filler.fill(items)

    def _decode(self, rows: list[Row]) -> None:
        """One chunk for all running rows, and the books of what it sampled."""
        slots = self.rollout.slots
        host: dict[str, Any] = {
            name: np.zeros(slots, np.int32) for name in ("token", "state", "length", "delta", "left")
        }
        host["seed"] = np.zeros((slots, 2), np.uint32)
        for row in rows:
            slot = row.slot
            host["token"][slot], host["state"][slot] = row.ids[-1], row.state
            host["length"][slot], host["delta"][slot] = row.cached, row.next_position - len(row.ids)
            host["left"][slot], host["seed"][slot] = row.left, row.seed
        if self._seen is not None:
            self._mark(rows, self._seen)
        if self._watch is not None:
            self._listen(rows)
        control = Control(
            **host,
            temperature=jnp.asarray(self._temperature),
            seen=self._seen if self._seen is None else jnp.array(self._seen),
        )
        out, self._watch = self._filler.run(
            decode,
            ("decode", slots, self.rollout.chunk),
            control,
            self._tables,
            self._watch,
            chunk=self.rollout.chunk,
            filters=self.filters,
            top_entropy=self.sampling.top_entropy,
            repetition=self.repetition,
        )
        out = unpack(out, fields(self.sampling.top_entropy, self.repetition))
        counts = (out["id"] >= 0).sum(axis=0)
        self.decode_steps += int(counts.max())
        for row in rows:
            self._book(row, int(counts[row.slot]), {name: values[:, row.slot] for name, values in out.items()})

    def _mark(self, rows: list[Row], seen: np.ndarray) -> None:
        """Bring the masks of the repetition penalty up to each row's last id."""
        for row in rows:
            if not row.marked:
                seen[row.slot] = 0
            add_ids(seen[row.slot], np.array(row.ids[row.marked :], np.int64))
            row.marked = len(row.ids)

    def _listen(self, rows: list[Row]) -> None:
        """Bring the repetition watch up to the last id of rows that it does not know: a new turn has none yet, one that
        a fork or a new slot goes on with is heard again."""
        slots, fresh = self.rollout.slots, [row for row in rows if row.heard != len(row.ids)]
        if not fresh or self._watch is None:
            return
        width = self._watch.past.shape[1]
        again = any(row.said < len(row.ids) for row in fresh)
        ids = np.zeros((slots, width if again else 1), np.int32)
        begin, length, marked = np.zeros(slots, np.int32), np.zeros(slots, np.int32), np.zeros(slots, bool)
        for row in fresh:
            turn = row.ids[max(row.said, len(row.ids) - width) :]
            ids[row.slot, : len(turn)], length[row.slot] = turn, len(turn)
            begin[row.slot], marked[row.slot] = len(row.ids) - row.said - len(turn), True
        assert self.repetition is not None
        self._filler.programs.add(("catch_up", ids.shape))
        self._watch = catch_up(self._watch, marked, begin, ids, length, rule=self.repetition)

    def _book(self, row: Row, n: int, out: dict[str, np.ndarray]) -> None:
        ids, states, logprobs, policy_logprobs, entropies = (out[name][:n].copy() for name in FIELDS)
        temperatures = row.temperature[self.automaton.region[states]]
        versions = np.full(n, self.version, np.int32)
        piece = (ids, logprobs, policy_logprobs, entropies, states, temperatures, versions)
        row.turn.append((*piece, out["top_entropy"][:n].copy()) if "top_entropy" in out else piece)
        row.ids += ids.tolist()
        row.positions.append(
            np.broadcast_to(np.arange(row.next_position, row.next_position + n, dtype=np.int32), (3, n))
        )
        row.next_position += n
        row.cached += n
        row.heard = len(row.ids)
        state, last = int(self.automaton.next[states[-1], ids[-1]]), int(ids[-1])
        row.state = int(self.automaton.rest[state])
        event, trim = "", 0
        if self.automaton.stop[state]:
            event = self.automaton.events[self.automaton.event[state]]
            trim = self.automaton.trim(int(states[-1]), last)
            stop = Stop.END if last in self.automaton.ends else Stop.TAG
        elif row.left <= 0:
            stop = Stop.LENGTH if len(row.ids) >= row.max_length else Stop.TURN_LENGTH
        elif "repeated" in out and out["repeated"][n - 1]:
            stop = Stop.REPETITION
        else:
            return
        pieces = [np.concatenate(piece) for piece in zip(*row.turn, strict=True)]
        top = pieces.pop() if "top_entropy" in out else None
        self._done.append(
            Segment(row.handle, row.turn_start, *pieces, stop=stop, event=event, trim=trim, top_entropies=top)
        )
        row.policy.append((row.turn_start, pieces[4], row.said))
        row.turn, row.running = [], False
        row.said, row.heard = len(row.ids), 0  # what comes next is another turn


def _words(seed: int) -> tuple[int, int]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is not in [0, 2**64)")
    return seed >> 32, seed & 0xFFFFFFFF
