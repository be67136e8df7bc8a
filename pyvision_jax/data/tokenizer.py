"""Byte-level BPE tokenizers of the Qwen family, with what a rollout needs to know of them.

That is the exact bytes of each token, which ids are special, and which a policy may never sample.

Text is data: unless asked otherwise, `<|im_end|>` in a user's question is encoded as the characters it is written with.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from pyvision_jax.data.chat import CHAT_TEMPLATE

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VISION_START, VISION_END, VISION_PAD = "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"

# Special tokens of Qwen2.5-VL in the order of their ids (151643 and on in the released vocabulary).
SPECIAL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    VISION_PAD,
    IMAGE_PAD,
    VIDEO_PAD,
)
_NEVER_SAMPLED = (IM_START, VISION_START, VISION_END, VISION_PAD, IMAGE_PAD, VIDEO_PAD)


class Tokenizer:
    """A `tokenizers.Tokenizer` and its special ids.

    `source` is a directory with `tokenizer.json` (or `tokenizer.json.xz`), such a file, or a `tokenizers.Tokenizer`
    (which is copied). `config` is the content of `tokenizer_config.json`, read from beside the file where it exists.
    Raises `FileNotFoundError`, and `ValueError` where a special token is missing or the vocabulary is not byte-level.
    """

    def __init__(self, source: str | Path | tokenizers.Tokenizer, config: Mapping[str, Any] | None = None):
        if isinstance(source, tokenizers.Tokenizer):
            text = source.to_str()
        else:
            file = _find(Path(source))
            data = file.read_bytes()
            try:
                text = (lzma.decompress(data) if file.suffix == ".xz" else data).decode("utf-8")
            except (lzma.LZMAError, UnicodeDecodeError) as error:
                raise ValueError(f"{file}: {error}") from error
            beside = file.with_name("tokenizer_config.json")
            if config is None and beside.exists():
                config = _object(beside)
        self.config: dict[str, Any] = dict(config or {})
        try:
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no class of its own
            raise ValueError(f"{source if isinstance(source, str | Path) else 'tokenizer'}: {error}") from error
        self.backend.encode_special_tokens = True  # specials in text are literals; `encode` splices real ones itself
        added = self.backend.get_added_tokens_decoder()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("the tokenizer's vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1  # ids of the tokenizer; a model may have more rows
        self.token_bytes = _token_bytes(vocabulary, added, self.vocab_size)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._specials = {added[index].content: index for index in self.special_ids}
        self._gaps = frozenset(range(self.vocab_size)) - frozenset(vocabulary.values())
        for index in self.special_ids:
            token = added[index]
            if token.lstrip or token.rstrip or token.single_word or token.normalized:
                raise ValueError(
                    f"special token {token.content!r} strips or normalizes its surroundings: not supported"
                )
        # Longest first, as where one name begins another the longer one wins.
        names = sorted(self._specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self.im_start, self.im_end, self.endoftext = self._id(IM_START), self._id(IM_END), self._id(END_OF_TEXT)
        self.vision_start, self.vision_end = self._id(VISION_START), self._id(VISION_END)
        self.image_pad, self.video_pad = self._id(IMAGE_PAD), self._id(VIDEO_PAD)

    def _id(self, name: str) -> int:
        if name not in self._specials:
            raise ValueError(f"the tokenizer has no special token {name!r}")
        return self._specials[name]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of a text. With `allow_special`, names of special tokens become their ids; otherwise they are text.

        Lone surrogates, which no byte sequence stands for, become U+FFFD.
        """
        if not allow_special:
            return self.encode_with_starts(text)[0]
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._specials[piece]] if piece in self._specials else self.encode(piece)
        return ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a text (specials as literals), and for each the index of the character that it starts in."""
        if not text:
            return [], []
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their names; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join([self.bytes_of(int(index)) for index in ids])

    def bytes_of(self, index: int) -> bytes:
        """The exact bytes of a token (a special one's are its name); empty for a row of the model without a token."""
        return self.token_bytes[index] if index < self.vocab_size else b""

    def is_special(self, index: int) -> bool:
        return index in self.special_ids

    def forbidden_ids(self, rows: int | None = None) -> list[int]:
        """Ids that a policy never samples: vision tokens, `<|im_start|>`, ids without a token.

        `rows` is the number of logits of the model, where it is larger than `vocab_size`. Ends of turn and text are
        never in the list.
        """
        named = {self._specials[name] for name in _NEVER_SAMPLED if name in self._specials}
        return sorted(named | self._gaps) + list(range(self.vocab_size, rows or self.vocab_size))

    def forbidden_mask(self, rows: int | None = None) -> np.ndarray:
        """bool `[rows]`: True on `forbidden_ids(rows)`."""
        mask = np.zeros(max(rows or 0, self.vocab_size), bool)
        mask[self.forbidden_ids(rows)] = True
        return mask

    def save(self, directory: str | Path, chat_template: str = CHAT_TEMPLATE) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` for transformers' `AutoTokenizer`.

        A tokenizer that was not read from a directory is declared as `PreTrainedTokenizerFast`, the class that takes
        `tokenizer.json` as it is (Qwen's own class brings its own pre-tokenizer).
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": sorted(self._specials, key=lambda name: self._specials[name])[1:],
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "model_max_length": 131_072,
            **self.config,
            "chat_template": chat_template,
        }
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        (directory / "chat_template.jinja").write_text(chat_template, "utf-8")


def train_tiny(
    corpus: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    min_frequency: int = 2,
) -> Tokenizer:
    """A small byte-level BPE over all 256 bytes, for policies with a narrow language.

    Tags such as `<answer>` and runs of digits are pieces of their own; between them merges run across spaces and line
    ends, so that fixed phrases become few tokens. `vocab_size` counts everything; fewer merges are learned where the
    corpus repeats too little. The same corpus gives the same tokenizer. Raises `ValueError` for too small a vocabulary.
    """
    merged = vocab_size - len(special_tokens)
    if merged < 256:
        raise ValueError(f"vocab_size must be at least {256 + len(special_tokens)} (256 bytes and the special tokens)")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"</?[A-Za-z_]\w*>|\d+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merged,
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # A name of a special token in the corpus must not become a merge: its id would then be reachable from text.
    names = re.compile("|".join(map(re.escape, special_tokens)))
    tokenizer.train_from_iterator((piece for text in corpus for piece in names.split(text)), trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_tokens])
    return Tokenizer(tokenizer)


def _object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds {type(value).__name__}, not an object")
    return value


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in ("tokenizer.json", "tokenizer.json.xz"):
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(f"no tokenizer.json in {path}")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (the table of GPT-2).

    Printable Latin-1 stands for itself; the other 68 bytes take U+0100 and on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def _token_bytes(vocabulary: Mapping[str, int], added: Mapping[int, AddedToken], size: int) -> list[bytes]:
    alphabet = byte_alphabet()
    out = [b""] * size
    for token, index in vocabulary.items():
        if index in added:
            out[index] = added[index].content.encode()
            continue
        try:
            out[index] = bytes([alphabet[character] for character in token])
        except KeyError as error:
            raise ValueError(f"not a byte-level vocabulary: token {token!r} holds {error.args[0]!r}") from None
    return out
