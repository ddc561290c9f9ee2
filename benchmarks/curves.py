"""Drawing that several benchmarks share."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from lockstep.evaluation.statistics import bootstrap_interval, smooth

_POINTS = 80
"""Points of a drawn curve."""


def draw_band(
    axes: Axes, samples: np.ndarray, curves: np.ndarray, *, color: str, label: str, linestyle: str = "-"
) -> None:
    """Draw the mean over seeds with its 95% bootstrap interval, each curve smoothed over a twelfth of its length.

    Args:
        samples: [I]
        curves: [seeds, I]
    """
    chosen = np.linspace(0, len(samples) - 1, min(_POINTS, len(samples))).round().astype(int)
    smoothed = np.stack([smooth(curve, len(curve) // 12) for curve in curves])[:, chosen]
    band = np.array([bootstrap_interval(scores, resamples=1000) for scores in smoothed.T])
    axes.plot(samples[chosen], smoothed.mean(axis=0), color=color, label=label, linewidth=1.8, linestyle=linestyle)
    axes.fill_between(samples[chosen], band[:, 0], band[:, 1], color=color, alpha=0.15, linewidth=0)
