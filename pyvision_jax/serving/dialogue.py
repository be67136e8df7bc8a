"""Prompts of conversations: of one user turn as in training, of several as the protocol renders a trace.

So a chat says to the policy what its SFT traces said, whatever the protocol.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from pyvision_jax.agents.protocol import AgentProtocol, Observation, Prompt
from pyvision_jax.config import ImageConfig
from pyvision_jax.data.chat import media_order
from pyvision_jax.data.media import open_image
from pyvision_jax.data.records import Answer, Media, Message, Part, Record
from pyvision_jax.data.tokenizer import Tokenizer


def conversation(protocol: AgentProtocol, record: Record, image: ImageConfig, tokenizer: Tokenizer) -> Prompt:
    """The prompt of messages that end with a user turn. Raises `MediaError` or `ValueError`."""
    if not any(message.role in ("assistant", "tool") for message in record.messages):
        return protocol.build(record)
    example = protocol.example(record)
    pictures = [open_image(record.media[index], image) for index in media_order(record.messages)]
    named = {f"image_clue_{number}": picture for number, picture in enumerate(pictures)}
    return Prompt([*example.ids.tolist(), *_header(tokenizer)], list(example.images), named)


def follow_up(
    protocol: AgentProtocol, message: Message, media: Sequence[Media], tokenizer: Tokenizer, *, closed: bool, shown: int
) -> Observation:
    """What a later user turn appends to a conversation that has shown `shown` pictures.

    `message` refers to `media` from 0. `closed`: the policy's turn ended with its end token. Raises as `conversation`.
    """
    blank = io.BytesIO()
    Image.new("RGB", (28, 28)).save(blank, "PNG")
    before = tuple(Part("image", index=index) for index in range(shown))
    parts = tuple(dataclasses.replace(p, index=p.index + shown) if p.kind != "text" else p for p in message.parts)
    dot = Part("text", ".")
    messages = (Message("user", (*before, dot)), Message("assistant", (dot,)), Message("user", parts))
    held = (*(Media("image", data=blank.getvalue()) for _ in range(shown)), *media)
    example = protocol.example(Record("chat", messages, held, Answer(""), "", "chat"))
    ends = np.flatnonzero(example.ids == tokenizer.im_end)
    tail = example.ids[ends[-2] + 1 :].tolist()  # behind the assistant's turn
    return Observation([*([] if closed else [tokenizer.im_end]), *tail, *_header(tokenizer)], example.images[shown:])


def _header(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.im_start, *tokenizer.encode("assistant\n")]
