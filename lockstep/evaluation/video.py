"""Videos of a trained policy."""

from __future__ import annotations

import ctypes
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import imageio_ffmpeg
import numpy as np

from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError
from lockstep.envs import EnvConfig, adapter_of
from lockstep.envs.construct import needs_library
from lockstep.evaluation.policy import Player, load_policy
from lockstep.run.files import writing
from lockstep.run.folder import RunFolder
from lockstep.system.numerics import torch_configured

_SIZE = 640
"""Small images are magnified by a whole number while both sides stay within this many pixels."""

_ADVICE = (
    "On a machine without a display, MuJoCo needs an off-screen driver: install libegl1 (apt-get install libegl1), or "
    "for gymnasium's tasks install libosmesa6 and set MUJOCO_GL=osmesa."
)


def record_video(
    run: Path | str,
    out: Path | str,
    *,
    episodes: int = 1,
    greedy: bool = False,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    max_steps: int = 10_000,
    fps: int | None = None,
) -> Path:
    """Play episodes with a run's policy and write them as an H.264 video, one frame per environment step.

    Without a DISPLAY, sets MUJOCO_GL and SDL_VIDEODRIVER for this process, unless they are set.

    Args:
        run: folder of the run.
        out: file to write, ending in .mp4; it appears when the video is complete.
        episodes: how many to show.
        greedy: take the most likely action; otherwise sample actions, as in training.
        checkpoint: latest (also None), best, or an iteration.
        seed: the seed of the environment and of action noise; None takes the experiment's.
        max_steps: environment steps after which the video ends, even within an episode.
        fps: frames per second; None plays Atari in real time (15, at 4 frames per step), and others at 30.

    Returns:
        The path written.

    Raises:
        SettingsError: the run or checkpoint does not exist, a number is out of range, or the environment cannot render.
    """
    out = Path(out)
    if out.suffix.lower() != ".mp4" or out.is_dir():
        raise SettingsError(f"Cannot write a video to {out}. Name a file that ends in .mp4.")
    for name, value in (("episodes", episodes), ("max-steps", max_steps)):
        if value < 1:
            raise SettingsError(f"--{name} {value} is out of range: it must be at least 1.")
    if fps is not None and not 1 <= fps <= 240:
        raise SettingsError(f"--fps {fps} is out of range: it must be from 1 to 240.")
    prepare_graphics(RunFolder.open(run).experiment().env)
    policy = load_policy(run, checkpoint)
    experiment = policy.experiment
    player = Player(
        policy.model,
        experiment,
        EvaluationSettings(greedy=greedy, seed=seed, num_envs=1),
        purpose="video",
        kernels=policy.kernels,
        render=True,
    )
    try:
        frames_per_step = player.env.frames_per_step
        default = round(60 / frames_per_step) if frames_per_step > 1 else 30
        with torch_configured(experiment.torch_threads):
            write_mp4(out, _pictures(player, experiment.env.id, episodes, max_steps), fps or default)
    finally:
        player.close()
    return out


def prepare_graphics(env: EnvConfig) -> None:
    """Let MuJoCo and SDL render without a display. They read these settings when they are first imported."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        # EnvPool's MuJoCo uses EGL without loading it, and ends the process if nobody else has loaded it.
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if adapter_of(env).needs_egl(env.id):
            raise SettingsError(f"{env.id} cannot be drawn: {error}. {_ADVICE}") from error


def _pictures(player: Player, env_id: str, episodes: int, max_steps: int) -> Iterator[np.ndarray]:
    yield _picture(player, env_id)
    for _ in range(max_steps):
        step = player.step()
        yield _picture(player, env_id)
        episodes -= int(step.terminated[0] or step.truncated[0])
        if not episodes:
            return


def _picture(player: Player, env_id: str) -> np.ndarray:
    try:
        return player.env.render()
    except SettingsError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise needs_library(env_id, error) from error
    except Exception as error:  # a graphics library or the environment may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        files = [frame.filename for frame in frames[1:]]
        graphics = re.search("mujoco|opengl|egl|osmesa|glfw|glx|graphics|display", f"{files} {error!r}", re.IGNORECASE)
        where = f"It was raised in {frames[-1].filename}, line {frames[-1].lineno}."
        raise SettingsError(
            f"The environment could not render an image: {type(error).__name__}: {error}. "
            f"{_ADVICE if graphics else where}"
        ) from error


def write_mp4(out: Path, pictures: Iterator[np.ndarray], fps: int) -> None:
    """Encode images, uint8 [H, W, 3], as H.264 in an MP4 file that every player supports. The first image sets the
    size, and the others are fitted to it."""
    first = fit(next(pictures))
    partial = out.with_name(f".{out.stem}.partial.mp4")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()  # ffmpeg would not say why it cannot
    height, width, _ = first.shape
    writer = imageio_ffmpeg.write_frames(
        str(partial), (width, height), fps=fps, codec="libx264", quality=8, macro_block_size=2, ffmpeg_log_level="error"
    )
    try:
        writer.send(None)
        writer.send(first)
        for picture in pictures:
            writer.send(fit(picture, (height, width)))
        writer.close()
        with writing(out):
            os.replace(partial, out)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def fit(picture: np.ndarray, size: tuple[int, int] | None = None) -> np.ndarray:
    """Magnify a small image [H, W, 3] by repeating pixels, and make both sides even, as H.264's chroma requires.

    Args:
        size: the target size. Other images are resized, with black borders.
    """
    fitted = _magnified(picture)
    return fitted if size in (None, fitted.shape[:2]) else _within(picture, size)


def _magnified(picture: np.ndarray) -> np.ndarray:
    factor = max(1, _SIZE // max(picture.shape[:2]))
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _within(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image, scaled to fit with its proportions and centered on black."""
    height, width = picture.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    h, w = max(1, int(height * scale)), max(1, int(width * scale))
    rows, columns = np.arange(h) * height // h, np.arange(w) * width // w
    out = np.zeros((*size, 3), np.uint8)
    top, left = (size[0] - h) // 2, (size[1] - w) // 2
    out[top : top + h, left : left + w] = picture[rows[:, None], columns]
    return out
