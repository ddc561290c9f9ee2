from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from lockstep.config.settings import SettingsError
from lockstep.envs.settings import EnvConfig
from lockstep.evaluation.video import fit, prepare_graphics, write_mp4


def read(path: Path) -> tuple[str, np.ndarray]:
    """ffmpeg's description of a video, and its pictures [N, H, W, 3]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    description = done.stderr.decode()
    size = re.search(r"Video: .*? (\d\d+)x(\d+)", description)
    assert size is not None
    return description, np.frombuffer(done.stdout, np.uint8).reshape(-1, int(size[2]), int(size[1]), 3)


def test_fit_magnifies_by_whole_numbers_and_makes_sides_even() -> None:
    picture = np.arange(210 * 160 * 3, dtype=np.uint32).astype(np.uint8).reshape(210, 160, 3)
    large = fit(picture)
    assert large.shape == (630, 480, 3)
    np.testing.assert_array_equal(large[1::3, 1::3], picture)
    assert fit(np.zeros((400, 600, 3), np.uint8)).shape == (400, 600, 3)
    odd = fit(np.full((401, 643, 3), 7, np.uint8))
    assert odd.shape == (402, 644, 3) and (odd == 7).all()


@pytest.mark.parametrize("fps", [15, 30])
def test_video_shows_the_pictures_it_was_given(tmp_path: Path, fps: int) -> None:
    pictures = [np.full((40, 61, 3), shade, np.uint8) for shade in (10, 120, 240, 60)]
    write_mp4(tmp_path / "new" / "a.mp4", iter(pictures), fps)
    description, shown = read(tmp_path / "new" / "a.mp4")
    assert "Video: h264" in description and "yuv420p" in description and f" {fps} fps" in description
    assert shown.shape == (4, 400, 610, 3)
    for picture, given in zip(shown, pictures, strict=True):
        assert abs(picture.mean() - given.mean()) < 6
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.mp4"]


def test_pictures_that_change_their_size_are_fitted_into_the_first(tmp_path: Path) -> None:
    shades = [(40, 61, 10), (80, 61, 240), (400, 100, 120), (90, 900, 60), (40, 61, 200)]
    pictures = [np.full((height, width, 3), shade, np.uint8) for height, width, shade in shades]
    write_mp4(tmp_path / "a.mp4", iter(pictures), 30)
    _, shown = read(tmp_path / "a.mp4")
    assert shown.shape == (5, 400, 610, 3), "one for each, none garbled"
    for picture, (*_, shade) in zip(shown, shades, strict=True):
        assert abs(int(picture[200, 305, 1]) - shade) < 8
    assert shown[2, 200, 100].max() < 16, "beside a narrow one it is black"
    fitted = fit(np.arange(4, dtype=np.uint8).reshape(2, 2, 1).repeat(3, -1), (8, 4))
    assert fitted[..., 0].tolist() == [[0] * 4] * 2 + [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2 + [[0] * 4] * 2


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(SettingsError, match=r"Cannot write /proc/a\.mp4"):
        write_mp4(Path("/proc/a.mp4"), iter([np.zeros((4, 4, 3), np.uint8)] * 3), 30)


def test_a_failing_environment_leaves_no_file(tmp_path: Path) -> None:
    def pictures() -> Iterator[np.ndarray]:
        yield np.zeros((32, 32, 3), np.uint8)
        raise RuntimeError("the emulator crashed")

    with pytest.raises(RuntimeError, match="emulator"):
        write_mp4(tmp_path / "a.mp4", pictures(), 30)
    assert not list(tmp_path.iterdir())


@pytest.mark.envpool
def test_a_missing_graphics_driver_is_explained_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(SettingsError, match=r"HalfCheetah-v4 .*: libEGL.*apt-get install libegl1"):
        prepare_graphics(EnvConfig(id="HalfCheetah-v4", adapter="envpool"))
    prepare_graphics(EnvConfig(id="Breakout", adapter="envpool"))
    prepare_graphics(EnvConfig(id="CartPole-v1", adapter="gymnasium"))


@pytest.mark.parametrize("display", ["", ":0"])
def test_drawing_off_screen_is_asked_for_where_there_is_no_display(
    monkeypatch: pytest.MonkeyPatch, display: str
) -> None:
    environment = {"DISPLAY": display, "SDL_VIDEODRIVER": "x11"}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "environ", environment)
    prepare_graphics(EnvConfig(adapter="gymnasium"))
    assert environment["SDL_VIDEODRIVER"] == "x11"
    assert environment.get("MUJOCO_GL") == (None if display else "egl")
