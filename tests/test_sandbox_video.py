"""Videos in a session: by time stamp and by index; broken ones raise in words at use and never hang (U50, U51)."""

from __future__ import annotations

import struct
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyvision_sandbox import Policy, SandboxPool

cv2 = pytest.importorskip("cv2")
pytest.importorskip("decord")
SIZE = (96, 64)
FPS = 8.0
NESTED = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def record(path: Path, frames: int, code: str = "mp4v") -> bytes:
    """A video of FPS whose frame i is one grey of about 10 i."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), FPS, SIZE)
    assert writer.isOpened()
    for i in range(frames):
        writer.write(np.full((SIZE[1], SIZE[0], 3), i * 10 % 256, np.uint8))
    writer.release()
    return path.read_bytes()


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at + 8 : at + size]
        at += size


def edit(data: bytes, change: Callable[[bytes, bytes], bytes]) -> bytes:
    """An MP4 with the content of each box that holds no boxes replaced by `change(kind, content)`."""
    out = b""
    for kind, content in boxes(data):
        content = edit(content, change) if kind in NESTED else change(kind, content)
        out += struct.pack(">I4s", len(content) + 8, kind) + content
    return out


def with_durations(data: bytes, runs: list[tuple[int, int]]) -> bytes:
    """The same frames with other durations: (frames, multiple of the first duration) in order."""

    def change(kind: bytes, content: bytes) -> bytes:
        if kind == b"edts":  # the list that cuts at the old end
            return content.replace(b"elst", b"free")
        if kind != b"stts":
            return content
        (unit,) = struct.unpack_from(">I", content, 12)
        table = [struct.pack(">II", n, unit * times) for n, times in runs]
        return struct.pack(">II", 0, len(runs)) + b"".join(table)

    return edit(data, change)


def index_first(data: bytes) -> bytes:
    """The index before the frames, as for streaming: such a file opens though its end is missing."""
    parts = dict(boxes(data))
    shift = len(parts[b"moov"]) + 8

    def change(kind: bytes, content: bytes) -> bytes:
        if kind != b"stco":
            return content
        (n,) = struct.unpack_from(">I", content, 4)
        return content[:8] + struct.pack(f">{n}I", *(o + shift for o in struct.unpack_from(f">{n}I", content, 8)))

    parts[b"moov"] = edit(parts[b"moov"], change)
    order = (b"ftyp", b"moov", *(k for k in parts if k not in (b"ftyp", b"moov")))
    return b"".join(struct.pack(">I4s", len(parts[k]) + 8, k) + parts[k] for k in order)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(Policy(profile="vision", cell_timeout=10)) as pool:
        yield pool


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("video") / "clip.mp4"
    record(path, 24)
    return path


def values(pool: SandboxPool, video: bytes | Path, code: str) -> str:
    with pool.session(videos={"video_clue_0": video}) as session:
        result = session.run(code)
    assert result.ok, result.error
    return (result.repr or "") + result.stdout


def test_what_a_video_says_of_itself(pool: SandboxPool, clip: Path):
    code = "v = video_clue_0\nlen(v), v.fps, v.duration, v.width, v.height, v.timestamps[:3].tolist()"
    assert values(pool, clip, code) == "(24, 8.0, 3.0, 96, 64, [0.0, 0.125, 0.25])"
    assert values(pool, clip.read_bytes(), "video_clue_0") == (
        "<Video video_clue_0: 24 frames, 8.00 fps, 3.00 s, 96x64>"
    )


def test_frames_by_time_and_by_index(pool: SandboxPool, clip: Path):
    """A frame is seen from its own time stamp to the next one's."""
    code = (
        "def shade(x): return round(float(np.asarray(x).mean()), -1)\nv = video_clue_0\n"
        "[shade(x) for x in (v.frame(3), v[3], v[-1], v.frame_at(0.375), v.frame_at(0.49), v.frame_at(0.5),"
        " v.frame_at(1/8),"
        " *v.frames_at([0, 1.0]), *v.frames([2, 1]), *v[4:8:2], *v.get_batch([5]).asnumpy())]"
    )
    assert values(pool, clip, code) == str([float(x * 10) for x in (3, 3, 23, 3, 3, 4, 1, 0, 8, 2, 1, 4, 6, 5)])
    with pool.session(videos={"video_clue_0": clip}) as session:
        for code in ("video_clue_0.frame_at(1.0)", "video_clue_0[8]", "display(*video_clue_0.frames_at([1.0]))"):
            result = session.run(code)
            assert [i.shape for i in result.images] == [(64, 96, 3)], (code, result.error)
            assert abs(float(result.images[0].mean()) - 80) < 5
        assert session.run("type(video_clue_0[0]).__mro__[1].__name__, video_clue_0[0].dtype.name").repr == (
            "('ndarray', 'uint8')"
        )


def test_more_frames_asked_than_there_are(pool: SandboxPool, clip: Path):
    """U50."""
    with pool.session(videos={"video_clue_0": clip}) as session:
        result = session.run("len(video_clue_0.sample(32)), len(video_clue_0.sample(4))")
        assert result.repr == "(24, 4)" and result.stdout == "[video_clue_0 has 24 frames; 32 were asked for]\n"
        result = session.run("len(video_clue_0.frames(range(32)))")
        assert result.repr == "32" and "has 24 frames (0 to 23)" in result.stdout
        result = session.run("video_clue_0.frame_at(99)")
        assert len(result.images) == 1 and "lasts 3.00 s" in result.stdout
        result = session.run("video_clue_0[24]")
        assert result.error is not None and result.error["name"] == "IndexError"
        assert result.error["message"] == "video_clue_0 has 24 frames (0 to 23), there is no frame 24"
        assert session.run("sum(1 for _ in video_clue_0)").repr == "24"


def test_one_frame(pool: SandboxPool, tmp_path: Path):
    code = "v = video_clue_0\nlen(v), v.duration, len(v.sample(8)), v.frame_at(0).size, v.frame_at(5).size, v[-1].shape"
    expected = "(1, 0.125, 1, (96, 64), (96, 64), (64, 96, 3))"
    assert values(pool, record(tmp_path / "one.mp4", 1), code).startswith(expected)


def test_a_variable_rate_goes_by_time_stamps(pool: SandboxPool, clip: Path):
    """12 frames at 8 Hz, 6 at 2 Hz, 6 at 8 Hz: 5.25 s. By index / rate the middle would be frame 12."""
    video = with_durations(clip.read_bytes(), [(12, 1), (6, 4), (6, 1)])
    code = "v = video_clue_0\nlen(v), v.duration, v.timestamps[[12, 13, 18, 23]].tolist(), "
    code += "[v.index_at(t) for t in (1.4, 1.9, 2, 4.4, 4.5, 5.2)]"
    assert values(pool, video, code) == "(24, 5.25, [1.5, 2.0, 4.5, 5.125], [11, 12, 13, 17, 18, 23])"
    code = "[round(float(np.asarray(f).mean()), -1) for f in video_clue_0.frames_at([1.9, 4.4])]"
    assert values(pool, video, code) == "[120.0, 170.0]"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("zero bytes", "the file is empty (0 bytes)"),
        ("no video", "it is no video, or it is cut off"),
        ("cut in half", "it is no video, or it is cut off and has lost its index"),
        ("cut after its index", "it is cut off or damaged"),
        ("audio only", "it holds no video stream"),
    ],
)
def test_a_broken_video_is_told_at_use(pool: SandboxPool, clip: Path, tmp_path: Path, kind: str, reason: str):
    """U51."""
    data = clip.read_bytes()
    if kind == "audio only":
        with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(bytes(16000))
        broken = (tmp_path / "a.wav").read_bytes()
    else:
        streamed = index_first(data)
        broken = {
            "zero bytes": b"", "no video": b"hello" * 500, "cut in half": data[: len(data) // 2],
            "cut after its index": streamed[: len(streamed) - 600],
        }[kind]  # fmt: skip
    with pool.session(videos={"video_clue_0": broken}) as session:
        for code in ("len(video_clue_0)", "video_clue_0.frame_at(0)", "video_clue_0.fps", "video_clue_0[0]"):
            result = session.run(code)
            assert result.status == "error" and result.error is not None, (code, result)
            assert result.error["name"] == "VideoError"
            assert result.error["message"].startswith(f"video_clue_0 cannot be read: {reason}")
            assert result.stderr == "" and result.usage.wall_s < 5
        assert (session.run("video_clue_0").repr or "").startswith("<Video video_clue_0 cannot be read")
        assert session.run("'the session goes on'").ok


def test_a_header_that_promises_more_frames(pool: SandboxPool, tmp_path: Path, test_data: Callable[[str], Path]):
    data = bytearray(record(tmp_path / "v.avi", 30, "MJPG"))
    struct.pack_into("<I", data, data.index(b"avih") + 8 + 16, 45)
    struct.pack_into("<I", data, data.index(b"strh") + 8 + 32, 45)
    assert values(pool, bytes(data), "len(video_clue_0), video_clue_0.frame(29).size") == "(30, (96, 64))"
    real = test_data("videos") / "b.avi"  # 151 in its header
    assert values(pool, real, "v = video_clue_0\nlen(v), v[149].shape, v.frame_at(v.duration).size").startswith(
        "(150, (270, 480, 3), (480, 270))"
    )


def test_damage_inside_is_told_for_the_frame(pool: SandboxPool, tmp_path: Path):
    data = record(tmp_path / "v.avi", 30, "MJPG")
    with pool.session(videos={"video_clue_0": data[: len(data) // 2]}) as session:
        n = int(session.run("len(video_clue_0)").repr or 0)
        assert 0 < n < 30
        for i in range(n):  # how near to the damage frames can be had depends on how far decord has read ahead
            result = session.run(f"video_clue_0.frame({i}).size")
            if result.repr != "(96, 64)":
                assert result.error is not None and result.error["name"] == "VideoError"
                assert "cannot be decoded, the file is cut off or damaged" in result.error["message"]
        assert result.status == "error" and session.run("len(video_clue_0)").repr == str(n)


def test_names_of_decord_work(pool: SandboxPool, clip: Path):
    with pool.session(videos={"video_clue_0": clip}) as session:
        for code in (
            "video_clue_0[3].asnumpy().shape == (64, 96, 3)",
            "video_clue_0.get_batch(np.linspace(0, 23, 4).astype(int)).asnumpy().shape == (4, 64, 96, 3)",
            "video_clue_0.get_avg_fps() == 8.0",
            "video_clue_0.get_frame_timestamp(2).tolist() == [0.25, 0.375]",
            "video_clue_0.get_key_indices()[0] == 0",
            "v = video_clue_0; v.seek(5); [int(f.mean().round(-1)) for f in (v.next(), next(v))] == [50, 60]",
            "len(VideoReader(video_clue_0, ctx=cpu(0))) == len(VideoReader('video_clue_0.mp4')) == 24",
            "import decord; len(decord.VideoReader('video_clue_0.mp4')) == 24",
            "import cv2; cv2.VideoCapture('video_clue_0.mp4').read()[1].shape == (64, 96, 3)",
        ):
            result = session.run(code)
            assert result.repr == "True", (code, result)


def test_a_branch_reads_on(pool: SandboxPool, clip: Path):
    """A reader has a thread, which no fork survives: it is closed before, and opens again in both."""
    with pool.session(videos={"video_clue_0": clip}) as session:
        session.run("video_clue_0.seek(5); first = video_clue_0.next()")
        with session.branch() as twin:
            assert not twin.replayed or pool.report.level != "namespaces"
            for each in (twin, session):
                assert each.run("int(video_clue_0.next().mean().round(-1)), len(video_clue_0)").repr == "(60, 24)"


def test_frames_beyond_the_memory_limit(clip: Path):
    with (
        SandboxPool(Policy(profile="vision", memory_mb=200)) as pool,
        pool.session(videos={"video_clue_0": clip}) as session,
    ):
        result = session.run("video_clue_0.get_batch([1] * 100_000)")
        assert result.status == "memory" and result.error is not None, result
        assert "100000 frames of 96x64 do not fit into the memory limit" in result.error["message"]
        assert session.run("len(video_clue_0)").repr == "24"


def test_a_video_larger_than_the_files_of_a_session(clip: Path):
    with (
        SandboxPool(Policy(profile="vision", tmp_mb=2)) as pool,
        pool.session(videos={"a": clip.read_bytes() + bytes(4 << 20), "b": clip}) as session,
    ):
        result = session.run("len(a)")
        assert result.error is not None and "do not fit into the files of a session" in result.error["message"]
        assert session.run("len(b)").repr == "24"


def test_a_video_without_decord(clip: Path):
    with SandboxPool(Policy(profile="numpy_pil")) as pool, pool.session(videos={"video_clue_0": clip}) as session:
        result = session.run("import sys; sys.modules['decord'] = None\nlen(video_clue_0)")
        assert result.error is not None and "decord is not installed" in result.error["message"]


def test_real_videos(pool: SandboxPool, test_data: Callable[[str], Path]):
    videos = test_data("videos")
    code = (
        "v = video_clue_0\nlen(v), (v.width, v.height), round(v.duration, 2), v.frame_at(2.0).size, v.sample(8)[7].size"
    )
    for name, expected in (
        ("bikes.mp4", "(250, (640, 272), 10.0, (640, 272), (640, 272))"),
        ("carphone_pristine.mp4", "(120, (176, 144), 4.0, (176, 144), (176, 144))"),
        ("world.mp4", "(901, (480, 270), 30.03, (480, 270), (480, 270))"),
    ):
        assert values(pool, videos / name, code) == expected
