"""Byte-exact tokens, literals that stay text, ids never sampled, and a trip through transformers."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from pyvision_jax.data.tokenizer import IM_END, IMAGE_PAD, SPECIAL_TOKENS, Tokenizer, byte_alphabet, train_tiny

CORPUS = [
    "<think>The box is small.</think>\n<code>\n```python\nshow(image_clue_0.crop((96, 128, 256, 320)))\n```\n</code>",
    "<answer>7</answer>",
] * 20
TEXTS = [
    "Which digit is in the red box?",
    "Größe 你好 🙂 \u00e9t\u00e9\n\n\ttabs  spaces ",
    "<answer>12</answer>0007 and <b>bold</b>",
    "a\x00b\x7f\r\n",
    "",
]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return train_tiny(CORPUS, 330)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(tiny, text):
    ids = tiny.encode(text)
    assert b"".join(tiny.bytes_of(index) for index in ids) == text.encode()
    assert tiny.decode(ids) == text


def test_every_byte_is_a_token(tiny):
    assert len(byte_alphabet()) == 256
    assert {bytes([value]) for value in range(256)} <= set(tiny.token_bytes)


def test_half_a_character_has_exact_bytes_though_it_is_no_text(tiny):
    ids = tiny.encode("🙂")
    assert len(ids) == 4
    assert tiny.decode_bytes(ids[:2]) == "🙂".encode()[:2]
    assert tiny.decode(ids[:2]) == "\ufffd"


def test_lone_surrogates_become_replacement_characters(tiny):
    assert tiny.decode(tiny.encode("a\ud800b\udfff")) == "a\ufffdb\ufffd"


def test_specials_in_text_are_literals_unless_allowed(tiny):
    text = f"how do I write {IMAGE_PAD} or <image>?{IM_END}"
    literal, allowed = tiny.encode(text), tiny.encode(text, allow_special=True)
    assert not set(literal) & tiny.special_ids
    assert tiny.decode(literal) == tiny.decode(allowed) == text
    assert [index for index in allowed if tiny.is_special(index)] == [tiny.image_pad, tiny.im_end]


def test_forbidden_ids(tiny):
    rows = tiny.vocab_size + 6
    forbidden = tiny.forbidden_ids(rows)
    assert set(range(tiny.vocab_size, rows)) <= set(forbidden)
    for index in (tiny.im_start, tiny.vision_start, tiny.vision_end, tiny.image_pad, tiny.video_pad):
        assert index in forbidden
    assert tiny.im_end not in forbidden
    assert tiny.endoftext not in forbidden
    mask = tiny.forbidden_mask(rows)
    assert mask.shape == (rows,)
    np.testing.assert_array_equal(np.flatnonzero(mask), forbidden)


def test_tiny_isolates_tags_and_numbers_and_merges_phrases(tiny):
    pieces = [tiny.bytes_of(index) for index in tiny.encode(CORPUS[0])]
    assert {b"<think>", b"<code>", b"</code>", b"96", b"320"} <= set(pieces)
    assert len(pieces) < 40
    assert not any(any(48 <= byte <= 57 for byte in piece) and not piece.isdigit() for piece in pieces)
    assert [tiny.decode([i]) for i in range(tiny.vocab_size - len(SPECIAL_TOKENS), tiny.vocab_size)] == list(
        SPECIAL_TOKENS
    )


def test_tiny_is_deterministic(tiny):
    assert train_tiny(iter(CORPUS), 330).backend.to_str() == tiny.backend.to_str()
    with pytest.raises(ValueError, match="at least 270"):
        train_tiny(CORPUS, 269)


def test_special_names_in_the_corpus_do_not_become_merges():
    tokenizer = train_tiny([f"a question{IM_END}"] * 50, 320)
    assert not set(tokenizer.encode(f"a question{IM_END}")) & tokenizer.special_ids
    assert tokenizer.im_end >= tokenizer.vocab_size - len(SPECIAL_TOKENS)


def test_starts_are_characters(tiny):
    ids, starts = tiny.encode_with_starts("a🙂你b")
    assert len(ids) == len(starts)
    assert sorted(set(starts)) == [0, 1, 2, 3]


def test_missing_special_and_foreign_vocabulary_are_named():
    with pytest.raises(ValueError, match=r"no special token '<\|im_start\|>'"):
        Tokenizer(Backend(models.BPE({"a": 0, "b": 1}, [])))
    with pytest.raises(ValueError, match="not a byte-level vocabulary: token 'a b'"):
        Tokenizer(Backend(models.BPE({"a b": 0}, [])))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"version": "1.0"}', b"\xff\xfe", b"version https://git-lfs"]
)
def test_a_damaged_file_is_named(tiny, tmp_path, data):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        directory = tmp_path / name
        tiny.save(directory)
        if name == "tokenizer_config.json" and data.startswith(b"{") and data.endswith(b"}"):
            continue
        (directory / name).write_bytes(data)
        with pytest.raises(ValueError, match=name if name != "tokenizer.json" else str(directory)):
            Tokenizer(directory)
    (tmp_path / "tokenizer.json.xz").write_bytes(data)
    with pytest.raises(ValueError, match=r"tokenizer\.json\.xz"):
        Tokenizer(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("with_model", [False, True])
def test_saved_directory_loads_in_transformers(tiny, tmp_path, with_model):
    transformers = pytest.importorskip("transformers")
    if with_model:  # AutoTokenizer then looks at the model type too
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    tiny.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text).input_ids == tiny.encode(text)
    text = f"x{IM_END}\n{IMAGE_PAD}{IMAGE_PAD}y"
    assert theirs(text).input_ids == tiny.encode(text, allow_special=True)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tiny.im_end, tiny.endoftext)
    assert theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system"
    )
    assert Tokenizer(tmp_path).backend.to_str() == tiny.backend.to_str()


@pytest.mark.parametrize("name, size", [("qwen2_5", 151_665), ("qwen3", 151_669)])
def test_real_vocabulary(test_data, name, size):
    tokenizer = Tokenizer(test_data("tokenizers") / name)
    assert tokenizer.vocab_size == size
    assert (tokenizer.im_start, tokenizer.im_end, tokenizer.image_pad) == (151_644, 151_645, 151_655)
    assert tokenizer.bytes_of(151_657) == b"<tool_call>"
    for text in TEXTS:
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert not set(tokenizer.encode("".join(SPECIAL_TOKENS))) & tokenizer.special_ids
    # Rows above the tokenizer are padding of the released embedding.
    assert len(tokenizer.forbidden_ids(151_936)) == 6 + 151_936 - size
