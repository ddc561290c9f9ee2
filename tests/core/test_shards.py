"""Which process holds which shards."""

from __future__ import annotations

from itertools import chain

import pytest

from lockstep.core.shards import block, holder


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize(("collectors", "learners"), [(1, 3), (2, 1), (1, 1)])
def test_learners_of_a_group_hold_the_shards_of_its_collectors(copies: int, collectors: int, learners: int) -> None:
    """Also of three and five groups, among which 16 shards cannot be divided evenly."""

    def of_groups(each: int) -> list[list[int]]:
        parts = [list(block(16, each * copies, index, copies)) for index in range(each * copies)]
        for index, part in enumerate(parts):
            assert part and all(holder(16, each * copies, shard, copies) == index for shard in part)
        return [list(chain(*parts[group * each : (group + 1) * each])) for group in range(copies)]

    assert of_groups(collectors) == of_groups(learners)
    assert list(chain(*of_groups(learners))) == list(range(16))
    sizes = [len(group) for group in of_groups(learners)]
    assert max(sizes) - min(sizes) <= 1
