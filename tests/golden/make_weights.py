"""Writes weights.npz: names, shapes and checksums of the tensors of a transformers model that holds known parameters.

PYTHONPATH=.:tests python tests/golden/make_weights.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from golden.make_logits import reference_model
from model_rows import case_spec
from tiny import random_params


def checksum(array: np.ndarray) -> float:
    """Every value counts by its place, so that a transposed tensor has another sum."""
    return float(np.sum(array.astype(np.float64).ravel() * np.cos(np.arange(array.size))))


def main() -> None:
    cfg = case_spec("untied")
    tensors = {name: value.numpy() for name, value in reference_model(random_params(cfg), cfg).state_dict().items()}
    names = sorted(tensors)
    np.savez_compressed(
        Path(__file__).with_name("weights.npz"),
        names=np.array(names),
        shapes=np.array(["x".join(map(str, tensors[name].shape)) for name in names]),
        checksums=np.array([checksum(tensors[name]) for name in names]),
    )


if __name__ == "__main__":
    main()
