"""Inside a session: every way in which code shows a picture ends here, as raw RGB pixels (no PNG in the hot path).

`plt.show()` in its spellings, `fig.show()`, `plt.pause`, figures left open at the end of a cell (saved or not),
`Image.show()`, `cv2.imshow`, `display(x)`, IPython's too, and a picture as the last expression. Pictures beyond the
limits are counted, with the reason.
"""

import importlib
import io
import os
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageShow

from .video import Frame

_WHITE = (255, 255, 255, 255)
_MAX_REASONS = 8
_CV2_WINDOWS = (
    "namedWindow", "destroyWindow", "destroyAllWindows", "moveWindow", "resizeWindow", "setWindowTitle",
    "setWindowProperty", "startWindowThread", "setMouseCallback",
)  # fmt: skip
_array, _asarray, _clip, _uint8 = np.array, np.asarray, np.clip, np.uint8
_Image, _new, _fromarray, _composite = Image.Image, Image.new, Image.fromarray, Image.alpha_composite


def rgb(image: Image.Image) -> Image.Image:
    """Any mode -> RGB. Transparency lies on white; of 16 bits the upper 8; I and F beyond 0..255 are stretched."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return _fromarray((_asarray(image) >> 8).astype(_uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.nan_to_num(_asarray(image, np.float32))
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 255:
            values = (values - low) * (255 / max(high - low, 1e-12))
        return _fromarray(values.astype(_uint8)).convert("RGB")
    if image.has_transparency_data:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return _composite(_new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")


def _pixels(array: np.ndarray) -> np.ndarray:
    """What cv2.imshow makes of an array: uint8, floats times 255, of 16 bits the upper 8; BGR(A) becomes RGB(A)."""
    if array.dtype == np.uint16:
        array = (array >> 8).astype(_uint8)
    elif array.dtype != _uint8:
        scale = 255 if array.dtype.kind in "fb" else 1
        array = _clip(np.nan_to_num(array.astype(np.float32)) * scale, 0, 255).astype(_uint8)
    if array.ndim == 2 or array.shape[2] == 1:
        return array.reshape(array.shape[:2])
    return array[..., [2, 1, 0, 3][: array.shape[2]]]


def _is_picture(array: np.ndarray) -> bool:
    return array.size > 0 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4)))


class Gallery:
    """The pictures of the running cell."""

    def __init__(self, limits: dict[str, Any]):
        self.max_images, self.max_pixels = limits["max_images"], limits["max_pixels"]
        self.max_total, self.max_ratio = limits["max_total_pixels"], limits["max_ratio"]
        self.clear()

    def clear(self) -> None:
        self.images: list[Image.Image] = []
        self.shown: list[Any] = []  # figures that were shown: not again at the end of the cell
        self.pixels, self.dropped = 0, 0
        self.reasons: list[str] = []

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped += count
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(reason)

    def _admit(self, w: int, h: int) -> bool:
        """Whether a picture of this size still fits; judged before a pixel is made."""
        if w < 1 or h < 1:
            self.drop(f"{w}x{h} is empty")
        elif w * h > self.max_pixels:
            self.drop(f"{w}x{h} has more than {self.max_pixels} pixels")
        elif max(w, h) > self.max_ratio * min(w, h):
            self.drop(f"{w}x{h} is longer than {self.max_ratio:g} to 1")
        elif len(self.images) >= self.max_images:
            self.drop(f"only {self.max_images} pictures are returned")
        elif self.pixels + w * h > self.max_total:
            self.drop(f"the pictures of one call have more than {self.max_total} pixels")
        else:
            self.pixels += w * h
            return True
        return False

    def picture(self, image: Image.Image) -> None:
        if self._admit(*image.size):
            converted = rgb(image)
            self.images.append(converted.copy() if converted is image else converted)  # the code may draw on it later

    def pixels_of(self, array: np.ndarray) -> None:
        """An array as OpenCV shows it, [h, w], [h, w, 1], [h, w, 3] (BGR) or [h, w, 4]."""
        if self._admit(array.shape[1], array.shape[0]):
            self.images.append(rgb(_fromarray(np.ascontiguousarray(_pixels(array)))))

    def figure(self, figure: Any) -> None:
        self.shown.append(figure)
        if not self._admit(int(figure.bbox.width), int(figure.bbox.height)):
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        canvas.draw()
        self.images.append(rgb(_fromarray(_asarray(canvas.buffer_rgba()))))

    def show(self, value: Any) -> bool:
        """Show a value that is a picture. False: it is none."""
        if isinstance(value, _Image):
            self.picture(value)
            return True
        if isinstance(value, NotebookImage):
            self.picture(value.picture())
            return True
        if isinstance(value, Frame) and value.dtype == _uint8 and value.ndim == 3 and _is_picture(value):
            self.picture(_fromarray(value.asnumpy()))
            return True
        # Only code that has imported matplotlib can hold a figure; the import is not paid otherwise.
        module = sys.modules.get("matplotlib.figure")
        if module is not None and isinstance(value, module.Figure):
            self.figure(value)
            return True
        return False

    def display(self, *values: Any) -> None:
        """Show pictures, figures and uint8 arrays [h, w], [h, w, 3], [h, w, 4]; print the repr of anything else."""
        for value in values:
            if isinstance(value, np.ndarray) and value.dtype == _uint8 and _is_picture(value):
                self.picture(_fromarray(value.squeeze(2) if value.shape[2:] == (1,) else value))
            elif not self.show(value):
                print(repr(value))

    def open_figures(self, show: bool, end: bool = False) -> None:
        """Show what pyplot still holds and close it; show=False only counts (the cell's time is over)."""
        if managers is None or not managers.figs:
            return
        try:
            waiting = [m.canvas.figure for m in managers.get_all_fig_managers()]
            waiting = [f for f in waiting if not any(f is s for s in self.shown)]
            if end and self.shown:
                # `plt.show(); plt.savefig(...)` leaves an empty figure behind: its only child is the background.
                waiting = [f for f in waiting if len(f.get_children()) > 1]
            room = max(self.max_images - len(self.images), 0) if show else 0
            for figure in waiting[:room]:
                self.figure(figure)
            if waiting[room:]:
                reason = (
                    f"only {self.max_images} pictures are returned" if show else "no time was left to draw open figures"
                )
                self.drop(reason, len(waiting[room:]))
        finally:
            managers.destroy_all()


current: Gallery | None = None  # of this session; None in the server
managers: Any = None  # matplotlib's list of open figures, once pyplot is imported


def display(*values: Any, **options: Any) -> None:
    """Show each value: pictures, figures and uint8 arrays as pictures, anything else by its repr."""
    if current is not None:
        current.display(*values)


class _Viewer(ImageShow.Viewer):
    def show(self, image: Image.Image, **options: Any) -> int:
        if current is not None:
            current.picture(image)
        return 1


def install() -> None:
    """In the server, before the preload."""
    ImageShow.register(_Viewer(), order=0)


# ------------------------------------------------------------------------------------------------ changed modules
def change_pyplot(pyplot: Any) -> None:
    global managers
    from matplotlib._pylab_helpers import Gcf
    from matplotlib.backend_bases import FigureManagerBase
    from matplotlib.figure import Figure

    managers = Gcf
    switch_backend = pyplot.switch_backend

    def show(*args: Any, **kwargs: Any) -> None:
        """All open figures, as in a notebook: shown once and closed. `block` and the like mean nothing here."""
        if current is not None:
            current.open_figures(show=True)

    def show_figure(figure: Any, *args: Any, **kwargs: Any) -> None:
        if current is not None:
            current.figure(figure)

    def switch(name: str) -> None:
        """There is no window system: every interactive backend (TkAgg, inline, ...) draws with Agg instead."""
        switch_backend(name if name.lower() in ("agg", "pdf", "ps", "svg", "cairo", "template") else "agg")

    pyplot.show, pyplot.pause, pyplot.switch_backend = show, show, switch  # nobody looks during a pause: it is none
    setattr(Figure, "show", show_figure)  # noqa: B010 (a plain assignment is a type error)
    setattr(FigureManagerBase, "show", lambda manager, *args: show_figure(manager.canvas.figure))  # noqa: B010


def change_cv2(cv2: Any) -> None:
    def imshow(winname: Any, mat: Any) -> None:
        array = _asarray(mat.get() if isinstance(mat, cv2.UMat) else mat)
        if not _is_picture(array):
            raise ValueError(f"imshow needs an array [h, w], [h, w, 3] or [h, w, 4], not one of shape {array.shape}")
        if current is not None:
            current.pixels_of(array)

    def no_key(delay: int = 0) -> int:
        return -1

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    cv2.imshow, cv2.waitKey, cv2.waitKeyEx, cv2.pollKey = imshow, no_key, no_key, no_key
    for name in _CV2_WINDOWS:
        setattr(cv2, name, nothing)


# ------------------------------------------------------------------------------------------------ IPython's names
# Code writes `from IPython.display import display`; IPython itself could show nothing here, installed or not.
class NotebookImage:
    """`IPython.display.Image`: encoded bytes, or the name of a file."""

    def __init__(self, data: Any = None, url: str | None = None, filename: Any = None, **options: Any):
        if url is not None:
            raise ValueError("there is no network in this sandbox: give data or filename")
        source = data if filename is None else filename
        if source is None:
            raise ValueError("no image data found: give data or filename")
        self.source = io.BytesIO(source) if isinstance(source, bytes | bytearray) else os.fspath(source)

    def picture(self) -> Image.Image:
        with Image.open(self.source) as image:
            image.load()
            return image


class NotebookText:
    """`HTML`, `Markdown` and their like: shown as the text they were made of."""

    def __init__(self, data: Any = "", **options: Any):
        self.data = data

    def __repr__(self) -> str:
        return str(self.data)


def _no_output_to_clear(wait: bool = False) -> None:
    return None


def fill_ipython(module: Any) -> None:
    module.get_ipython = lambda: None  # what it says outside a notebook
    importlib.import_module("IPython.display")


def fill_nothing(module: Any) -> None:
    return None


def fill_display(module: Any) -> None:
    module.display, module.Image, module.clear_output = display, NotebookImage, _no_output_to_clear
    for name in ("HTML", "Markdown", "Latex", "Pretty", "JSON", "SVG"):
        setattr(module, name, NotebookText)


IPYTHON = {
    "IPython": fill_ipython, "IPython.display": fill_display,
    "IPython.core": fill_nothing, "IPython.core.display": fill_display,
}  # fmt: skip
