"""E. Pictures."""

from __future__ import annotations

import base64
import functools
import struct
import zlib

import numpy as np

from .case import Case, Step
from .trial import Trial


@functools.cache
def bomb(side: int = 20000) -> bytes:
    """A PNG of `side` x `side` grey pixels of 2 bits, some 100 KiB long."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(6)
    row = bytes(1 + side // 4)
    rows = b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 2, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def opens_bomb(before: str) -> str:
    data = base64.b64encode(bomb()).decode()
    opens = f"image = Image.open(io.BytesIO(base64.b64decode('{data}')))"
    return f"import base64, io\nfrom PIL import Image\n{before}\n{opens}\nimage.load()\nimage"


def _not_shown(trial: Trial) -> None:
    """Refused with an error, or dropped with a reason; never returned."""
    result = trial.result
    trial.expect(not result.images, f"pictures of {[i.shape for i in result.images]} came back")
    if result.status == "ok":
        trial.expect(
            result.dropped.get("images", 0) > 0 and result.dropped.get("reasons"), f"dropped: {result.dropped}"
        )
    trial.expect(result.usage.wall_s < 8, f"it took {result.usage.wall_s:.1f} s")


def _bomb_refused(trial: Trial) -> None:
    _not_shown(trial)
    name = trial.results[0].error and trial.results[0].error["name"]
    trial.expect(name in ("DecompressionBombError", "MemoryError"), f"the first ends with {name}")


def _sixteen(trial: Trial) -> None:
    most = trial.policy.max_images
    trial.expect(len(trial.result.images) == most, f"{len(trial.result.images)} pictures, {most} are right")
    trial.expect(trial.result.dropped.get("images") == 40 - most, f"dropped: {trial.result.dropped}")


# What each mode must look like: pixel (0, 0) of the picture that comes back.
MODES = {
    "Image.new('1', (40, 30), 1)": (255, 255, 255),
    "Image.new('L', (40, 30), 7)": (7, 7, 7),
    "Image.new('LA', (40, 30), (7, 0))": (255, 255, 255),  # transparency lies on white
    "Image.new('RGBA', (40, 30), (255, 0, 0, 0))": (255, 255, 255),
    "Image.new('RGB', (40, 30), (255, 0, 0)).quantize(4)": (255, 0, 0),
    "Image.new('I;16', (40, 30), 512)": (2, 2, 2),  # its upper 8 bits
    "Image.new('I', (40, 30), 9)": (9, 9, 9),
    "Image.new('F', (40, 30), 9.0)": (9, 9, 9),
    "Image.new('CMYK', (40, 30), (0, 0, 0, 255))": (0, 0, 0),
    "Image.new('YCbCr', (40, 30), (255, 128, 128))": (255, 255, 255),
    "Image.new('HSV', (40, 30), (0, 0, 255))": (255, 255, 255),
    "Image.new('LAB', (40, 30), (255, 0, 0))": None,
    "Image.new('P', (40, 30))": (0, 0, 0),
}


def _all_modes(trial: Trial) -> None:
    for result, (code, right) in zip(trial.results, MODES.items(), strict=True):
        trial.expect(len(result.images) == 1, f"{code}: {len(result.images)} pictures, {result.error}")
        for image in result.images:
            found = tuple(int(v) for v in np.asarray(image)[0, 0])
            trial.expect(image.shape == (30, 40, 3), f"{code}: {image.shape}")
            trial.expect(right is None or found == right, f"{code}: {found}, {right} is right")


CASES = (
    Case(
        "T45",
        "a picture of 2.5 GB",
        "limited",
        ("from PIL import Image; Image.new('L', (50000, 50000))",),
        check=_not_shown,
    ),
    Case(
        "T46",
        "a decompression bomb",
        "limited",
        (
            Step(opens_bomb(""), status=("error", "memory")),
            Step(opens_bomb("Image.MAX_IMAGE_PIXELS = None"), timeout=20),
        ),
        check=_bomb_refused,
    ),
    Case(
        "T47",
        "a figure of 300 x 300 inches",
        "limited",
        ("import matplotlib.pyplot as plt\nplt.figure(figsize=(300, 300)); plt.show()",),
        check=_not_shown,
    ),
    Case(
        "T48",
        "40 figures in one cell",
        "works",
        ("import matplotlib.pyplot as plt\nfor i in range(40):\n    plt.figure(figsize=(1, 1)); plt.show()",),
        check=_sixteen,
    ),
    Case("T49", "every mode as the last expression", "works", tuple(MODES), check=_all_modes),
    Case(
        "T50",
        "a figure that was not shown",
        "isolated",
        (
            "import matplotlib.pyplot as plt\nplt.plot([1, 2]); None",
            Step(
                "import matplotlib.pyplot as plt\nprint(len(plt.gcf().axes), plt.get_fignums()); plt.close('all')",
                who="new",
            ),
        ),
        check=lambda trial: trial.expect(
            trial.result.stdout.startswith("0 "), f"another session has {trial.result.stdout}"
        ),
    ),
)
