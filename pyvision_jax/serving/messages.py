"""The `messages` of a request as a record: roles and parts strictly read, pictures bounded before they are decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import secrets
import urllib.parse
from pathlib import Path
from typing import Any, cast

from PIL import Image

from pyvision_jax.data.records import Answer, Media, Message, Part, Record, Role
from pyvision_jax.serving.errors import ApiError, Limits, kind_of, refuse

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.I)


def read_record(body: dict[str, Any], protocol: str, limits: Limits) -> Record:
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        refuse("messages", "must be a list of at least one message")
    media: list[Media] = []
    messages = tuple(_message(item, f"messages[{k}]", media, limits) for k, item in enumerate(value))
    if messages[-1].role != "user":
        refuse(f"messages[{len(messages) - 1}].role", "the last message must be a user's")
    if any(message.role == "system" for message in messages[1:]):
        refuse("messages", "a system message can only be the first")
    roles = [message.role for message in messages if message.role != "system"]
    for place, (before, after) in enumerate(zip(["assistant", *roles], roles, strict=False)):
        if before == after:
            number = place + len(messages) - len(roles)
            refuse(f"messages[{number}].role", f"{after!r} is not due: user and assistant take turns, the user first")
    return Record(f"request-{secrets.token_hex(8)}", messages, tuple(media), Answer(""), protocol, "serve")


def _message(value: Any, key: str, media: list[Media], limits: Limits) -> Message:
    if not isinstance(value, dict):
        refuse(key, f"must be an object, not {kind_of(value)}")
    for name in value:
        # An assistant's message may come back as it was given out: what is in it beyond the text is left aside.
        if name not in ("role", "content", "name") and value.get("role") != "assistant":
            raise ApiError(400, f"{key}.{name}", f"{key}.{name}: unknown field", "unknown_field")
    role = {"developer": "system"}.get(value.get("role", ""), value.get("role"))
    if role not in ("system", "user", "assistant"):
        refuse(f"{key}.role", f"{value.get('role')!r:.40} is none of system, developer, user, assistant")
    content = value.get("content")
    if isinstance(content, str):
        return Message(cast("Role", role), (Part("text", content),))
    if not isinstance(content, list) or not content:
        refuse(f"{key}.content", "must be a text or a list of parts")
    parts = tuple(_part(part, f"{key}.content[{k}]", role, media, limits) for k, part in enumerate(content))
    return Message(cast("Role", role), parts)


def _part(value: Any, key: str, role: str, media: list[Media], limits: Limits) -> Part:
    if not isinstance(value, dict):
        refuse(key, f"must be an object, not {kind_of(value)}")
    kind = value.get("type")
    if kind not in ("text", "image_url"):
        refuse(f"{key}.type", f"{kind!r:.40} is none of text, image_url")
    for name in value:
        if name not in ("type", kind):
            raise ApiError(400, f"{key}.{name}", f"{key}.{name}: unknown field", "unknown_field")
    held = value.get(kind)
    if kind == "text":
        if not isinstance(held, str):
            refuse(f"{key}.text", f"must be a text, not {kind_of(held)}")
        return Part("text", held)
    if role != "user":
        refuse(f"{key}.type", f"pictures stand in messages of the user, not of {role}")
    if not isinstance(held, dict) or set(held) - {"url", "detail"} or not isinstance(held.get("url"), str):
        refuse(f"{key}.image_url", "must be an object with a text `url`")
    if held.get("detail", "auto") != "auto":
        refuse(f"{key}.image_url.detail", "only auto: image.max_pixels of the server decides")
    if len(media) >= limits.pictures:
        refuse(key, f"too many pictures: at most {limits.pictures} in a request")
    media.append(_picture(held["url"], f"{key}.image_url.url", limits))
    return Part("image", index=len(media) - 1)


def _picture(url: str, key: str, limits: Limits) -> Media:
    """The encoded bytes of a picture; its pixels are counted from the header, nothing is decoded."""
    head = _DATA_URL.match(url)
    if head is not None:
        try:
            data = base64.b64decode(url[head.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            refuse(key, f"broken base64: {error}")
    elif url.lower().startswith("file:"):
        data = _local(url, key, limits)
    else:
        scheme = re.sub(r"[^\w+.-].*", "", url[:20].split(":")[0], flags=re.S)
        refuse(key, f"{scheme or 'such'} URLs are not fetched: send the picture as data:image/...;base64,...")
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        refuse(key, f"more pixels than Pillow reads; at most {limits.picture_pixels:,} are taken")
    except (OSError, ValueError, SyntaxError) as error:
        refuse(key, f"not a picture that can be read ({error!s:.120})")
    if width * height > limits.picture_pixels:
        refuse(
            key,
            f"a picture of {width}x{height} = {width * height:,} pixels; at most {limits.picture_pixels:,} are taken",
        )
    return Media("image", data=data)


def _local(url: str, key: str, limits: Limits) -> bytes:
    if limits.local is None:
        refuse(key, "file: pictures are refused; the server was not started with --allow-local")
    parsed = urllib.parse.urlsplit(url)
    path = Path(urllib.parse.unquote(parsed.path))
    try:
        found = path.resolve(strict=True)
        if parsed.netloc not in ("", "localhost") or not found.is_relative_to(limits.local.resolve()):
            refuse(key, "the file is not below the folder of --allow-local")
        if not found.is_file() or found.stat().st_size > limits.body_bytes:
            refuse(key, f"not a file of at most {limits.body_bytes:,} bytes")
        return found.read_bytes()
    except (OSError, ValueError, RuntimeError):  # one answer: nobody learns which other files there are
        refuse(key, "the file is not below the folder of --allow-local")
