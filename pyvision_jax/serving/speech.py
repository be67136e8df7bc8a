"""The text of one policy turn as it grows: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class Speech:
    """Takes the bytes of ids one after another. `text` is all that was said, `stopped` the stop string that ended it.

    `feed` gives the text that may be shown now: what could be the beginning of a stop string is held back until it is
    known to be none, and so are the bytes of an unfinished character.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self.text, self.stopped = "", ""
        self.fed = 0  # ids taken
        self._stops = tuple(stops)
        self._shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, pieces: Iterable[bytes]) -> str:
        """New text to show. Ids after the one that completes a stop string are not taken."""
        for piece in pieces:
            if self.stopped:
                break
            self.fed += 1
            self._say(self._decoder.decode(piece))
        return self._show(len(self.text) - self._held())

    def finish(self) -> str:
        """The rest, when the turn is over."""
        if not self.stopped:
            self._say(self._decoder.decode(b"", final=True))
        return self._show(len(self.text))

    def _say(self, new: str) -> None:
        start = len(self.text)
        self.text += new
        places = {stop: self.text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stops}
        found = [(place, -len(stop), stop) for stop, place in places.items() if place >= 0]
        if found:
            place, _, self.stopped = min(found)
            self.text = self.text[:place]

    def _held(self) -> int:
        """Characters at the end that begin a stop string."""
        if self.stopped:
            return 0
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            end = self.text[len(self.text) - size :]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def _show(self, end: int) -> str:
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new
