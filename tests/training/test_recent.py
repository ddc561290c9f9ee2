from __future__ import annotations

import math

import pytest

from lockstep.core.rollout import Episode
from lockstep.training.recent import RecentEpisodes, RecentNumbers


def test_means_cover_the_last_episodes() -> None:
    recent = RecentEpisodes(3, ("height", "success"))
    assert recent.score is None and recent.length is None and not recent.reported
    recent.add([Episode(9.0, 9, (1.0, 1.0)), Episode(1.0, 4, (math.nan, 0.0))])
    assert (recent.score, recent.length, recent.reported) == (5.0, 6.5, {"height": 1.0, "success": 0.5})
    recent.add([Episode(2.0, 5, (math.nan, 1.0)), Episode(6.0, 6, (math.nan, math.inf))])
    assert len(recent) == 3 and [episode.score for episode in recent] == [1.0, 2.0, 6.0]
    assert (recent.score, recent.length) == (3.0, 5.0)
    assert list(recent.reported) == ["success"], "none of the three reported a height"
    assert math.isnan(recent.reported["success"])
    before = recent.reported
    recent.add([])
    assert recent.reported is before, "nothing is computed where no episode ended"


def test_sums_cover_the_last_iterations() -> None:
    recent = RecentNumbers(2)
    assert len(recent) == 0
    assert recent.add({"samples": 8, "env": 0.5}) == {"samples": 8, "env": 0.5}
    assert recent.add({"samples": 2, "env": 0.25}) == {"samples": 10, "env": 0.75}
    assert recent.add({"samples": 1, "env": 1.0}) == pytest.approx({"samples": 3, "env": 1.25})
    assert len(recent) == 2
