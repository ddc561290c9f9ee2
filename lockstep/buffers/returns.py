"""n-step returns of steps in a ring.

Shape legend: C steps of the ring, B environments, N steps of a return.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def replayed_returns(ring: Mapping[str, Tensor], time: Tensor, environment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each of some steps: the discounted sum of up to N rewards, the factor of the value that follows, and the
    number of steps until then.

    Args:
        ring: `reward`, `terminated` and `truncated` [C, B], and `discounts` [N + 1], the discount after each number of
            steps. Step t is at place t mod C.
        time, environment: int64 of any shape, the numbers of the steps and their environments, on the ring's device.
    """
    steps = torch.arange(len(ring["discounts"]) - 1, device=time.device)
    given = time, environment, steps, *(ring[x] for x in ("terminated", "truncated", "reward", "discounts"))
    if time.is_cpu:  # as arrays, whose small operations take a fraction of the time that torch's take
        given = tuple(x.numpy() for x in given)
    first, row, forwards, terminated, truncated, rewards, discounts = given
    forwards = forwards.reshape(-1, *[1] * time.ndim)
    at = (first + forwards) % len(rewards)  # [steps of a return, ...]
    ended = terminated[at, row]
    cut = ended | truncated[at, row]
    going = cut.cumsum(0) == cut  # whether no earlier step was cut
    terms = discounts[forwards] * rewards[at, row] * going
    # One operation at a time, in this order. None may be fused, so that a GPU rounds like a CPU.
    total = terms[0] + 0
    for each in terms[1:]:
        total += each
    ahead = going.sum(0)
    discount = discounts[ahead] * ~(ended & going).any(0)
    return torch.as_tensor(total), torch.as_tensor(discount), torch.as_tensor(ahead)
