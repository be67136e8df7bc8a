"""Records in ArrayRecord files: equal, in order, with their pictures, and without TensorFlow."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from pyvision_jax.config import DataConfig
from pyvision_jax.config_load import ConfigError
from pyvision_jax.data.media import MediaError, open_image
from pyvision_jax.data.records import Media
from pyvision_jax.data.sources.stored import StoredRecords, store
from pyvision_jax.recipes.build import build_traces
from pyvision_jax.worlds import needle


@pytest.fixture
def records(tmp_path):
    picture = tmp_path / "a picture.png"
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(picture)
    made = [needle.trace("sft", number) for number in range(5)]
    return [*made, dataclasses.replace(needle.task("rl", 1), id="on disk", media=(Media("image", path=str(picture)),))]


def test_records_come_back_in_order_and_hold_their_pictures(records, tmp_path):
    assert store(records, tmp_path / "out") == 6
    (tmp_path / "a picture.png").unlink()
    source = StoredRecords(tmp_path / "out")
    assert len(source) == 6
    assert [source[index] for index in range(5)] == records[:5]
    last = source[5]
    assert last.id == "on disk" and np.asarray(open_image(last.media[0])).shape == (4, 4, 3)
    assert build_traces(DataConfig(train=str(tmp_path / "out"))).source[2] == records[2]


def test_what_cannot_be_stored_or_is_not_there_is_named(records, tmp_path):
    gone = dataclasses.replace(records[0], media=(Media("image", path=str(tmp_path / "gone.png")),))
    with pytest.raises(MediaError, match=r"gone\.png"):
        store([gone], tmp_path / "a")
    store(records[:1], tmp_path / "b")
    with pytest.raises(FileExistsError, match="records"):
        store(records[:1], tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="no stored records"):
        StoredRecords(tmp_path / "c")
    (tmp_path / "d" / "records").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no stored records"):
        build_traces(DataConfig(train=str(tmp_path / "d")))


def test_tensorflow_is_not_imported():
    code = "import sys, pyvision_jax.data.sources.stored; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
