"""`pyvision rollout`, `chat` and `serve` with a real engine on a tiny policy: from a directory of weights to files."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from pyvision_jax.cli import app
from pyvision_jax.config import DemoConfig, ImageConfig, ProtocolConfig, RLConfig, SFTConfig
from pyvision_jax.config_load import ConfigError, dump
from pyvision_jax.data.jsonl import write_records
from pyvision_jax.data.records import Answer, Media, Message, Part, Record
from pyvision_jax.models.hf import export_weights
from pyvision_jax.recipes import rollout
from pyvision_jax.recipes.acting import acting_config, open_policy
from pyvision_jax.recipes.trajectories import read_trajectories
from pyvision_jax.report import reader
from pyvision_jax.worlds import tiny
from tests.tiny import random_params, tiny_spec

SMALL = (
    *("rollout.slots=2", "rollout.max_length=120", "rollout.max_turn_length=12", "rollout.chunk=6"),
    *("rollout.prefill_buckets=[64]", "rollout.patch_buckets=[36]", "protocol.template=brief", "image.max_aspect=9"),
    "sandbox.profile=numpy_pil",
)
RECORDS = 6


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    tokens = tiny.tokenizer()
    ids = (tokens.image_pad, tokens.video_pad, tokens.vision_start, tokens.vision_end)
    spec = tiny_spec(tokens.vocab_size, layers=1, depth=1, fullatt_blocks=(0,), window_size=252, ids=ids)
    return export_weights(
        random_params(spec, scale=0.1),
        spec,
        tmp_path_factory.mktemp("weights") / "model",
        tokenizer_dir=tiny.ASSETS if (tiny.ASSETS / "tokenizer.json").is_file() else _saved(tokens, tmp_path_factory),
        preprocessor=tiny.processor().to_hf(),
    )


def _saved(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokens.save(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Six tasks, one of them with a broken picture, and a line that is no record."""
    folder = tmp_path_factory.mktemp("tasks")
    records = []
    for number in range(RECORDS):
        path = folder / f"{number}.png"
        Image.effect_noise((96, 64), 40 + number).convert("RGB").save(path)
        question = Message("user", (Part("image", index=0), Part("text", f"Which digit is {number}?")))
        media = (Media("image", path=str(path)),)
        records.append(Record(f"task{number}", (question,), media, Answer(str(number)), "", "test"))
    (folder / "3.png").write_bytes(b"broken")
    write_records(folder / "tasks.jsonl", records)
    with (folder / "tasks.jsonl").open("a") as file:
        file.write('{"id": "bad"}\n')
    return folder / "tasks.jsonl"


def invoke(*arguments: object, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def run(weights, tasks, tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("run") / "out"
    code, said, error = invoke("rollout", "--weights", weights, "--data", tasks, "--out", out, "-n", 2, *SMALL)
    assert code == 0, error
    return out, said


def members(out: Path):
    return [one for path in reader.step_files(out / "trajectories" / "rollout") for one in read_trajectories(path)]


def test_records_become_trajectories(run):
    out, said = run
    found = members(out)
    assert [one.record_id for one in found] == [f"task{k}" for k in (0, 1, 2, 4, 5) for _ in range(2)]
    assert len({one.id for one in found}) == 10 and all(one.end_reason is not None for one in found)
    assert all((out / "images" / f"{name}.png").is_file() for one in found for name in one.images)
    assert {"accuracy", "total"} <= set(found[0].rewards)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["records"], summary["trajectories"], summary["skipped"]) == (5, 10, 2)
    assert sum(summary["end_reasons"].values()) == 10 and summary["accuracy"]["rollout"]["n"] == 5
    assert summary["tokens"] == sum(s.end - s.start for one in found for s in one.spans if s.kind == "policy")
    assert summary["tokens_per_second"] > 0 and summary["calls"]["all"] >= summary["calls"]["ok"]
    skipped = reader.read_jsonl(out / "skipped.jsonl").rows
    assert {row["id"] for row in skipped} == {"", "task3"}
    for name in ("config.yaml", "versions.json", "sandbox.json", "manifest.json", "report.html"):
        assert (out / name).is_file(), name
    assert "6 records x 2 = 12 trajectories" in said and "end reasons:" in said and "tool calls:" in said


def test_a_killed_run_goes_on_where_it_was(run, weights, tasks, tmp_path, monkeypatch):
    out, _ = run
    arguments = ("rollout", "--weights", weights, "--data", tasks, "--out", tmp_path / "out", "-n", 2, *SMALL)
    write = rollout.RunDir.write_summary

    def killed(*args):
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout.RunDir, "write_summary", killed)
    assert invoke(*arguments)[0] != 0
    monkeypatch.undo()
    gc.collect()  # the traceback of the interrupt holds the run, which holds the lock of its folder
    assert len(members(tmp_path / "out")) == 6, "the first batch: four records, one of them broken"

    code, _, error = invoke(*arguments, "--resume", "sampling.temperature=0.5")
    assert code == 2 and "sampling was temperature=1.0, not 0.5" in error
    code, _, error = invoke(*arguments, "-n", 3, "--resume")
    assert code == 2 and "algorithm.group_size was 2, not 3" in error
    code, said, error = invoke(*arguments, "--resume")
    assert code == 0, error
    assert "3 records have their trajectories" in said
    assert [row["id"] for row in reader.read_jsonl(tmp_path / "out" / "skipped.jsonl").rows].count("task3") == 1
    for one, other in zip(members(out), members(tmp_path / "out"), strict=True):
        assert one.id == other.id and np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.logprobs, other.logprobs)
    code, said, _ = invoke(*arguments, "--resume")
    assert code == 0 and "10 of 5 records" in said, "nothing is left to do"
    code, _, error = invoke(*arguments)
    assert code == 2 and "--resume" in error


def test_bad_input_is_one_line(weights, tasks, tmp_path):
    out = tmp_path / "out"
    for arguments, says in (
        (("--weights", weights, "--data", tasks, "--protocol", "thime"), "protocol.name"),
        (("--weights", weights, "--data", tmp_path / "none.jsonl"), "none.jsonl"),
        (("--weights", tmp_path, "--data", tasks), "config.json"),
        (("--weights", weights, "--data", tasks, "rollout.slotz=3"), "rollout.slots"),
        ((tmp_path / "none.yaml", "--weights", weights, "--data", tasks), "none.yaml"),
    ):
        code, _, error = invoke("rollout", *arguments, "--out", out)
        assert code == 2 and says in error and "Traceback" not in error
    code, said, _ = invoke("rollout", "--weights", weights, "--data", tasks, "--out", out, "--check", *SMALL)
    assert code == 0 and "6 records x 4 = 24 trajectories" in said and not out.exists()


def test_a_chat_reads_its_input_from_a_pipe(weights, tasks, tmp_path):
    lines = f"What is it?\n/image {tasks.parent / '1.png'}\nAnd this?\n/save\n/quit\n"
    picture = tasks.parent / "0.png"
    code, said, error = invoke(
        "chat", "--weights", weights, "--image", picture, "--out", tmp_path, "--temperature", 0, *SMALL, stdin=lines
    )
    assert code == 0, error
    assert "sandbox:" in said and "[image_clue_0:" in said and "[image_clue_1:" in said
    assert (tmp_path / "chat_001" / "chat.jsonl").is_file() and said.count("[ended:") >= 1


def test_the_server_samples_what_the_seed_says(weights):
    pytest.importorskip("uvicorn", reason="needs the extra `serve`")
    from pyvision_jax.serving.errors import Limits
    from tests.policy_rig import Script
    from tests.serve_rig import asked, picture_url, server

    with open_policy(acting_config(None, SMALL, weights)) as acting, server(acting, Script(), Limits()) as client:
        body = asked("Which digit?", picture_url(), max_tokens=9, logprobs=True)
        one, same, other = (client.post({**body, "seed": seed})[1]["choices"][0] for seed in (1, 1, 2))
        assert one == same and one["message"]["content"] != other["message"]["content"]
        assert len(one["logprobs"]["content"]) == 9 and one["finish_reason"] == "length"
        greedy = {**body, "temperature": 0}
        values = [client.post({**greedy, "seed": seed})[1]["choices"][0]["message"]["content"] for seed in (1, 2)]
        assert values[0] == values[1]
        del body["logprobs"]
        events = client.stream({**body, "seed": 1})
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == one["message"]["content"]
        client.free()


# ------------------------------------------------------------------------------------------------------ configurations


def test_the_configuration_of_the_run_that_left_the_weights(weights, tmp_path):
    plain = acting_config(None, ["seed=3"], weights)
    assert (plain.image.min_pixels, plain.image.max_pixels) == (tiny.MIN_PIXELS, tiny.MAX_PIXELS)
    assert plain.model.path == str(weights) and plain.seed == 3

    protocol, image = ProtocolConfig(template="brief", max_calls=1), ImageConfig(max_pixels=9_999)
    rl = dataclasses.replace(RLConfig(), protocol=protocol, image=image)
    for held in (rl, SFTConfig(protocol=protocol, image=image), DemoConfig(rl=rl)):
        folder = tmp_path / type(held).__name__
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(held))
        found = acting_config(None, ["protocol.max_images=5"], folder / "model")
        assert found.protocol == dataclasses.replace(protocol, max_images=5) and found.image == image
        assert found.model.path == str(folder / "model")
        assert acting_config(folder / "config.yaml", ["model.path=x"]).model.path == "x"


def test_a_file_that_is_no_configuration(tmp_path):
    for text, says in (("a: [", "config.yaml"), ("protocl: {}", "protocl"), ("- 1", "list")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            acting_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"batch_size": 4, "sampling": {}}))
    with pytest.raises(ConfigError, match="sampling"):
        acting_config(tmp_path / "config.yaml")


def test_weights_are_held_in_the_type_of_the_computation(weights):
    config = acting_config(None, [*SMALL, "model.dtype=bfloat16"], weights)
    with open_policy(config) as acting:
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves(acting.engine._filler.params)}
    assert kinds == {"bfloat16"}
