"""What a video file holds, found out before a run does. Frames themselves reach a policy only through its code."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import decord
from decord import DECORDError

from pyvision_jax.data.media import MediaError, describe
from pyvision_jax.data.records import Media


@dataclasses.dataclass(frozen=True)
class VideoInfo:
    """`frames` as the container says; `fps` is the average rate in frames per second; sizes in pixels."""

    frames: int
    fps: float
    width: int
    height: int


def probe_video(source: Media | str | Path) -> VideoInfo:
    """Opens a video and decodes its first frame. Raises `MediaError` for one that is missing, cut off, or no video."""
    where = describe(source)
    media = source if isinstance(source, Media) else Media("video", path=str(source))
    if media.kind != "video":
        raise MediaError(where, f"expected a video, found {media.kind}")
    try:
        data = media.data if media.data is not None else Path(media.path or "").read_bytes()
    except OSError as error:
        raise MediaError(where, error.strerror or str(error)) from error
    if not data:
        raise MediaError(where, "empty file")
    try:
        reader = decord.VideoReader(io.BytesIO(data), ctx=decord.cpu(0), num_threads=1)
        frames = len(reader)
        if frames < 1:
            raise MediaError(where, "no frames")
        height, width = reader[0].shape[:2]
    except (DECORDError, RuntimeError, IndexError) as error:
        reason = str(error).strip().splitlines()
        raise MediaError(
            where, f"no video that can be decoded ({reason[-1] if reason else type(error).__name__})"
        ) from error
    return VideoInfo(frames, float(reader.get_avg_fps()), width, height)
