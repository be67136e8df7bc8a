"""What an HF model directory holds beside its weights: config, tokenizer, processor, generation, chat template.

The files of a given tokenizer directory are copied; what it lacks is written from the model's geometry.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyvision_jax.models.config import ModelSpec
from pyvision_jax.models.safetensors_io import WeightsError, first_names

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
CHAT_FILES = ("chat_template.jinja", "chat_template.json")
COPIED = (
    *TOKENIZER_FILES,
    *CHAT_FILES,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)

# Of CLIP, which Qwen2.5-VL normalises by, and the pixel limits of its published preprocessor_config.json.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MIN_PIXELS, MAX_PIXELS = 3_136, 12_845_056


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises WeightsError naming the file if it is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: no such file") from error
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_spec(directory: str | Path) -> ModelSpec:
    """The geometry in a directory's config.json. Raises WeightsError naming the file and the key at fault."""
    path = Path(directory) / "config.json"
    try:
        return ModelSpec.from_hf(read_json(path))
    except WeightsError:
        raise
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{path}: {error}") from error


def default_preprocessor(cfg: ModelSpec) -> dict[str, Any]:
    """preprocessor_config.json of a model that came without one."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": cfg.vision.patch_size,
        "temporal_patch_size": cfg.vision.temporal_patch_size,
        "merge_size": cfg.vision.merge_size,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
    }


def special_ids(tokenizer_dir: Path) -> dict[str, int]:
    """Added tokens of tokenizer.json, text to id."""
    added = read_json(tokenizer_dir / "tokenizer.json").get("added_tokens") or []
    return {token["content"]: token["id"] for token in added}


def write_files(
    directory: Path,
    cfg: ModelSpec,
    dtype: str,
    tokenizer_dir: str | Path | None = None,
    preprocessor: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> None:
    """Writes everything but the weights into `directory`, which exists.

    `preprocessor` and `generation` (the contents of preprocessor_config.json and generation_config.json) win over the
    files in `tokenizer_dir`, which win over what is derived: pixel normalisation of CLIP, and generation that ends at
    <|im_end|> or <|endoftext|>. `chat_template` (Jinja; `pyvision_jax.data.chat.CHAT_TEMPLATE`) is written where
    `tokenizer_dir` has no template file; it wins over one inside tokenizer_config.json, as a text model's knows no
    pictures.

    Raises:
        WeightsError: the tokenizer's vision tokens have other ids than `cfg`, or ids that the embedding has no row for.
    """
    ids: dict[str, int] = {}
    if tokenizer_dir is not None:
        source = Path(tokenizer_dir)
        ids = special_ids(source)
        _check_ids(ids, cfg, source)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if not (directory / "tokenizer_config.json").is_file():
            write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    ends = [ids[name] for name in ("<|im_end|>", "<|endoftext|>") if name in ids]
    pad = ids.get("<|endoftext|>")

    if generation is not None or not (directory / "generation_config.json").is_file():
        derived = {"do_sample": False, "eos_token_id": ends or None, "pad_token_id": pad}
        write_json(directory / "generation_config.json", generation if generation is not None else derived)
    if preprocessor is not None or not (directory / "preprocessor_config.json").is_file():
        config = default_preprocessor(cfg) | dict(preprocessor or {})
        write_json(directory / "preprocessor_config.json", config)
    if chat_template is not None and not any((directory / name).is_file() for name in CHAT_FILES):
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")

    # Said outright: the defaults of HF's class are ids of the full vocabulary.
    tokens = {"bos_token_id": None, "eos_token_id": ends[0] if ends else None, "pad_token_id": pad}
    geometry = cfg.to_hf()
    config = geometry | tokens | {"dtype": dtype, "torch_dtype": dtype, "text_config": geometry["text_config"] | tokens}
    write_json(directory / "config.json", config)


def _check_ids(ids: Mapping[str, int], cfg: ModelSpec, source: Path) -> None:
    expected = {
        "<|image_pad|>": cfg.image_token,
        "<|video_pad|>": cfg.video_token,
        "<|vision_start|>": cfg.vision_start,
        "<|vision_end|>": cfg.vision_end,
    }
    wrong = [
        f"{name} is {ids.get(name)}, the model has {id_}" for name, id_ in expected.items() if ids.get(name) != id_
    ]
    if wrong:
        raise WeightsError(f"{source / 'tokenizer.json'}: not the model's tokenizer: {first_names(wrong)}")
    high = [f"{name} ({id_})" for name, id_ in ids.items() if id_ >= cfg.text.vocab_size]
    if high:
        rows = cfg.text.vocab_size
        raise WeightsError(f"{source / 'tokenizer.json'}: ids beyond the embedding's {rows} rows: {first_names(high)}")
