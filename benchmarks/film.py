"""A moving picture of an agent at several points of its training, beside its learning curve.

python benchmarks/film.py RUN docs/img/breakout.webp --checkpoints 10 100 488

RUN must have kept these checkpoints (--keep-checkpoints), and its environment must draw itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from lockstep.config.options import EvaluationSettings
from lockstep.evaluation.policy import Player, load_policy
from lockstep.evaluation.video import prepare_graphics
from lockstep.reports.plots import COLORS, STYLE
from lockstep.run.folder import RunFolder
from lockstep.system.numerics import torch_configured

HEIGHT = 360
"""Of the picture, in pixels."""
PACE = 4
"""Environment steps between two pictures that are shown."""
FPS = 15


def played(run: Path, checkpoint: int, pictures: int) -> Iterator[np.ndarray]:
    """Pictures [H, W, 3] of a policy at play."""
    policy = load_policy(run, checkpoint)
    experiment = policy.experiment
    player = Player(policy.model, experiment, EvaluationSettings(num_envs=1), purpose="video", render=True)
    try:
        with torch_configured(experiment.torch_threads):
            for index in range(pictures * PACE):
                player.step()
                if index % PACE == 0:
                    yield player.env.render()
    finally:
        player.close()


def curve(samples: np.ndarray, scores: np.ndarray, until: int, caption: str) -> Image.Image:
    """The learning curve up to a number of samples, with a dot at its end."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(HEIGHT * 1.3 / 100, HEIGHT / 100), dpi=100, layout="constrained")
        axes = figure.subplots()
        done = samples <= until
        axes.plot(samples, scores, color="#D8D8D8", linewidth=1.5)
        axes.plot(samples[done], scores[done], color=COLORS[0], linewidth=2.5)
        axes.plot(samples[done][-1:], scores[done][-1:], "o", color=COLORS[0], markersize=8)
        axes.set(xlabel="samples", ylabel="score, mean of 100 episodes", title=caption, xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="a file that ends in .webp or .gif")
    parser.add_argument("--checkpoints", type=int, nargs="+", required=True, help="iterations")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each checkpoint")
    arguments = parser.parse_args()
    folder = RunFolder.open(arguments.run)
    prepare_graphics(folder.experiment().env)
    rows = [row for row in folder.records() if row.get("score/mean") is not None]
    samples, scores = (np.array([row[name] for row in rows], dtype=float) for name in ("samples", "score/mean"))
    pictures = []
    for checkpoint in arguments.checkpoints:
        until = checkpoint * folder.experiment().samples_per_iteration
        side = curve(samples, scores, until, f"after {until:,} steps")
        for picture in played(arguments.run, checkpoint, round(arguments.seconds * FPS)):
            game = Image.fromarray(picture)
            game = game.resize((round(game.width * HEIGHT / game.height), HEIGHT), Image.Resampling.NEAREST)
            frame = Image.new("RGB", (game.width + side.width, HEIGHT), "white")
            frame.paste(game, (0, 0))
            frame.paste(side, (game.width, 0))
            pictures.append(frame)
    options = {"quality": 60, "method": 4} if arguments.out.suffix == ".webp" else {"optimize": True}
    pictures[0].save(
        arguments.out, save_all=True, append_images=pictures[1:], duration=round(1000 / FPS), loop=0, **options
    )
    print(f"{arguments.out}: {len(pictures)} pictures, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
