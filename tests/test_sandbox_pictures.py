"""Every way to show a picture comes back as uint8 RGB; limits count what they drop."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pyvision_sandbox import Policy, SandboxPool, Session, observation_text

FIGURE = "plt.figure(figsize=(1, 0.5), dpi=100); plt.plot([1, 2])\n"
FIGURE_SHAPE = (50, 100, 3)


@pytest.fixture(scope="module")
def pool():
    policy = Policy(cell_timeout=10, max_images=3, max_pixels=100_000, max_total_pixels=150_000)
    with SandboxPool(policy) as pool:
        yield pool


@pytest.fixture(scope="module")
def session(pool: SandboxPool):
    with pool.session() as session:
        yield session


@pytest.mark.parametrize(
    "code",
    [
        FIGURE + "plt.show()",
        FIGURE + "plt.show(block=False)",
        FIGURE + "plt.show(block=True); plt.close()",
        FIGURE + "plt.gcf().show()",
        FIGURE + "plt.pause(0.01)",
        FIGURE + "plt.gcf()",
        FIGURE + "display(plt.gcf())",
        FIGURE + "from matplotlib.pyplot import show\nshow()",
        FIGURE + "import pylab; pylab.show()",
        FIGURE,  # left open
        "import matplotlib; matplotlib.use('TkAgg')\n" + FIGURE + "plt.show()",
        "import matplotlib; matplotlib.use('Agg')\n" + FIGURE + "plt.show()",
        "plt.switch_backend('QtAgg')\n" + FIGURE + "plt.show()",
        FIGURE + "plt.savefig('f.png')",  # saved, and left open
        FIGURE + "plt.savefig('f.png'); plt.show()",
        FIGURE + "plt.show(); plt.savefig('f.png')",
        FIGURE + "plt.gcf().savefig('f.png', dpi=300); plt.gcf()",
        FIGURE + "plt.ion(); plt.draw()",
        "from pylab import *\nfigure(figsize=(1, 0.5), dpi=100); plot([1, 2]); show(block=False)",
        "from matplotlib.figure import Figure\nf = Figure((1, 0.5), dpi=100); f.subplots().plot([1]); display(f)",
        "from matplotlib.figure import Figure\nf = Figure((1, 0.5), dpi=100); f.subplots().plot([1]); f.show()",
        "from matplotlib.figure import Figure\nf = Figure((1, 0.5), dpi=100); f.subplots().plot([1]); f",
        "from IPython.display import display\n" + FIGURE + "display(plt.gcf())",
        "f, ax = plt.subplots(figsize=(1, 0.5), dpi=100); ax.imshow(np.eye(3)); ax",
    ],
)
def test_a_figure_comes_back_once_in_every_spelling(session: Session, code: str):
    result = session.run(code)
    assert result.ok, result.error
    assert [i.shape for i in result.images] == [FIGURE_SHAPE] and result.images[0].dtype == np.uint8
    assert result.images[0].min() < 128 and result.images[0].max() == 255  # drawn, on white
    assert session.run("plt.get_fignums()").repr == "[]"


@pytest.mark.parametrize(
    "code",
    [
        "im",
        "im.show()",
        "display(im)",
        "display(np.asarray(im))",
        "from PIL import ImageShow; ImageShow.show(im)",
        "from IPython.display import display, clear_output; clear_output(wait=True); display(im, metadata={})",
        "import IPython; IPython.display.display(im)",
        "from IPython import display as d; d.display(im)",
        "from IPython.core.display import display, HTML; display(im)",
        "im.save('im.png'); from IPython.display import Image as Shown; Shown(filename='im.png')",
        "im.save('im.png'); from IPython.display import Image as Shown; display(Shown(open('im.png', 'rb').read()))",
    ],
)
def test_a_pil_image_comes_back_in_every_spelling(session: Session, code: str):
    session.run("im = Image.new('RGB', (7, 5), (10, 20, 30))")
    result = session.run(code)
    assert len(result.images) == 1
    assert np.array_equal(result.images[0], np.broadcast_to(np.array([10, 20, 30], np.uint8), (5, 7, 3)))


def test_what_is_no_picture_is_printed(session: Session):
    result = session.run(
        "from IPython.display import display, HTML, Markdown\n"
        "display(1, HTML('<b>x</b>'), Markdown('*y*'), np.array([1.5]), [Image.new('L', (2, 2))][0].size)\n"
        "np.zeros((2, 2, 3), np.uint8).sum(axis=2)"
    )
    assert result.images == [] and result.stdout == "1\n<b>x</b>\n*y*\narray([1.5])\n(2, 2)\n"
    # A bare array is a value, as in a notebook; display() shows it.
    result = session.run("np.zeros((1, 2, 3), np.uint8)")
    assert result.images == [] and "array([[[0, 0, 0]" in (result.repr or "")
    assert session.run("import IPython; IPython.get_ipython()").repr is None


@pytest.mark.parametrize(
    ("make", "pixel"),
    [
        ("np.full((4, 6, 3), (30, 20, 10), np.uint8)", (10, 20, 30)),  # BGR
        ("np.full((4, 6, 4), (30, 20, 10, 255), np.uint8)", (10, 20, 30)),
        ("np.full((4, 6), 9, np.uint8)", (9, 9, 9)),
        ("np.full((4, 6, 1), 9, np.uint8)", (9, 9, 9)),
        ("np.full((4, 6), 0.5)", (127, 127, 127)),
        ("np.full((4, 6), True)", (255, 255, 255)),
        ("np.full((4, 6), 0x1234, np.uint16)", (0x12, 0x12, 0x12)),
        ("np.full((4, 6), 300, np.int32)", (255, 255, 255)),
        ("cv2.UMat(np.full((4, 6), 9, np.uint8))", (9, 9, 9)),
    ],
)
def test_cv2_windows(session: Session, make: str, pixel: tuple[int, int, int]):
    pytest.importorskip("cv2")
    result = session.run(
        "import cv2\ncv2.namedWindow('w', cv2.WINDOW_NORMAL); cv2.resizeWindow('w', 9, 9)\n"
        f"cv2.imshow('w', {make})\nkey = cv2.waitKey(0) & 0xFF\ncv2.destroyAllWindows(); key"
    )
    assert result.ok, result.error
    assert result.repr == "255" and [i.shape for i in result.images] == [(4, 6, 3)]
    assert tuple(result.images[0][0, 0].tolist()) == pixel
    wrong = session.run("cv2.imshow('w', np.zeros(3))")
    assert wrong.error is not None and "imshow needs an array" in wrong.error["message"]


def test_order_and_figures_before_an_error(session: Session):
    """U42: pictures made before the error come back too."""
    result = session.run("display(Image.new('RGB', (7, 5)), Image.new('L', (3, 2)), 'text')\n" + FIGURE + "1/0")
    assert result.status == "error" and result.stdout == "'text'\n"
    assert [i.shape for i in result.images] == [(5, 7, 3), (2, 3, 3), FIGURE_SHAPE]


def test_a_picture_is_what_it_was_when_shown(session: Session):
    result = session.run("im = Image.new('RGB', (4, 4))\nim.show()\nim.paste((255, 255, 255), (0, 0, 4, 4))")
    assert result.images[0].max() == 0


@pytest.mark.parametrize(
    ("make", "pixel"),
    [
        ("Image.new('1', (2, 2), 1)", (255, 255, 255)),
        ("Image.new('L', (2, 2), 9)", (9, 9, 9)),
        ("Image.new('LA', (2, 2), (0, 0))", (255, 255, 255)),
        ("Image.new('RGBA', (2, 2), (0, 0, 0, 128))", (127, 127, 127)),
        ("Image.new('P', (2, 2), 0)", (0, 0, 0)),
        ("Image.new('CMYK', (2, 2), (0, 0, 0, 255))", (0, 0, 0)),
        ("Image.new('I;16', (2, 2), 0x1234)", (0x12, 0x12, 0x12)),
        ("Image.new('I', (2, 2), 77)", (77, 77, 77)),
        ("Image.fromarray(np.array([[0.0, 1000.0]] * 2, np.float32))", (0, 0, 0)),
        ("Image.new('HSV', (2, 2), (0, 0, 255))", (255, 255, 255)),
        ("Image.new('YCbCr', (2, 2), (255, 128, 128))", (255, 255, 255)),
        ("Image.new('La', (2, 2), (0, 0))", (255, 255, 255)),
        ("Image.new('PA', (2, 2), (0, 0))", (255, 255, 255)),
        ("Image.new('RGBa', (2, 2), (0, 0, 0, 0))", (255, 255, 255)),
        ("Image.new('RGB', (2, 2), 'red').quantize(4)", (255, 0, 0)),
        ("Image.fromarray(np.full((2, 2), np.nan, np.float32))", (0, 0, 0)),
    ],
)
def test_modes_become_rgb_by_one_policy(session: Session, make: str, pixel: tuple[int, int, int]):
    result = session.run(make)
    assert result.ok and result.images[0].shape == (2, 2, 3)
    assert np.abs(result.images[0][0, 0].astype(int) - pixel).max() <= 1


def test_limits_drop_and_count(session: Session):
    """U49."""
    result = session.run("for i in range(5): display(Image.new('RGB', (9, 9), (i, i, i)))")
    assert [int(i[0, 0, 0]) for i in result.images] == [0, 1, 2]
    assert result.dropped["images"] == 2 and "only 3 pictures" in result.dropped["reasons"][0]
    assert "[2 pictures not shown: only 3 pictures are returned]" in observation_text(result)
    result = session.run("Image.new('L', (20000, 2000))")
    assert result.images == [] and "20000x2000 has more than 100000 pixels" in result.dropped["reasons"][0]
    result = session.run("Image.new('L', (1, 5000))")
    assert result.images == [] and "longer than 200 to 1" in result.dropped["reasons"][0]
    result = session.run("for i in range(3): display(Image.new('L', (300, 300)))")
    assert len(result.images) == 1 and result.dropped["images"] == 2
    result = session.run("display(Image.new('L', (0, 5)))")
    assert result.images == [] and "is empty" in result.dropped["reasons"][0]


def test_a_figure_too_large_is_refused_before_it_is_drawn(session: Session):
    """U49."""
    result = session.run("f = plt.figure(figsize=(5000, 5000)); plt.show()")
    assert result.ok and result.images == [] and "500000x500000" in result.dropped["reasons"][0]
    assert result.usage.peak_rss < 400 << 20
    result = session.run("plt.figure(figsize=(300, 300), dpi=1000); plt.show()")
    assert result.ok and result.images == [] and "300000x300000" in result.dropped["reasons"][0]
    result = session.run("plt.figure(figsize=(300, 0.01), dpi=100); plt.show()")
    assert result.ok and result.images == [] and "longer than 200 to 1" in result.dropped["reasons"][0]
    result = session.run("plt.figure(figsize=(300, 300)); plt.savefig('f.png', dpi=1000); plt.close()", timeout=60)
    assert result.status in ("error", "memory") and result.session_alive


def test_many_open_figures(session: Session):
    """U49."""
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    result = session.run(quiet + "for i in range(100): plt.figure(figsize=(1, 1))\nplt.show()", timeout=60)
    assert len(result.images) == 3 and result.dropped["images"] == 97
    assert session.run("plt.get_fignums()").repr == "[]"
    result = session.run(quiet + "for i in range(10_000): plt.figure(figsize=(1, 1))", timeout=1.5)
    assert result.status in ("ok", "soft_timeout", "memory") and result.session_alive
    assert len(result.images) <= 3 and result.dropped["images"] > 3
    assert session.run("plt.get_fignums()").repr == "[]"


def test_decompression_bombs(session: Session):
    """T46: 400 million pixels in 50 KiB."""
    bomb = (
        "import struct, zlib\n"
        "def chunk(k, d): return struct.pack('>I', len(d)) + k + d + struct.pack('>I', zlib.crc32(k + d))\n"
        "c = zlib.compressobj(9); row = bytes(2501)\n"
        "data = b''.join(c.compress(row) for _ in range(20000)) + c.flush()\n"
        "png = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 20000, 20000, 1, 0, 0, 0, 0))"
        " + chunk(b'IDAT', data) + chunk(b'IEND', b'')\n"
    )
    result = session.run(bomb + "im = Image.open(io.BytesIO(png)); im.load()")
    assert result.error is not None and result.error["name"] == "DecompressionBombError"
    result = session.run(
        "import cv2, PIL\nPIL.Image.MAX_IMAGE_PIXELS = None\nImage.open(io.BytesIO(png)).convert('RGB').convert('F')"
    )
    assert result.status == "memory" and result.session_alive


def test_figures_stay_in_their_session(pool: SandboxPool):
    with pool.session() as a, pool.session() as b:
        a.run("plt.rcParams['figure.dpi'] = 10; plt.plot([1])")
        assert b.run("len(plt.gcf().axes), plt.rcParams['figure.dpi']").repr == "(0, 100.0)"


def test_returned_pictures_become_variables(session: Session):
    result = session.run(
        FIGURE + "plt.show(); display(Image.new('RGB', (8, 4), 'red'))", bind=["clue_1", "clue_2", "clue_3"]
    )
    assert result.bound == ["clue_1", "clue_2"]
    again = session.run("display(clue_1, clue_2.resize((4, 2)))\n'clue_3' in globals()")
    assert again.repr == "False"
    assert np.array_equal(again.images[0], result.images[0]) and again.images[1].shape == (2, 4, 3)


def test_a_profile_without_matplotlib():
    with SandboxPool(Policy(profile="numpy_pil", cell_timeout=20)) as pool, pool.session() as session:
        assert session.run("'plt' in globals()").repr == "False"
        result = session.run("import matplotlib")
        assert result.error is not None and result.error["name"] == "ModuleNotFoundError"
        assert len(session.run("Image.new('L', (4, 4))").images) == 1


def test_crop_comes_back_exact(pool: SandboxPool):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    with pool.session(images={"image_clue_0": Image.fromarray(pixels)}) as session:
        result = session.run("image_clue_0.crop((10, 20, 310, 220))")
    assert np.array_equal(result.images[0], pixels[20:220, 10:310])
