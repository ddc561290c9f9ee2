"""How runs on one to five nodes are compared."""

from __future__ import annotations

import nodes
import pytest


def test_efficiency_is_compared_within_each_round() -> None:
    """Between the rounds the machine slowed down, which says nothing about five nodes."""
    rates = {"1": [50.0, 40.0, 48.0], "5": [240.0, 190.0, 204.0]}
    by_nodes = {number: nodes._median([{"rate": each} for each in known]) for number, known in rates.items()}
    assert (by_nodes["1"]["rate"], by_nodes["5"]["rate"]) == (48.0, 204.0)
    assert nodes.efficiency(by_nodes, "5") == pytest.approx(0.95), "of 0.96, 0.95 and 0.85"
    assert nodes.efficiency(by_nodes, "1") == 1.0
    assert nodes.efficiency({"2": {"rate": 100.0}, "4": {"rate": 180.0}}, "4") == pytest.approx(0.9)
