"""The run report: complete, whole, self-contained, and made from partial runs too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_fixture import decode, make_run, trajectory

from pyvision_jax import report
from pyvision_jax.recipes.run_dir import RunDir
from pyvision_jax.report import cards, figures, numbers, reader

VOID = {"meta", "link", "img", "br", "hr", "input", "col", "wbr"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers ids, links, pictures and the text of each section."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.sections: dict[str, str] = {}
        self._section = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        self.tags.append(tag)
        if held.get("id"):
            self.ids.append(held["id"] or "")
        if tag == "section":
            self._section = held.get("id") or held.get("aria-label") or ""
        self.links += [value or "" for name, value in attrs if name in ("href", "xlink:href")]
        self.sources += [value or "" for name, value in attrs if name == "src"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.sections[self._section] = self.sections.get(self._section, "") + data


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "demo"
    make_run(path)
    return path


@pytest.fixture(scope="module")
def page(run_path: Path) -> Page:
    return Page(report.build(run_path).read_text(encoding="utf-8"))


def test_page_is_whole_and_alone(page: Page, run_path: Path):
    assert len(page.ids) == len(set(page.ids))
    inner = [link for link in page.links if link.startswith("#")]
    assert inner and {link[1:] for link in inner} <= set(page.ids)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not {"script", "iframe", "object"} & set(page.tags)
    text = (run_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text and "var(--s1)" in text
    assert not any(color in text for color in (figures.INK, figures.GRID, *figures.SERIES))


def test_accuracy_controls_and_chance(page: Page):
    text = page.sections["accuracy"]
    for said in ("After SFT", "30.0 %", "25.0 % to 36.0 %", "59.0 %", "After RL", "57.0 % to 69.0 %", "256"):
        assert said in text, said
    for said in ("Tool switched off", "+3.3 points", "Wrong picture", "16.7 %", "+33.0 points", "+26.0 to +40.0"):
        assert said in text, said
    assert "photographs: unseen" in text


def test_training_sections(page: Page):
    sft, rl = page.sections["phase-1"], page.sections["phase-2"]
    assert "Training: sft" in sft and "Loss" in sft
    for said in ("Reward", "Successful tool calls", "Response length", "Entropy", "Sampler/trainer gap"):
        assert said in rl, said
    for said in ("zero_variance", "image_mismatch", "answered", "over_turns", "update_actor", "timing_s/gen"):
        assert said in rl, said
    assert "119.0 s" in page.sections["time"]
    assert "truncated JPEG: <half> a file" in page.sections["skipped"]
    for said in ("group_size: 4", "jax", "rlimits", "photographs"):
        assert said in page.sections["made-of"], said


def test_trajectories_are_a_mix(run_path: Path, page: Page):
    run = reader.read_run(run_path)
    chosen = cards.choose(run, 12)
    assert len(chosen) == 12
    kinds = {((numbers.accuracy_of(row) or 0) > 0.5, row["calls"] > 0) for row in chosen}
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
    assert any(row["phase"] == "eval_rl" for row in chosen) and any(row["step"] < 8 for row in chosen)
    assert chosen == cards.choose(reader.read_run(run_path), 12)
    assert [id for id in page.ids if re.fullmatch(r"t\d+", id)] == [f"t{place}" for place in range(1, 13)]
    text = page.sections["trajectories"]
    for said in (
        "observation, turn 1",
        "crop = image_clue_0.crop",
        "7 < 8",
        "Traceback: name 'x'",
        "tool_bonus",
        "siblings",
    ):
        assert said in text, said
    assert "advantage" in text and "dropped: zero_variance" in text
    assert "<|im_end|>" in text and "<|image_pad|>" not in text  # placeholders became pictures


def test_pictures_stand_where_the_policy_saw_them(run_path: Path):
    run = reader.read_run(run_path)
    row = next(row for row in run.index if row["images"] == 2)
    card = cards.card(run, row, 1, {})
    prompt = card["spans"][0]["pieces"]
    assert [sorted(piece) for piece in prompt] == [["text"], ["picture"], ["text"]]
    assert prompt[1]["picture"]["size"] == (84, 84) and prompt[1]["picture"]["grid"] == (1, 6, 6)
    assert card["rest"] == [] and card["calls"][0]["pictures"][0]["uri"]


@pytest.mark.parametrize(
    "left", [(), ("metrics.jsonl",), ("trajectories",), ("config.yaml", "versions.json", "metrics.jsonl")]
)
def test_partial_runs_still_make_a_report(tmp_path: Path, left: tuple[str, ...]):
    make_run(tmp_path / "run", steps=2, summary=False)
    for name in {"metrics.jsonl", "trajectories", "config.yaml", "versions.json", "images", "run.json"} - set(left):
        target = tmp_path / "run" / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    page = Page(report.build(tmp_path / "run").read_text(encoding="utf-8"))
    text = page.sections["Notices"]
    assert "summary.json is missing" in text
    assert ("metrics.jsonl is missing" in text) == ("metrics.jsonl" not in left)
    assert ("trajectories/ is missing" in text) == ("trajectories" not in left)
    assert "No final evaluation" in page.sections["accuracy"]


def test_empty_and_absent_directories(tmp_path: Path):
    Page(report.build(tmp_path).read_text(encoding="utf-8"))
    with pytest.raises(FileNotFoundError, match="no run directory"):
        report.build(tmp_path / "none")


def test_lines_cut_by_a_crash_and_lost_pictures(tmp_path: Path):
    make_run(tmp_path, steps=2, summary=False)
    step = tmp_path / "trajectories" / "rl" / "step_0001.jsonl"
    step.with_suffix(".idx").unlink()
    step.write_bytes(step.read_bytes()[:-40])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 2, "cri')
    picture = next((tmp_path / "images").glob("*.png"))
    picture.write_bytes(picture.read_bytes()[:50])
    (tmp_path / "summary.json").write_text("{")
    page = Page(report.build(tmp_path).read_text(encoding="utf-8"))
    assert "2 broken line(s)" in page.sections["Notices"]
    assert "summary.json cannot be read" in page.sections["Notices"]
    assert len(reader.read_run(tmp_path).index) == 23


def test_hostile_text_stays_text(tmp_path: Path):
    rng = np.random.default_rng(0)
    bad = trajectory("</details><script>alert(1)</script>", "g", right=True, called=True, rng=rng)
    bad.calls[0].result["stdout"] = "half a pair \ud800 and \x00 and <img src=x>"
    bad.answer = "<b>7</b>"
    bad.rewards["nan"] = float("nan")
    bad.images[1] = "../../secret"
    run = RunDir(tmp_path)
    with run.trajectories(lambda ids: "<script>" + decode(ids)) as writer:
        writer.write("rl", 0, [bad])
    page = Page(report.build(tmp_path).read_text(encoding="utf-8"))
    assert "script" not in page.tags and "img" not in page.tags
    assert "<img src=x>" in page.sections["trajectories"] and "picture not stored" in page.sections["trajectories"]


def test_stages_in_sub_directories(tmp_path: Path):
    make_run(tmp_path / "demo" / "rl", steps=2, summary=False)
    RunDir(tmp_path / "demo").write_summary({"accuracy": {"rl": {"mean": 0.5}}, "seconds": {"rl": 3}})
    page = Page(report.build(tmp_path / "demo").read_text(encoding="utf-8"))
    assert "config.yaml of rl" in page.sections["made-of"] and "50.0 %" in page.sections["accuracy"]
    assert page.sources


def test_tool_collapse_is_told(tmp_path: Path):
    run = RunDir(tmp_path)
    with run.metrics("rl", tensorboard=False) as metrics:
        for step in range(30):
            metrics.write(step, {"tool_call_counts/mean": 1.2 if step < 15 else 0.1, "end_reason/infrastructure": 1})
    page = Page(report.build(tmp_path).read_text(encoding="utf-8"))
    assert "tool calls fell from 1.20 to 0.10" in page.sections["Notices"]
    assert "lost to infrastructure" in page.sections["Notices"]


def test_large_pictures_are_scaled_down(tmp_path: Path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (1300, 100), "red").save(tmp_path / "images" / "ab.png")
    run = reader.read_run(tmp_path)
    shown = cards._encode(run, "ab")
    assert shown["size"] == (1300, 100) and len(shown["uri"]) < 20_000


def test_chromium_shows_the_page(run_path: Path, page: Page, tmp_path: Path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed")
    shot = tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--window-size=1200,3000",
        f"--user-data-dir={tmp_path / 'u'}",
    ]
    url = (run_path / "report.html").as_uri()
    subprocess.run(
        [browser, *flags, f"--screenshot={shot}", url],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )
    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert pixels.shape[1] == 1200
    assert (pixels.min(axis=(1, 2)) < 128).sum() > 300  # rows with dark text or lines, down the page
    assert len(np.unique(pixels.astype(np.int32) @ (1, 256, 65536))) > 50


def test_report_needs_no_jax():
    found = "{name.split('.')[0] for name in sys.modules} & {'jax', 'flax', 'torch'}"
    code = f"import sys, pyvision_jax.report.page; sys.exit(bool({found}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
