"""PyVision-RL's image protocol (arXiv 2602.20739; facts of the form: agents-x-project/PyVision-RL, parallel_env.py).

The policy writes Python between `<code>` and `</code>`, sees `<interpreter>` output in a user turn, and answers in
`<answer>` with a box. Pictures are named `image_clue_k`, the input ones first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from PIL import Image

from pyvision_jax.agents.prompts import TEMPLATES
from pyvision_jax.agents.protocol import Action, Code, Final, Malformed, Observation, Prompt
from pyvision_jax.config import ImageConfig, ProtocolConfig
from pyvision_jax.data.chat import encode_parts, render_prompt, render_trace, render_turn, span_weights
from pyvision_jax.data.image_processing import ImageProcessor, ProcessedImage
from pyvision_jax.data.media import Generators, MediaError, open_image
from pyvision_jax.data.packing import Example, image_token_index
from pyvision_jax.data.records import Message, Part, Record
from pyvision_jax.data.tokenizer import Tokenizer
from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.positions import mrope_positions
from pyvision_jax.rewards.answers import last_answer_block, unbox
from pyvision_jax.rollout.tags import Tag
from pyvision_sandbox import Result, observation_text

TAGS = (
    Tag("code", open="<code>", close="</code>", stop=True),
    Tag("answer", open="<answer>", close="</answer>", stop=False),
)
FORCED_ANSWER = "<answer>\n\\boxed{"
TOOL_OFF = "The Python tool is switched off. Answer from what you see."

_CODE = re.compile(r"<code>(.*?)</code>", re.S)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+-]*)[ \t]*$", re.M)
_LANGUAGES = {"", "python", "py", "python3"}


def read_code(block: str) -> Code | Malformed:
    """The program in a `<code>` block: bare, or in one fence of backticks or tildes.

    The language may be missing, `python`, `py` or `python3` in any case. The last line that is nothing but the fence
    closes it, so backticks in a string or in the middle of a line are code; an unclosed fence runs to `</code>`.
    """
    text = block.replace("\r\n", "\n").strip("\n")
    if not text.strip():
        return Malformed("The code block is empty. Put Python between <code> and </code>.")
    if text.lstrip().startswith(("```", "~~~")) and not _FENCE.match(text):
        return Malformed("Put the code on the lines below the fence, not on the fence's own line.")
    opening = _FENCE.search(text)
    if opening is None:
        return Code(text)
    if text[: opening.start()].strip():
        return Malformed(
            "There is text before the fence. Put one fenced block, and nothing else, between the code tags."
        )
    if opening.group(2).lower() not in _LANGUAGES:
        return Malformed(f"The language of the code block is {opening.group(2)!r}; only Python is run.")
    body = text[opening.end() :].removeprefix("\n")
    fences = [m for m in _FENCE.finditer(body) if m.group(1) == opening.group(1)]
    if any(m.group(2) for m in fences):
        return Malformed("There are several code blocks between the code tags. Put one.")
    if fences:
        closing = fences[-1]
        if body[closing.end() :].strip():
            return Malformed("There is text after the closing fence. Put one fenced block, and nothing else.")
        body = body[: closing.start()].removesuffix("\n")
    return Code(body) if body.strip() else Malformed("The code block is empty. Put Python between <code> and </code>.")


@dataclasses.dataclass(frozen=True)
class PyVisionImage:
    """Image agent. `generators` draws pictures of generated worlds (`Media.make`); paths start at `media_root`."""

    config: ProtocolConfig
    image: ImageConfig
    tokenizer: Tokenizer
    processor: ImageProcessor
    spec: ModelSpec
    generators: Generators | None = None
    media_root: str | None = None
    tags: tuple[Tag, ...] = TAGS

    def build(self, record: Record) -> Prompt:
        asked = [message for message in record.messages if message.role in ("system", "user")]
        if sum(message.role == "user" for message in asked) != 1:
            raise ValueError(f"record {record.id}: a task has one user message")
        pictures = self.pictures(record, [p.index for m in asked for p in m.parts if p.kind == "image"])
        images = [self.processor.process(picture) for picture in pictures.values()]
        order = {index: k for k, index in enumerate(pictures)}
        messages = [
            self._reindexed(self._question(message, pictures, 0, self.config.template), order) for message in asked
        ]
        ids = list(render_prompt(messages, self.tokenizer, self._tokens(images)).ids)
        prefix = self.tokenizer.encode(FORCED_ANSWER) if self.config.force_answer else []
        named = {f"image_clue_{k}": picture for k, picture in enumerate(pictures.values())}
        return Prompt(ids + prefix, images, named, len(prefix))

    def parse(self, text: str) -> Action:
        outside = _CODE.sub("", text)  # an answer quoted inside code is code
        answer = last_answer_block(FORCED_ANSWER + text if self.config.force_answer else outside)
        if answer is not None:
            boxed = unbox(answer)
            return Final(boxed if boxed is not None else answer, boxed is not None)
        blocks = _CODE.findall(text)
        if blocks:
            return read_code(blocks[-1])
        return Malformed(
            "Neither code nor an answer was found. Write <code>...</code> to run Python, or <answer>...</answer>."
        )

    def observe(self, result: Result, closed: bool, shown: int) -> Observation:
        """Pictures beyond `max_aspect` are left out and said so (released form: an error ends the episode)."""
        text = observation_text(result, self.config.max_text)
        images: dict[int, ProcessedImage] = {}  # by number; a picture that is left out keeps its number
        for number, pixels in enumerate(result.images, start=shown):
            height, width = pixels.shape[:2]
            if max(height, width) > self.image.max_aspect * min(height, width):
                text = f"{text}\n[a picture of {width}x{height} is too elongated and was left out]".strip()
            else:
                images[number] = self.processor.process(Image.fromarray(pixels))
        return self._turn(text, images, closed)

    def notice(self, text: str, closed: bool) -> Observation:
        return self._turn(text, {}, closed)

    def example(self, record: Record) -> Example:
        """A trace: assistant turns are learned, `tool` turns become observations as in a rollout."""
        pictures = self.pictures(record, [p.index for m in record.messages for p in m.parts if p.kind == "image"])
        images = [self.processor.process(picture) for picture in pictures.values()]
        order = {index: k for k, index in enumerate(pictures)}
        messages, shown = [], 0
        for message in record.messages:
            if message.role == "tool":
                said = "".join(part.text for part in message.parts if part.kind == "text")
                indices = [part.index for part in message.parts if part.kind == "image"]
                message = Message("user", _observation(said, dict(enumerate(indices, start=shown))))
                shown += len(indices)
            elif message.role == "user":
                first = shown
                shown += sum(part.kind == "image" for part in message.parts)
                # The instructions stand in the first user turn alone.
                template = self.config.template if not messages or messages[-1].role == "system" else "brief"
                message = self._question(message, pictures, first, template)
            messages.append(self._reindexed(message, order))
        trace = render_trace(messages, self.tokenizer, self._tokens(images))
        ids = np.asarray(trace.ids, np.int32)
        grids = [image.grid for image in images]
        return Example(
            name=record.id,
            ids=ids,
            positions=mrope_positions(ids, grids, [], self.spec)[0],
            loss_weights=span_weights(trace.spans, len(ids)),
            image_index=image_token_index(ids, self.spec.image_token),
            images=images,
        )

    def pictures(self, record: Record, indices: list[int]) -> dict[int, Image.Image]:
        """Media of the record by index, opened. Raises `MediaError` for a picture that is broken or too elongated."""
        opened = {}
        for index in indices:
            if not 0 <= index < len(record.media):
                raise ValueError(f"record {record.id}: message refers to media {index} of {len(record.media)}")
            picture = open_image(record.media[index], self.image, generators=self.generators, root=self.media_root)
            if max(picture.size) > self.image.max_aspect * min(picture.size):
                raise MediaError(record.id, f"picture {index} of {picture.width}x{picture.height} is too elongated")
            opened[index] = picture
        return opened

    def _tokens(self, images: list[ProcessedImage]) -> list[int]:
        return [self.processor.grid_tokens(image.grid) for image in images]

    def _reindexed(self, message: Message, order: Mapping[int, int]) -> Message:
        parts = tuple(dataclasses.replace(p, index=order[p.index]) if p.kind == "image" else p for p in message.parts)
        return Message(message.role, parts)

    def _question(self, message: Message, pictures: Mapping[int, Image.Image], first: int, template: str) -> Message:
        """The user's pictures between their name tags, numbered from `first`, then the template with the question."""
        if message.role != "user":
            return message
        query = "".join(part.text for part in message.parts if part.kind == "text")
        indices = [part.index for part in message.parts if part.kind == "image"]
        size = pictures[indices[0]].size if indices else (0, 0)
        text = TEMPLATES[template].format(query=query.strip(), width=size[0], height=size[1])
        return Message("user", (*_named(dict(enumerate(indices, start=first))), Part("text", "\n" + text)))

    def _turn(self, text: str, numbered: Mapping[int, ProcessedImage], closed: bool) -> Observation:
        images = list(numbered.values())
        parts = _observation(text, dict(zip(numbered, range(len(images)), strict=True)))
        tokens = self._tokens(images)
        if closed or self.config.close_turn:
            end = [] if closed else [self.tokenizer.im_end]
            return Observation(end + render_turn(Message("user", parts), self.tokenizer, tokens), images)
        # The released form: the assistant's turn that ended in </code> is left open.
        t = self.tokenizer
        body = encode_parts((Part("text", "user\n"), *parts), t, tokens)
        tail = [t.im_end, *t.encode("\n"), t.im_start, *t.encode("assistant\n")]
        return Observation([*t.encode("\n"), t.im_start, *body, *tail], images)


def _named(numbered: Mapping[int, int]) -> list[Part]:
    """Pictures between their name tags; `numbered`: number in the name -> index of the picture."""
    parts = []
    for k, index in numbered.items():
        parts += [Part("text", f"<image_clue_{k}>"), Part("image", index=index), Part("text", f"</image_clue_{k}>")]
    return parts


def _observation(text: str, numbered: Mapping[int, int]) -> tuple[Part, ...]:
    """Text and pictures inside the interpreter's tags; the two forms differ by one line end, as released."""
    tail = Part("text", "</interpreter>\n\n</tool_response>")
    if not numbered:
        said = f"{text}\n" if text else ""
        return (Part("text", f"<tool_response>\n<interpreter>\nText Result:\n{said}"), tail)
    said = f"{text}\n" if text else "\n"
    head = Part("text", f"<tool_response>\n<interpreter>Text Result:\n{said}Image Result:\n")
    return (head, *_named(numbered), tail)
