"""A conversation in a terminal: the policy's text as it is decoded, what its tool says, its pictures as files."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from PIL import Image

from pyvision_jax.agents.protocol import Prompt
from pyvision_jax.config import SamplingConfig
from pyvision_jax.data.jsonl import write_records
from pyvision_jax.data.media import MediaError, open_image
from pyvision_jax.data.records import Answer, Media, Message, Part, Record
from pyvision_jax.recipes.acting import Acting
from pyvision_jax.rollout.requests import mixed_seed
from pyvision_jax.rollout.trajectory import EndReason
from pyvision_jax.serving.dialogue import conversation, follow_up
from pyvision_jax.serving.events import REPLIED, Dialogue, Ended, Event, Ran, Text, Told, Wish
from pyvision_jax.serving.live import LiveLoop
from pyvision_sandbox import SandboxError, Session

HELP = """\
/image PATH   show a picture with the next message
/reset        begin a new conversation; /image pictures of the next message stay
/save [FILE]  write the conversation as a record (docs/data.md) [chat.jsonl in its folder]
/quit         leave (so does the end of the input)
Anything else is said to the policy. Ctrl-C stops it in its turn."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a policy says must not drive the terminal
_CELL = 500_000  # characters of a picture in one cell of code

Say = Callable[[str], None]  # writes text as it is


@dataclasses.dataclass
class _Talk:
    """One conversation as it will be saved."""

    folder: Path
    messages: list[Message] = dataclasses.field(default_factory=list)
    media: list[Media] = dataclasses.field(default_factory=list)
    answer: str = ""
    said: str = ""  # by the policy in the turn that goes on
    last: Dialogue | None = None
    shown: int = 0  # pictures by number
    pictures: dict[str, Image.Image] = dataclasses.field(default_factory=dict)  # the user's, by name

    def add(self, role: str, text: str, paths: Iterable[Path] = ()) -> None:
        parts = []
        for path in paths:
            parts.append(Part("image", index=len(self.media)))
            self.media.append(Media("image", path=str(path)))
        message = Message(role, (*parts, Part("text", text)))  # pyright: ignore[reportArgumentType]
        self.messages.append(message)

    def flush(self) -> None:
        """The policy's turn is over."""
        if self.said:
            self.add("assistant", self.said)
        self.said = ""


class Chat:
    """Conversations with a policy, one after another. All in the caller's thread, but for the tool calls.

    `folder`: each conversation takes a folder of its own below it when it has something to keep.
    """

    def __init__(
        self, acting: Acting, folder: Path, say: Say, *, seed: int = 0, sampling: SamplingConfig | None = None
    ):
        self.acting, self.folder, self.say, self.seed = acting, folder, say, seed
        host = acting.host
        self.loop = LiveLoop(
            acting.engine, host.protocol, acting.pool, acting.config.protocol, host.tokenizer, threads=2
        )
        self._wish = Wish(sampling, stream=True, keep=True)
        self._attached: list[Path] = []
        self._turns = self._number = 0
        self._talk = _Talk(self._next_folder())

    def run(self, lines: Iterable[str]) -> None:
        """Takes lines until /quit or their end."""
        for line in lines:
            if not self.take(line.strip()):
                return

    def take(self, line: str) -> bool:
        """One line of the user; False for the wish to leave."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if command == "/quit":
            return False
        if command == "/image":
            self.attach(Path(rest).expanduser())
        elif command == "/reset":
            self.reset()
        elif command == "/save":
            self.save(Path(rest).expanduser() if rest else None)
        elif command.startswith("/") and "/" not in command[1:]:
            self.say(f"{HELP}\n")
        elif line:
            self.send(line)
        return True

    def attach(self, path: Path) -> None:
        """Shows a picture with the next message."""
        try:
            picture = open_image(path, self.acting.config.image)
        except MediaError as error:
            self.say(f"[{error}]\n")
            return
        self._attached.append(path.resolve())
        name = f"image_clue_{self._talk.shown + len(self._attached) - 1}"
        self.say(f"[{name}: {path}, {picture.width}x{picture.height}]\n")

    def reset(self) -> None:
        last = self._talk.last
        session = None if last is None else self.loop.leave(last)
        if session is not None:
            session.close()
        self._talk = _Talk(self._next_folder())
        self.say("[a new conversation]\n")

    def save(self, path: Path | None = None) -> None:
        """Writes the conversation as a record: its messages, pictures by their paths."""
        talk = self._talk
        messages = list(talk.messages)
        while messages and messages[-1].role == "tool":  # a record ends with a user's or an assistant's turn
            messages.pop()
        if not messages:
            self.say("[nothing has been said]\n")
            return
        shown = sum(part.kind == "image" for message in messages for part in message.parts)
        path = path or talk.folder / "chat.jsonl"
        name = self.acting.config.protocol.name
        record = Record(talk.folder.name, tuple(messages), tuple(talk.media[:shown]), Answer(talk.answer), name, "chat")
        try:
            write_records(path, [record])
        except OSError as error:
            self.say(f"[{path}: {error.strerror}]\n")
            return
        self.say(f"[saved: {path}]\n")

    def close(self) -> None:
        last = self._talk.last
        session = None if last is None else self.loop.leave(last)
        if session is not None:
            session.close()
        self.loop.close()

    # -- a turn of the user -----------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        """Says something to the policy, and prints all that follows until the turn is the user's again."""
        talk, record, paths = self._talk, self._record(text), list(self._attached)
        try:
            pictures = [open_image(path, self.acting.config.image) for path in paths]
            prompt = self._prompt(record, pictures)
        except ValueError as error:  # MediaError is one
            self.say(f"[{error}]\n")
            return
        most = self.acting.config.rollout.max_length - 1
        if len(prompt.ids) > most:
            self.say(f"[{len(prompt.ids):,} tokens; at most {most:,} fit: /reset, or say less]\n")
            return
        if len(prompt.images) > self.acting.config.protocol.max_images:
            most = self.acting.config.protocol.max_images
            self.say(f"[{len(prompt.images)} pictures; at most {most} fit (protocol.max_images): /reset]\n")
            return
        self._turns += 1
        seed = mixed_seed(self.seed, self._turns)
        try:
            (one,) = self.loop.begin(record, prompt, n=1, seed=seed, wish=self._wish, listen=self._hear)
        except ValueError as error:
            self.say(f"[{error}]\n")
            return
        named = {f"image_clue_{talk.shown + k}": picture for k, picture in enumerate(pictures)}
        session = None if talk.last is None else self.loop.leave(talk.last)
        if session is not None:
            self._hand_over(session, named)
        talk.pictures |= named
        talk.add("user", text, paths)
        self.loop.carry(one, session, talk.shown + len(paths))
        self._attached, talk.last = [], one
        with _interrupts(lambda: self.loop.post(lambda: self.loop.cancel(one))):
            while not one.ended or one.calling:
                self.loop.pump()
        talk.shown = one.shown

    def _record(self, text: str) -> Record:
        parts = (*(Part("image", index=k) for k in range(len(self._attached))), Part("text", text))
        media = tuple(Media("image", path=str(path)) for path in self._attached)
        return Record("chat", (Message("user", parts),), media, Answer(""), self.acting.config.protocol.name, "chat")

    def _prompt(self, record: Record, pictures: list[Image.Image]) -> Prompt:
        """The first turn as the protocol builds it; a later one behind the ids so far, none of them rendered anew."""
        host, talk = self.acting.host, self._talk
        if talk.last is None or talk.last.context is None:
            return conversation(host.protocol, record, self.acting.config.image, host.tokenizer)
        context = talk.last.context
        closed = int(context.ids[-1]) in (host.tokenizer.im_end, host.tokenizer.endoftext)
        more = follow_up(
            host.protocol, record.messages[0], record.media, host.tokenizer, closed=closed, shown=talk.shown
        )
        named = {f"image_clue_{talk.shown + k}": picture for k, picture in enumerate(pictures)}
        ids = [*context.ids.tolist(), *more.ids]
        return Prompt(ids, [*context.images, *more.images], talk.pictures | named)

    def _hand_over(self, session: Session, pictures: dict[str, Image.Image]) -> None:
        """Binds new pictures in a session that lives: inputs are handed over at its start, so these go as code."""
        try:
            for name, picture in pictures.items():
                out = io.BytesIO()
                picture.save(out, "PNG", compress_level=1)
                text = base64.b64encode(out.getvalue()).decode("ascii")
                session.run("_sent = []")
                for start in range(0, len(text), _CELL):
                    session.run(f"_sent.append({text[start : start + _CELL]!r})")
                data = "__import__('io').BytesIO(__import__('base64').b64decode(''.join(_sent)))"
                done = session.run(f"{name} = __import__('PIL.Image').Image.open({data}).convert('RGB')\ndel _sent")
                if not done.ok:
                    self.say(f"[{name} could not be given to the tool: {done.status}]\n")
        except SandboxError as error:
            self.say(f"[a picture could not be given to the tool: {error}]\n")

    # -- what follows -----------------------------------------------------------------------------------------------

    def _hear(self, one: Dialogue, event: Event) -> None:
        talk = self._talk
        if isinstance(event, Text):
            talk.said += event.text
            self.say(_CONTROL.sub("", event.text))
        elif isinstance(event, Ran):
            talk.flush()
            self.say(f"\n[tool: {event.call.result['status']}, {event.call.seconds:.2f} s]\n")
            self.say("".join(f"| {line}\n" for line in event.text.splitlines()))
            paths = [self._store(name, Image.fromarray(pixels)) for name, pixels in event.images.items()]
            talk.add("tool", event.text, paths)
        elif isinstance(event, Told):
            talk.flush()
            talk.add("tool", event.text)
            self.say(f"\n[told: {event.text}]\n")
        else:
            talk.flush()
            self._end(event)

    def _end(self, event: Ended) -> None:
        self.say("\n")
        if event.reason == EndReason.ANSWERED:
            self._talk.answer = event.answer or ""
            self.say(f"[answer: {event.answer}]\n")
        elif event.reason != REPLIED:
            self.say(f"[ended: {event.reason}{': ' if event.detail else ''}{event.detail}]\n")

    def _store(self, name: str, picture: Image.Image) -> Path:
        self._talk.folder.mkdir(parents=True, exist_ok=True)
        path = self._talk.folder / f"{name}.png"
        picture.save(path, "PNG")
        self.say(f"[{name}: {path}, {picture.width}x{picture.height}]\n")
        return path.resolve()

    def _next_folder(self) -> Path:
        """The first that does not exist, and was not taken by an earlier conversation of this chat."""
        self._number += 1
        while (self.folder / f"chat_{self._number:03d}").exists():
            self._number += 1
        return self.folder / f"chat_{self._number:03d}"


class _interrupts:
    """Within it Ctrl-C calls `stop` and breaks nothing off in its middle; a second one does as usual."""

    def __init__(self, stop: Callable[[], None]):
        self._stop = stop
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *exc: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._stop()
