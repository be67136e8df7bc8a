"""The picture policy: every encoding of one picture gives one array, and every broken one gives a reason."""

import base64
import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pyvision_jax.config import ImageConfig
from pyvision_jax.data.image_processing import ImageProcessor
from pyvision_jax.data.media import ImageStore, MediaError, image_hash, open_image, parse_image, parse_images
from pyvision_jax.data.records import Media

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(source, **options) -> np.ndarray:
    image = open_image(source, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


PNG = encoded(Image.fromarray(PIXELS))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_exif_orientation_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(PIXELS)
    found = opened(encoded(image, kind, exif=exif, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {})))
    upright = {
        1: PIXELS,
        2: PIXELS[:, ::-1],
        3: PIXELS[::-1, ::-1],
        4: PIXELS[::-1],
        5: PIXELS.transpose(1, 0, 2),
        6: np.rot90(PIXELS, -1),
        7: PIXELS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(PIXELS, 1),
    }[orientation]
    assert found.shape == upright.shape
    assert np.abs(found.astype(int) - upright).max() <= (6 if kind == "JPEG" else 0)


def test_transparency_is_composited_on_the_background():
    red = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert (opened(encoded(red)) == 255).all()
    grey = ImageConfig(background=(10, 20, 30))
    assert (opened(encoded(red), config=grey) == (10, 20, 30)).all()
    half = opened(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128))))
    np.testing.assert_array_equal(half[0, 0], (255, 127, 127))

    assert (opened(encoded(Image.new("LA", (4, 4), (0, 0)))) == 255).all()

    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 0, 0, 255])
    assert (opened(encoded(palette)) == (0, 0, 255)).all()
    assert (opened(encoded(palette, transparency=1)) == 255).all()

    keyed = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))
    assert (opened(keyed) == 255).all()


def test_grey_bilevel_and_cmyk():
    grey = Image.fromarray(PIXELS[:, :, 0])
    np.testing.assert_array_equal(opened(encoded(grey)), np.repeat(PIXELS[:, :, :1], 3, axis=2))
    bits = opened(encoded(grey.convert("1")))
    assert set(np.unique(bits)) == {0, 255}
    cmyk = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")
    assert (opened(cmyk) == (255, 0, 0)).all()


def png_16_bit(values: np.ndarray, color_type: int, key: int | None = None) -> bytes:
    """A PNG of 16-bit samples (Pillow writes only grey ones)."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0))]
    if key is not None:
        chunks.append((b"tRNS", struct.pack(">H", key)))
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    body = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def test_16_bit_keeps_the_high_byte_in_grey_and_colour():
    values = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    expected = np.repeat((values >> 8)[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(opened(png_16_bit(values, 0)), expected)
    np.testing.assert_array_equal(opened(png_16_bit(np.repeat(values[:, :, None], 3, 2), 2)), expected)
    np.testing.assert_array_equal(opened(encoded(Image.fromarray(values), "TIFF")), expected)
    keyed = opened(png_16_bit(values, 0, key=int(values[2, 2])))
    assert (keyed[2, 2] == 255).all()
    assert (keyed[2, 3] == expected[2, 3]).all()


@pytest.mark.parametrize("array", [np.full((4, 4), 0.5, np.float32), np.full((4, 4), 1 << 20, np.int32)])
def test_samples_without_a_stated_range_are_refused(array):
    with pytest.raises(MediaError, match="no stated range"):
        open_image(encoded(Image.fromarray(array), "TIFF"))


def test_animation_gives_the_first_frame():
    frames = [Image.new("RGB", (6, 6), color) for color in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (opened(data) == (255, 0, 0)).all()


def png_header_only(width: int, height: int) -> bytes:
    return png_16_bit(np.zeros((1, 1), np.uint16), 0)[:8] + b"".join(
        struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
        for t, d in [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    )


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "empty file"),
        (b"this is a text file", "not a picture"),
        (encoded(Image.fromarray(PIXELS), "JPEG")[:-200], "cannot be decoded"),
        (PNG[: len(PNG) // 2], "cannot be decoded"),
        (PNG[:20], "not a picture|cannot be read"),
        (png_header_only(30_000, 30_000), "above Pillow's limit of .* not decoded"),
        (png_header_only(12_000, 12), "aspect ratio"),
    ],
    ids=["empty", "text", "half jpeg", "half png", "half header", "bomb", "strip"],
)
def test_broken_files_name_path_and_reason(tmp_path, data, reason):
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    with pytest.raises(MediaError, match=reason) as caught:
        open_image(path)
    assert str(path) in str(caught.value)
    assert caught.value.where == str(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_pixel_guard_comes_before_decoding():
    with pytest.raises(MediaError, match=r"30x20 is above 599 pixels: not decoded"):
        open_image(png_header_only(30, 20), max_source_pixels=599)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(MediaError, match="No such file"):
        open_image(tmp_path / "none.png")
    with pytest.raises(MediaError, match="directory"):
        open_image(tmp_path)


def test_every_spelling_of_an_image_column_gives_the_same_array(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    cells = [
        {"bytes": PNG},
        {"bytes": None, "path": str(path)},
        [{"bytes": PNG}],
        str(path),
        "a.png",
        uri,
        {"bytes": base64.b64encode(PNG).decode()},
        path.as_uri(),
        PNG,
        Media("image", data=PNG),
    ]
    for cell in cells:
        np.testing.assert_array_equal(opened(parse_image(cell, tmp_path)), PIXELS)
    for cell in (uri, "a.png", path):
        np.testing.assert_array_equal(opened(cell, root=tmp_path), PIXELS)
    assert len(parse_images([str(path), {"bytes": PNG}])) == 2
    assert parse_images(None) == []


@pytest.mark.parametrize(
    "call, cell, reason",
    [
        (parse_images, {"bytes": PNG}, "expected a list of pictures, found one dict"),
        (parse_images, "a.png", "wrap it in"),
        (parse_image, [PNG, PNG], "a list of 2"),
        (parse_image, {"url": "x"}, "neither `bytes` nor `path`.*url"),
        (parse_image, 7, "found int"),
        (parse_image, "https://example.org/a.png", "not fetched"),
        (parse_image, "data:image/png,abc", "base64"),
        (parse_image, {"bytes": "*"}, "base64"),
    ],
)
def test_wrong_cells_are_told_apart(call, cell, reason):
    with pytest.raises(MediaError, match=reason):
        call(cell)


def test_arrays_pil_images_and_generators():
    np.testing.assert_array_equal(opened(PIXELS), PIXELS)
    np.testing.assert_array_equal(opened(PIXELS[:, :, 0])[:, :, 1], PIXELS[:, :, 0])
    np.testing.assert_array_equal(opened(Image.fromarray(PIXELS)), PIXELS)
    with pytest.raises(MediaError, match="float64"):
        open_image(PIXELS / 255)

    made = Media("image", make=("board", {"side": 5}))
    generators = {"board": lambda side: Image.new("RGB", (side, side), "red")}
    assert opened(made, generators=generators).shape == (5, 5, 3)
    for arguments in ({}, {"side": "x"}, {"side": -1}, {"colour": "red"}):
        with pytest.raises(MediaError, match="board cannot draw"):
            open_image(Media("image", make=("board", arguments)), generators=generators)
    with pytest.raises(MediaError, match="nearest is 'boards'"):
        open_image(made, generators={"boards": generators["board"]})
    with pytest.raises(MediaError, match="found a video"):
        open_image(Media("video", path="a.mp4"))


def test_store_keeps_each_picture_once():
    processor, store = ImageProcessor(), ImageStore()
    first = processor.process(open_image(PNG))
    assert store.put(first) == store.put(processor.process(open_image(PNG))) == image_hash(first.pixels)
    other = store.put(processor.process(Image.new("RGB", (60, 60))))
    assert len(store) == 2
    assert store.get(first.hash) is first
    assert store.nbytes > 0
    assert store.keep({other}) == 1
    assert first.hash not in store
