"""Drawing that several benchmarks share."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from lockstep.evaluation.statistics import bootstrap_interval, smooth, thinned

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
    smooth_curves = [thinned((samples, smooth(curve, len(curve) // 12)), _POINTS) for curve in curves]
    drawn, smoothed = smooth_curves[0][0], np.stack([y for _, y in smooth_curves])
    band = np.array([bootstrap_interval(scores, resamples=1000) for scores in smoothed.T])
    axes.plot(drawn, smoothed.mean(axis=0), color=color, label=label, linewidth=1.8, linestyle=linestyle)
    axes.fill_between(drawn, band[:, 0], band[:, 1], color=color, alpha=0.15, linewidth=0)
