"""Inside a session: every way in which code shows a picture ends here, as raw RGB pixels (no PNG in the hot path).

`plt.show()` in its spellings, `fig.show()`, `plt.pause`, figures left open at the end of a cell, `Image.show()`,
`display(x)` and a picture as the last expression. Pictures beyond the limits are counted, with the reason.
"""

import importlib.abc
import importlib.machinery
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageShow

_WHITE = (255, 255, 255, 255)
_MAX_REASONS = 8


def rgb(image: Image.Image) -> Image.Image:
    """Any mode -> RGB. Transparency lies on white; of 16 bits the upper 8; I and F beyond 0..255 are stretched."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(image, np.float32))
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 255:
            values = (values - low) * (255 / max(high - low, 1e-12))
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")


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

    def figure(self, figure: Any) -> None:
        self.shown.append(figure)
        if not self._admit(int(figure.bbox.width), int(figure.bbox.height)):
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        canvas.draw()
        self.images.append(rgb(Image.fromarray(np.asarray(canvas.buffer_rgba()))))

    def show(self, value: Any) -> bool:
        """Show a value that is a picture. False: it is none."""
        if isinstance(value, Image.Image):
            self.picture(value)
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
            is_pixels = isinstance(value, np.ndarray) and value.dtype == np.uint8
            if is_pixels and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))) and value.size:
                self.picture(Image.fromarray(value))
            elif not self.show(value):
                print(repr(value))

    def open_figures(self, show: bool) -> None:
        """Show what pyplot still holds and close it; show=False only counts (the cell's time is over)."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        try:
            waiting = [pyplot.figure(n) for n in pyplot.get_fignums()]
            waiting = [f for f in waiting if not any(f is s for s in self.shown)]
            room = self.max_images - len(self.images) if show else 0
            for figure in waiting[:room]:
                self.figure(figure)
            if waiting[room:]:
                reason = (
                    f"only {self.max_images} pictures are returned" if show else "no time was left to draw open figures"
                )
                self.drop(reason, len(waiting[room:]))
        finally:
            pyplot.close("all")


current: Gallery | None = None  # of this session; None in the server


class _Viewer(ImageShow.Viewer):
    def show(self, image: Image.Image, **options: Any) -> int:
        if current is not None:
            current.picture(image)
        return 1


class _PyplotLoader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self.loader = loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        _patch_pyplot(module)


class _PyplotFinder(importlib.abc.MetaPathFinder):
    """Patches pyplot whenever it is imported, so that a profile without it pays nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "matplotlib.pyplot":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _PyplotLoader(spec.loader)
        return spec


def _patch_pyplot(pyplot: Any) -> None:
    from matplotlib.backend_bases import FigureManagerBase

    switch_backend = pyplot.switch_backend

    def show(*args: Any, **kwargs: Any) -> None:
        """All open figures, as in a notebook: shown once and closed. `block` and the like mean nothing here."""
        if current is not None:
            current.open_figures(show=True)

    def show_one(manager: Any, *args: Any, **kwargs: Any) -> None:
        if current is not None:
            current.figure(manager.canvas.figure)

    def switch(name: str) -> None:
        """There is no window system: every interactive backend (TkAgg, inline, ...) draws with Agg instead."""
        switch_backend(name if name.lower() in ("agg", "pdf", "ps", "svg", "cairo", "template") else "agg")

    pyplot.show, pyplot.switch_backend = show, switch
    setattr(FigureManagerBase, "show", show_one)  # noqa: B010 (a plain assignment is a type error)


def install() -> None:
    """In the server, before the preload."""
    ImageShow.register(_Viewer(), order=0)
    sys.meta_path.insert(0, _PyplotFinder())
