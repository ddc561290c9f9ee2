"""How good a return in MPE's simple_speaker_listener can be: python benchmarks/listener.py

A listener that knows the goal from the second step on, when the first word has arrived, plays against its own physics.
In the first step it goes to the middle of the landmarks. A beam search plans its way in some matches, and a simple
rule plays many. The mean of the rule plus the mean gain of the plans estimates the mean of plans with little noise.
"""

from __future__ import annotations

import json

import numpy as np

STEP, KEPT, PUSH, LENGTH = 0.1, 0.75, 0.5, 25
"""Seconds of a step, the part of a velocity that a step keeps, what an action adds to it, and steps of a match."""
PUSHES = PUSH * np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
MATCHES, PLANNED, BEAM = 100_000, 300, 600


def move(place: np.ndarray, velocity: np.ndarray, push: np.ndarray, *, former: bool) -> tuple[np.ndarray, np.ndarray]:
    """A step of the world, [M, 2] each; `former` is the original MPE's order."""
    if former:
        velocity = KEPT * velocity + push
        return place + STEP * velocity, velocity
    return place + STEP * velocity, KEPT * velocity + push


def stop(place: np.ndarray, velocity: np.ndarray, *, former: bool) -> np.ndarray:
    """Where a body comes to rest if nothing pushes it: [M, 2]"""
    return place + STEP * velocity * (KEPT if former else 1.0) / (1 - KEPT)


def begin(matches: int, draw: np.random.Generator, *, former: bool) -> tuple[np.ndarray, np.ndarray]:
    """The listener after its first step, as seen from the goal: places and velocities [M, 2]"""
    bodies = draw.uniform(-1, 1, (matches, 4, 2))  # the listener, the goal and two other landmarks
    away = bodies[:, 1:].mean(1) - bodies[:, 0]
    axis = np.abs(away).argmax(1)
    push = np.zeros((matches, 2))
    push[np.arange(matches), axis] = PUSH * np.sign(away[np.arange(matches), axis])
    return move(bodies[:, 0] - bodies[:, 1], np.zeros((matches, 2)), push, former=former)


def cost(place: np.ndarray) -> np.ndarray:
    return np.square(place).sum(-1)


def follow(place: np.ndarray, velocity: np.ndarray, *, former: bool) -> np.ndarray:
    """The summed squared distances of a listener that always lets its resting place come closest: [M]"""
    total = cost(place)
    reach = PUSHES * STEP / (1 - KEPT)
    for _ in range(LENGTH - 1):
        best = cost(stop(place, velocity, former=former)[:, None] + reach).argmin(1)
        place, velocity = move(place, velocity, PUSHES[best], former=former)
        total = total + cost(place)
    return total


def plan(place: np.ndarray, velocity: np.ndarray, *, former: bool) -> float:
    """The least sum of squared distances that a beam search finds, from one start [2]"""
    places, velocities, total = place[None], velocity[None], cost(place[None])
    for _ in range(LENGTH - 1):
        push = np.tile(PUSHES, (len(places), 1))
        places, velocities = move(np.repeat(places, 5, 0), np.repeat(velocities, 5, 0), push, former=former)
        total = np.repeat(total, 5) + cost(places)
        _, distinct = np.unique(np.round(np.hstack([places, velocities]), 2), axis=0, return_index=True)
        ahead = places + 0.6 * (stop(places, velocities, former=former) - places)
        kept = distinct[np.argsort((total + 3 * cost(ahead))[distinct])[:BEAM]]
        places, velocities, total = places[kept], velocities[kept], total[kept]
    return float(total.min())


def measure(*, former: bool) -> dict[str, float]:
    """Returns as Papoudakis et al. 2021 count them: the rewards of both agents together."""
    draw = np.random.default_rng(0)
    rule = -2 * follow(*begin(MATCHES, draw, former=former), former=former)
    place, velocity = begin(PLANNED, draw, former=former)
    planned = np.array([plan(p, v, former=former) for p, v in zip(place, velocity, strict=True)])
    gain = 2 * (follow(place, velocity, former=former) - planned)
    errors = np.hypot(rule.std() / np.sqrt(MATCHES), gain.std() / np.sqrt(PLANNED))
    return {
        "rule": round(rule.mean(), 3),
        "planned": round(rule.mean() + gain.mean(), 3),
        "standard_error": round(errors, 3),
        "deviation_of_a_match": round(rule.std(), 2),
    }


if __name__ == "__main__":
    versions = {"simple_speaker_listener_v4": False, "simple_speaker_listener_v3": True}
    print(json.dumps({name: measure(former=former) for name, former in versions.items()}, indent=1))
