"""Pictures from wherever they come to one form: 8-bit RGB, upright, opaque, guarded against hostile files.

The policy (docs/data.md states it for users):

- EXIF orientation is applied; an EXIF block that cannot be read counts as upright. ICC profiles are ignored.
- Alpha of any kind (RGBA, LA, palette or colour-key transparency) is composited on `ImageConfig.background`.
- Grey, bilevel, palette, CMYK, YCbCr, LAB and HSV become RGB by Pillow's conversion.
- 16-bit samples keep their high byte, grey and colour alike (Pillow reads 48-bit colour that way). Float samples and
  integers beyond 16 bits have no stated range and are refused.
- Of animations and multi-page files the first frame is taken.
- The pixel count is read from the header and checked before anything is decoded; so is the aspect ratio.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import io
import struct
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pyvision_jax.config import ImageConfig
from pyvision_jax.data.records import Media

if TYPE_CHECKING:
    from pyvision_jax.data.image_processing import ProcessedImage

Generators = Mapping[str, Callable[..., Image.Image]]
Source = Media | str | Path | bytes | np.ndarray | Image.Image

MAX_SOURCE_PIXELS = 178_956_970  # Pillow's own hard limit: about 0.5 GB of RGB

# What Pillow's readers raise on damaged files (its plugins do not agree on one class).
_READ_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
)
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class MediaError(ValueError):
    """A picture that cannot be used. `where` says which one (a path or a description), `reason` says why."""

    def __init__(self, where: str | Path, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where = str(where)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:  # two arguments, so the default pickling of exceptions does not fit
        return type(self), (self.where, self.reason)


def open_image(
    source: Source,
    config: ImageConfig | None = None,
    *,
    generators: Generators | None = None,
    root: str | Path | None = None,
    max_source_pixels: int = MAX_SOURCE_PIXELS,
) -> Image.Image:
    """The picture as an RGB `PIL.Image` of its full size, by the policy at the head of this module.

    `source` is a `Media`, a path, encoded bytes, a uint8 array `[H, W]` or `[H, W, 1|2|3|4]`, or a PIL image (whose
    EXIF is honoured too). `generators` resolves `Media.make`; relative paths start at `root`. Raises `MediaError`.
    """
    config = config or ImageConfig()
    where = describe(source)
    if isinstance(source, Media) and source.make is not None:
        source = _generate(source.make, generators or {}, where)
    if isinstance(source, np.ndarray):
        source = _from_array(source, where)
    if isinstance(source, Image.Image):
        image = source
    else:
        data = _read(source, root, where)
        try:
            image = Image.open(io.BytesIO(data))
        except Image.UnidentifiedImageError:
            raise MediaError(where, "not a picture in a format that Pillow knows") from None
        except Image.DecompressionBombError:
            raise MediaError(where, f"above Pillow's limit of {MAX_SOURCE_PIXELS:,} pixels: not decoded") from None
        except _READ_ERRORS as error:
            raise MediaError(where, f"header cannot be read ({error})") from None
    _check_size(image.size, config, max_source_pixels, where)
    try:
        image.load()
        image = _upright(image)
    except _READ_ERRORS as error:
        raise MediaError(where, f"pixels cannot be decoded ({error})") from None
    return _to_rgb(image, config.background, where)


def describe(source: Source) -> str:
    """A short name of a source for messages."""
    if isinstance(source, Media):
        if source.make is not None:
            return f"generated picture {source.make[0]!r}"
        return describe(source.path if source.path is not None else source.data or b"")
    if isinstance(source, str | Path):
        return "data URI" if str(source).startswith("data:") else str(source)
    if isinstance(source, bytes):
        return f"{len(source)} bytes in memory"
    return "array" if isinstance(source, np.ndarray) else "PIL image"


def image_hash(pixels: np.ndarray) -> str:
    """32 hex digits over shape and values of a uint8 array: the name of a picture in trajectories and stores."""
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()[:32]


class ImageStore:
    """Processed pictures by hash, each kept once however many trajectories show it. Safe to share between threads."""

    def __init__(self) -> None:
        self._images: dict[str, ProcessedImage] = {}
        self._lock = threading.Lock()

    def put(self, image: ProcessedImage) -> str:
        with self._lock:
            self._images.setdefault(image.hash, image)
        return image.hash

    def get(self, name: str) -> ProcessedImage:
        """Raises `KeyError` when no such picture was put, or it was dropped by `keep`."""
        return self._images[name]

    def keep(self, names: Sequence[str] | set[str]) -> int:
        """Drops all pictures but `names`; returns how many were dropped."""
        wanted = set(names)
        with self._lock:
            gone = [name for name in self._images if name not in wanted]
            for name in gone:
                del self._images[name]
        return len(gone)

    def __contains__(self, name: str) -> bool:
        return name in self._images

    def __len__(self) -> int:
        return len(self._images)

    @property
    def nbytes(self) -> int:
        """Bytes of pixels held."""
        with self._lock:
            return sum(image.pixels.nbytes for image in self._images.values())


def parse_image(value: Any, root: str | Path | None = None) -> Media:
    """One cell of an image column, in any of its usual spellings, as a lazy `Media`.

    Accepts a path (relative ones start at `root`), a `file://` or base64 `data:` URI, encoded bytes, a mapping with
    `bytes` (raw, base64 text or null) and/or `path`, a `Media`, and a list of exactly one of these.
    Raises `MediaError`.
    """
    if isinstance(value, Media):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Media("image", data=bytes(value))
    if isinstance(value, str | Path):
        return _parse_text(str(value), root)
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and path is None:
            keys = ", ".join(sorted(map(str, value))) or "none"
            raise MediaError("image cell", f"mapping has neither `bytes` nor `path` (its keys: {keys})")
        if data is None:
            return parse_image(path, root)
        return Media("image", data=_base64(data) if isinstance(data, str) else bytes(data))
    if isinstance(value, list | tuple | np.ndarray):
        if len(value) != 1:
            raise MediaError("image cell", f"expected one picture, found a list of {len(value)}")
        return parse_image(value[0], root)
    raise MediaError("image cell", f"expected a path, bytes or a mapping, found {type(value).__name__}")


def parse_images(value: Any, root: str | Path | None = None) -> list[Media]:
    """An `images` column: a list of cells that `parse_image` reads; null is no picture. Raises `MediaError`."""
    if value is None:
        return []
    if isinstance(value, Mapping | str | bytes):
        raise MediaError(
            "images cell", f"expected a list of pictures, found one {type(value).__name__}: wrap it in [ ]"
        )
    if not isinstance(value, list | tuple | np.ndarray):
        raise MediaError("images cell", f"expected a list of pictures, found {type(value).__name__}")
    return [parse_image(item, root) for item in value]


def _parse_text(text: str, root: str | Path | None) -> Media:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise MediaError("data URI", "only base64 data URIs are read")
        return Media("image", data=_base64(body))
    if text.startswith(("http://", "https://")):
        raise MediaError(text, "remote pictures are not fetched: download them and give a path")
    if not text:
        raise MediaError("image cell", "empty path")
    path = Path(urllib.parse.unquote(text.removeprefix("file://")) if text.startswith("file://") else text)
    return Media("image", path=str(path if root is None else Path(root) / path))


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise MediaError("base64 picture", str(error)) from None


def _read(source: Media | str | Path | bytes, root: str | Path | None, where: str) -> bytes:
    """Encoded bytes of a source that is stored."""
    if isinstance(source, Media):
        if source.kind != "image":
            raise MediaError(where, f"expected a picture, found a {source.kind}")
        if (source.path is None) == (source.data is None):
            raise MediaError(where, "exactly one of path, data and make must be set")
        source = source.data if source.data is not None else parse_image(source.path, root)
    if isinstance(source, str | Path):
        source = parse_image(source, root)
    if isinstance(source, Media):
        if source.data is not None:
            return _read(source.data, root, where)
        try:
            source = Path(source.path or "").read_bytes()
        except OSError as error:
            raise MediaError(where, error.strerror or str(error)) from None
        except ValueError as error:  # NUL in a path
            raise MediaError(where, str(error)) from None
    if not source:
        raise MediaError(where, "empty file")
    return source


def _generate(make: tuple[str, dict[str, Any]], generators: Generators, where: str) -> Image.Image:
    name, arguments = make
    if name not in generators:
        near = difflib.get_close_matches(name, generators, n=1)
        hint = f"; nearest is {near[0]!r}" if near else ""
        raise MediaError(where, f"no generator of that name ({len(generators)} known{hint})")
    try:
        return generators[name](**arguments)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # the arguments come from a file
        raise MediaError(where, f"{name} cannot draw {arguments!r:.80}: {type(error).__name__}: {error}") from error


def _from_array(array: np.ndarray, where: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or array.size == 0 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] <= 4)):
        raise MediaError(where, f"expected uint8 [H, W] or [H, W, 1..4], found {array.dtype} {list(array.shape)}")
    return Image.fromarray(np.ascontiguousarray(array))


def _check_size(size: tuple[int, int], config: ImageConfig, max_source_pixels: int, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(where, f"no pixels ({width}x{height})")
    if width * height > max_source_pixels:
        raise MediaError(where, f"{width}x{height} is above {max_source_pixels:,} pixels: not decoded")
    if max(size) > config.max_aspect * min(size):
        raise MediaError(where, f"aspect ratio of {width}x{height} is above image.max_aspect {config.max_aspect:g}")


def _upright(image: Image.Image) -> Image.Image:
    """Applies the EXIF orientation. Called after `load()`: Pillow turns TIFF files itself and then drops the tag."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except _READ_ERRORS:
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image, background: tuple[int, int, int], where: str) -> Image.Image:
    if image.mode.startswith("I"):
        image = _to_8_bit(image, where)
    if image.mode == "F":
        raise MediaError(where, "float samples have no stated range: convert them to 8 or 16 bits")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    if image.mode == "RGB":
        return image.copy()
    try:
        return image.convert("RGB")
    except ValueError:
        raise MediaError(where, f"pixels of mode {image.mode} have no conversion to RGB") from None


def _to_8_bit(image: Image.Image, where: str) -> Image.Image:
    """Integer grey of 16 bits (in whatever mode Pillow holds it) to L, or LA where a colour key is given."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise MediaError(where, "integer samples beyond 16 bits have no stated range: convert them to 8 or 16 bits")
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey
