"""Videos are flagged before a run meets them (U51)."""

from __future__ import annotations

import pytest

from pyvision_jax.data.media import MediaError
from pyvision_jax.data.records import Media
from pyvision_jax.data.video import probe_video


@pytest.mark.parametrize("data, reason", [(b"", "empty"), (b"no video at all" * 100, "decoded")])
def test_broken_videos(data, reason, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    with pytest.raises(MediaError, match=rf"clip\.mp4.*{reason}"):
        probe_video(path)
    with pytest.raises(MediaError, match=reason):
        probe_video(Media("video", data=data))


def test_a_missing_video_and_a_picture_are_named(tmp_path):
    with pytest.raises(MediaError, match="No such file"):
        probe_video(tmp_path / "gone.mp4")
    with pytest.raises(MediaError, match="expected a video"):
        probe_video(Media("image", path="a.png"))


def test_real_videos(test_data, tmp_path):
    videos = test_data("videos")
    info = probe_video(videos / "bigbuckbunny.mp4")
    assert (info.width, info.height, info.frames) == (1280, 720, 132) and info.fps == pytest.approx(25)
    assert probe_video(videos / "b.avi").frames in (150, 151)
    half = tmp_path / "half.mp4"
    half.write_bytes((videos / "bikes.mp4").read_bytes()[:200_000])
    with pytest.raises(MediaError, match=r"half\.mp4"):
        probe_video(half)
