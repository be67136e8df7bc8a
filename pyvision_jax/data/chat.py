"""Messages to ids in Qwen2.5-VL's chat format, and traces to ids with the spans that are learned.

Ids are built piece by piece: control tokens and vision spans by id, everything written by anyone as literal text. So
`<|image_pad|>` in a question stays text, and loss masks come from the pieces, never from a search through ids.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from pyvision_jax.data.records import Message, Part, Role

if TYPE_CHECKING:
    from pyvision_jax.data.tokenizer import Tokenizer

DEFAULT_SYSTEM = "You are a helpful assistant."

# The same format for transformers, written into exported directories. `add_vision_id` numbers pictures and videos.
CHAT_TEMPLATE = """\
{%- set seen = namespace(image=0, video=0) -%}
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {%- set seen.image = seen.image + 1 -%}
                {{- 'Picture ' ~ seen.image ~ ': ' if add_vision_id else '' -}}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {%- set seen.video = seen.video + 1 -%}
                {{- 'Video ' ~ seen.video ~ ': ' if add_vision_id else '' -}}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


@dataclasses.dataclass(frozen=True)
class RoleSpan:
    """Ids `[start, end)` of one role, all of one loss weight (of the id itself, as a target)."""

    role: Role
    start: int
    end: int
    weight: float


class Prompt(NamedTuple):
    """A prompt: its ids, and spans that cover them without gaps (all of weight 0)."""

    ids: list[int]
    roles: list[RoleSpan]


class Trace(NamedTuple):
    """A trace: its ids, spans that cover them without gaps, and the media indices in order of appearance."""

    ids: list[int]
    spans: list[RoleSpan]
    media: list[int]


def render_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    image_tokens: Sequence[int],
    default_system: bool = True,
    generation_prompt: bool = True,
) -> Prompt:
    """Ids equal to HF's Qwen2.5-VL template with every placeholder expanded to `image_tokens[part.index]` pads.

    `image_tokens[i]` counts the merged tokens of media i. Without a system message the stock one is put first, unless
    `default_system` is off. Pictures appear in the order of `media_order(messages)`.
    Raises `ValueError` where placeholders and media do not match one to one, naming the role.
    """
    check_media(messages, len(image_tokens))
    writer = _Writer(tokenizer, image_tokens)
    writer.messages(messages, default_system)
    if generation_prompt:
        writer.header("assistant")
    return Prompt(writer.ids, writer.spans())


def render_trace(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    image_tokens: Sequence[int],
    default_system: bool = True,
) -> Trace:
    """Ids of a whole conversation and what is learned of it, for supervised training.

    The assistant's text has its part's weight and its `<|im_end|>` the largest weight of its parts, at most 1; headers,
    vision tokens and all other roles have 0. What the assistant wrote is encoded apart from its header, as it is when
    it is sampled: `render_prompt(messages[:k])` is a prefix of the trace for an assistant message k. A token that
    crosses from one part into the next counts for the part that it starts in.
    """
    check_media(messages, len(image_tokens))
    writer = _Writer(tokenizer, image_tokens, learn=True)
    writer.messages(messages, default_system)
    return Trace(writer.ids, writer.spans(), media_order(messages))


def render_turn(
    message: Message,
    tokenizer: Tokenizer,
    image_tokens: Sequence[int],
    generation_prompt: bool = True,
) -> list[int]:
    """Ids that follow a policy's `<|im_end|>`: line end, one whole message, and the header of the next policy turn.

    Appending them to a conversation gives what `render_trace` gives for it, so history is never rendered again.
    """
    check_media([message], len(image_tokens))
    writer = _Writer(tokenizer, image_tokens)
    writer.text("\n")
    writer.message(message)
    if generation_prompt:
        writer.header("assistant")
    return writer.ids


def encode_parts(parts: Iterable[Part], tokenizer: Tokenizer, image_tokens: Sequence[int]) -> list[int]:
    """Ids of bare content: text as literals, pictures and videos as vision spans, no role around them."""
    writer = _Writer(tokenizer, image_tokens)
    writer.parts(parts)
    writer.flush()
    return writer.ids


def media_order(messages: Iterable[Message]) -> list[int]:
    """Indices into `Record.media` in the order in which the messages show them."""
    return [part.index for message in messages for part in message.parts if part.kind != "text"]


def check_media(messages: Sequence[Message], count: int) -> None:
    """Raises `ValueError` unless the messages show each of `count` media exactly once."""
    shown: collections.Counter[int] = collections.Counter()
    roles: collections.Counter[str] = collections.Counter()
    for number, message in enumerate(messages):
        for part in message.parts:
            if part.kind == "text":
                continue
            if not 0 <= part.index < count:
                raise ValueError(f"message {number} ({message.role}) shows media {part.index}, but {count} are given")
            shown[part.index] += 1
            roles[message.role] += 1
    if shown.total() != count or len(shown) != count:
        by_role = ", ".join(f"{role} {n}" for role, n in roles.items()) or "none"
        wrong = [index for index in range(count) if shown[index] != 1]
        raise ValueError(f"placeholders by role: {by_role}; media: {count}; not shown exactly once: {wrong}")


def span_weights(spans: Iterable[RoleSpan], length: int) -> np.ndarray:
    """float32 `[length]`: the loss weight of each id as a target."""
    weights = np.zeros(length, np.float32)
    for span in spans:
        weights[span.start : span.end] = span.weight
    return weights


def mask_view(ids: Sequence[int], weights: Sequence[float] | np.ndarray, tokenizer: Tokenizer) -> Text:
    """The ids as coloured text for a terminal: learned tokens green (bold above weight 1), others dim, pads counted.

    `weights` holds one number for each id (`span_weights`).
    """
    if len(ids) != len(weights):
        raise ValueError(f"{len(ids)} ids, but {len(weights)} weights")
    view = Text()
    entries = zip((int(index) for index in ids), (float(weight) for weight in weights), strict=True)
    for (pad, weight), group in itertools.groupby(
        entries, lambda e: (e[0] if e[0] in (tokenizer.image_pad, tokenizer.video_pad) else None, e[1])
    ):
        run = [index for index, _ in group]
        text = tokenizer.decode(run) if pad is None else f"{tokenizer.decode([pad])}x{len(run)}"
        style = "dim" if weight == 0 else "bold black on green" if weight > 1 else "black on green"
        view.append(text, style=style)
    return view


class _Writer:
    """Grows ids with a role and a weight for each. Neighbouring text is encoded together, as HF does."""

    def __init__(self, tokenizer: Tokenizer, image_tokens: Sequence[int], learn: bool = False):
        self.tokenizer = tokenizer
        self.image_tokens = image_tokens
        self.learn = learn
        self.role: Role = "system"
        self.ids: list[int] = []
        self._roles: list[Role] = []
        self._starts: list[int] = []  # where messages start: a span never runs over the border of two
        self._weights: list[float] = []
        self._pending: list[tuple[str, float]] = []

    def messages(self, messages: Sequence[Message], default_system: bool) -> None:
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if default_system and messages[0].role != "system":
            self.message(Message("system", (Part("text", DEFAULT_SYSTEM),)))
        for message in messages:
            self.message(message)

    def message(self, message: Message) -> None:
        learned = self.learn and message.role == "assistant"
        self.header(message.role, encode=learned)
        self.parts(message.parts, learned)
        end = min(1.0, max((part.weight for part in message.parts if part.kind == "text"), default=1.0))
        self.token(self.tokenizer.im_end, end if learned else 0.0)
        self.text("\n")
        self.flush()

    def header(self, role: Role, encode: bool = True) -> None:
        self.flush()
        self.role = role
        self._starts.append(len(self.ids))
        self.token(self.tokenizer.im_start)
        self.text(f"{role}\n")
        if encode:
            self.flush()

    def parts(self, parts: Iterable[Part], learned: bool = False) -> None:
        pads = {"image": self.tokenizer.image_pad, "video": self.tokenizer.video_pad}
        for part in parts:
            if part.kind == "text":
                self.text(part.text, part.weight if learned else 0.0)
                continue
            self.token(self.tokenizer.vision_start)
            self.token(pads[part.kind], count=self.image_tokens[part.index])
            self.token(self.tokenizer.vision_end)

    def token(self, index: int, weight: float = 0.0, count: int = 1) -> None:
        self.flush()
        self._extend([index] * count, [weight] * count)

    def text(self, text: str, weight: float = 0.0) -> None:
        if text:
            self._pending.append((text, weight))

    def flush(self) -> None:
        if not self._pending:
            return
        ids, starts = self.tokenizer.encode_with_starts("".join(text for text, _ in self._pending))
        ends = list(itertools.accumulate(len(text) for text, _ in self._pending))
        self._extend(ids, [self._pending[bisect.bisect_right(ends, start)][1] for start in starts])
        self._pending = []

    def spans(self) -> list[RoleSpan]:
        self.flush()
        spans: list[RoleSpan] = []
        starts = set(self._starts)
        for index, (role, weight) in enumerate(zip(self._roles, self._weights, strict=True)):
            if spans and index not in starts and spans[-1].weight == weight:
                spans[-1] = dataclasses.replace(spans[-1], end=index + 1)
            else:
                spans.append(RoleSpan(role, index, index + 1, weight))
        return spans

    def _extend(self, ids: list[int], weights: list[float]) -> None:
        self.ids += ids
        self._weights += weights
        self._roles.extend(itertools.repeat(self.role, len(ids)))
