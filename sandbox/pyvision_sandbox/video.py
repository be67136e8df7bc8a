"""Inside a session: an input video, read with decord, by index and by time stamp.

Times are the stamps of the file and never index / rate, for a rate may vary. A file that cannot be read raises
`VideoError` at use, with a reason in words; nothing is opened before.
"""

import contextlib
import os
import resource
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image

_TOLERANCE = 1e-3  # seconds: time stamps come as float32, and 1/15 s must find the frame of 1/15 s
_CHUNK = 16 << 20  # bytes decoded at a time: decord ends the process if the memory limit is hit inside it
_TRIES = 8  # decord reads ahead: damage further on may strike before the frame that was asked for is there, or after
_SPARE = 96 << 20  # bytes that decord may need besides for its own queue of frames
_videos: "weakref.WeakSet[Video]" = weakref.WeakSet()


class VideoError(RuntimeError):
    """A video cannot be read, or not at this place."""


VideoError.__module__ = "builtins"


class Frame(np.ndarray):
    """One frame [h, w, 3] or several [n, h, w, 3], uint8 RGB, with decord's name for a plain array."""

    def asnumpy(self) -> np.ndarray:
        return np.asarray(self)


def change_decord(decord: Any) -> None:
    """One thread for each reader, also for those that code makes itself, and no warnings of FFmpeg's in its output."""
    *defaults, _, fault_tol = decord.VideoReader.__init__.__defaults__
    decord.VideoReader.__init__.__defaults__ = (*defaults, 1, fault_tol)
    decord.logging.set_level(decord.logging.QUIET)


def release() -> None:
    """Close every reader at the end of a cell: each has a thread, which no branch survives, and memory for its frames.

    They open again when they are used.
    """
    if _videos:
        for video in _videos:
            video._reader = None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """decord writes to descriptor 2, with the time of day, what it then raises as well."""
    kept, null = os.dup(2), os.open("/dev/null", os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _reason(error: BaseException) -> str:
    text = str(error)
    if "cannot find video stream" in text:
        return "it holds no video stream, only sound or nothing"
    if "Error reading" in text:
        return "it is no video, or it is cut off and has lost its index"
    if "av_read_frame failed" in text:
        return "it is cut off or damaged"
    line = text.strip().splitlines()[-1:] or [type(error).__name__]
    return f"it is damaged ({line[0][-120:]})"


class Video:
    """`len(v)`, `v.fps`, `v.duration` (s), `v.width`, `v.height` and `v.timestamps` (s, [n]) describe it.

    Pictures (PIL, RGB): `v.frame_at(seconds)`, `v.frames_at([...])`, `v.frame(i)`, `v.frames([...])`, `v.sample(n)`.
    Arrays (uint8 RGB): `v[i]`, `v[a:b]`, `v.get_batch([...])`, and all else that decord's VideoReader offers.
    """

    def __init__(self, name: str, path: str, problem: str | None = None):
        self._name, self.path, self._problem = name, path, problem
        self._reader: Any = None
        self._stamps: np.ndarray | None = None
        self._size: tuple[int, int] | None = None  # h, w
        self._next = 0
        _videos.add(self)

    # ------------------------------------------------------------------------------------------------ the reader
    def _fail(self, why: str) -> VideoError:
        return VideoError(f"{self._name} cannot be read: {why}")

    def _open(self) -> Any:
        if self._problem is not None:
            raise self._fail(self._problem)
        if self._reader is None:
            try:
                size = os.path.getsize(self.path)
            except OSError as e:
                raise self._fail(f"its file {self.path} is gone ({e.strerror})") from None
            if not size:
                raise self._fail("the file is empty (0 bytes)")
            try:
                import decord
            except ModuleNotFoundError:
                raise self._fail("decord is not installed in this sandbox") from None
            self._reserve(0)
            try:
                with _silence():
                    reader = decord.VideoReader(self.path, num_threads=1)
            except (decord.DECORDError, RuntimeError, AssertionError) as e:
                raise self._fail(_reason(e)) from None
            self._reader = reader
        return self._reader

    def _reserve(self, size: int) -> None:
        """Raises MemoryError now rather than have decord end the process later."""
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            np.empty(size + _SPARE, np.uint8)

    def _decode(self, indices: np.ndarray) -> np.ndarray:
        """uint8 [n, h, w, 3] of indices within range."""
        self._open()
        h, w = self.height, self.width
        try:
            out = np.empty((len(indices), h, w, 3), np.uint8)
            step = max(_CHUNK // (h * w * 3), 1)
            for start in range(0, len(indices), step):
                part = indices[start : start + step]
                self._reserve(2 * len(part) * h * w * 3)
                out[start : start + step] = _plain(self._batch(part))
        except MemoryError:
            text = f"{len(indices)} frames of {w}x{h} do not fit into the memory limit: read fewer at a time"
            raise MemoryError(text) from None
        return out

    def _batch(self, indices: np.ndarray) -> Any:
        decord = sys.modules["decord"]
        for _ in range(_TRIES):
            reader = self._open()
            try:
                return reader.get_batch(indices)
            except (decord.DECORDError, RuntimeError):
                self._reader = None  # its decoder has ended with the error
        which = f"frame {indices[0]}" if len(indices) == 1 else f"one of the frames {indices[0]} to {indices[-1]}"
        raise VideoError(f"{self._name}: {which} cannot be decoded, the file is cut off or damaged there")

    # ------------------------------------------------------------------------------------------------ what it is
    def __len__(self) -> int:
        return len(self._open())

    def __repr__(self) -> str:
        try:
            size = f"{self.width}x{self.height}"
            return f"<Video {self._name}: {len(self)} frames, {self.fps:.2f} fps, {self.duration:.2f} s, {size}>"
        except (VideoError, MemoryError) as e:
            return f"<Video {e}>"

    @property
    def fps(self) -> float:
        """Frames per second on average; where it varies go by `timestamps`."""
        return float(self._open().get_avg_fps())

    @property
    def timestamps(self) -> np.ndarray:
        """When each frame begins, in seconds, float64 [n]."""
        return self._times()[:, 0].copy()

    @property
    def duration(self) -> float:
        """Seconds until the last frame ends."""
        return float(self._times()[-1, 1])

    @property
    def width(self) -> int:
        return self._shape()[1]

    @property
    def height(self) -> int:
        return self._shape()[0]

    def _times(self) -> np.ndarray:
        if self._stamps is None:
            reader = self._open()
            stamps = np.asarray(reader.get_frame_timestamp(range(len(reader))), np.float64)
            self._stamps = stamps[np.argsort(stamps[:, 0], kind="stable")]
        return self._stamps

    def _shape(self) -> tuple[int, int]:
        if self._size is None:
            _, h, w, _ = _plain(self._batch(np.zeros(1, np.int64))).shape
            self._size = h, w
        return self._size

    # ------------------------------------------------------------------------------------------------ by index
    def _index(self, i: Any) -> int:
        n, index = len(self), int(i)
        if not -n <= index < n:
            raise IndexError(f"{self._name} has {n} frames (0 to {n - 1}), there is no frame {index}")
        return index % n

    def __getitem__(self, key: Any) -> Frame:
        if isinstance(key, slice):
            return self.get_batch(range(*key.indices(len(self))))
        if isinstance(key, list | tuple | range | np.ndarray):
            return self.get_batch(key)
        return self._decode(np.array([self._index(key)]))[0].view(Frame)

    def get_batch(self, indices: Iterable[Any]) -> Frame:
        """uint8 [n, h, w, 3]. Raises IndexError naming the number of frames, MemoryError if they do not fit."""
        return self._decode(np.array([self._index(i) for i in indices], np.int64)).view(Frame)

    def frame(self, index: int) -> Image.Image:
        """Frame `index`; negative ones count from the end."""
        return Image.fromarray(self[index].asnumpy())

    def frames(self, indices: Iterable[int]) -> list[Image.Image]:
        """These frames; an index beyond the end gives the last one, and a note is printed."""
        wanted = [int(i) for i in indices]
        n = len(self)
        if any(i >= n for i in wanted):
            print(f"[{self._name} has {n} frames (0 to {n - 1}); later ones are replaced by the last]")
        return [self.frame(min(i, n - 1)) for i in wanted]

    def sample(self, n: int) -> list[Image.Image]:
        """`n` frames at equal distances in time; all of them, with a note, if there are fewer."""
        have = len(self)
        if n > have:
            print(f"[{self._name} has {have} frames; {n} were asked for]")
            return self.frames(range(have))
        times = self._times()
        return self.frames_at(np.linspace(times[0, 0], times[-1, 0], n))

    # ------------------------------------------------------------------------------------------------ by time
    def index_at(self, seconds: float) -> int:
        """The frame to be seen at a time: the last one that has begun. Times outside give the first or the last."""
        found = int(np.searchsorted(self._times()[:, 0], float(seconds) + _TOLERANCE, "right")) - 1
        return min(max(found, 0), len(self) - 1)

    def frame_at(self, seconds: float) -> Image.Image:
        """The frame to be seen `seconds` after the start; beyond the end the last one, and a note is printed."""
        return self.frames_at([seconds])[0]

    def frames_at(self, seconds: Iterable[float]) -> list[Image.Image]:
        wanted = [float(s) for s in seconds]
        if any(s > self.duration + _TOLERANCE for s in wanted):
            print(f"[{self._name} lasts {self.duration:.2f} s; later times show its last frame]")
        return [self.frame(self.index_at(s)) for s in wanted]

    # ------------------------------------------------------------------------------------------------ decord's names
    def get_avg_fps(self) -> float:
        return self.fps

    def get_frame_timestamp(self, index: Any) -> np.ndarray:
        """(start, end) in seconds of a frame, or [n, 2] of several."""
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if isinstance(index, Iterable):
            return self._times()[[self._index(i) for i in index]]
        return self._times()[self._index(index)]

    def get_key_indices(self) -> list[int]:
        return list(self._open().get_key_indices())

    def seek(self, index: int) -> None:
        self._next = self._index(index)

    seek_accurate = seek

    def skip_frames(self, num: int = 1) -> None:
        self._next += num

    def next(self) -> Frame:
        """The next frame. Raises StopIteration at the end."""
        if self._next >= len(self):
            raise StopIteration
        self._next += 1
        return self[self._next - 1]

    def __next__(self) -> Frame:
        return self.next()

    def __iter__(self) -> Iterator[Frame]:
        return (self[i] for i in range(len(self)))

    def __fspath__(self) -> str:
        return self.path

    def read(self) -> bytes:
        """The file itself; so `decord.VideoReader(video_clue_0)` works too."""
        with open(self.path, "rb") as file:
            return file.read()


def _plain(batch: Any) -> np.ndarray:
    return batch.asnumpy()
