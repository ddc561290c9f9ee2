from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from lockstep.core import digests
from lockstep.core.arrays import ArrayTuple
from lockstep.core.digests import Digests, fast_digest, state_digest


def test_fast_digest_is_xxh3_over_dtype_shape_and_bytes() -> None:
    values = (1.5, -0.0, 2.0, 3.0, 4.0, 5.0)
    expected = xxhash.xxh3_64(b"float32[2, 3]" + struct.pack("<6f", *values)).hexdigest()
    assert fast_digest(torch.tensor(values).reshape(2, 3)) == expected
    assert fast_digest(np.array(values, np.float32).reshape(2, 3)) == expected


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)])
def test_tensors_and_numpy_arrays_agree(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    assert fast_digest(tensor) == fast_digest(tensor.numpy())


def test_fast_digest_ignores_memory_layout_and_sees_everything_else() -> None:
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    assert fast_digest(x.to(memory_format=torch.channels_last)) == fast_digest(x)
    assert fast_digest(x[:, ::2]) == fast_digest(x[:, ::2].clone())
    assert fast_digest(x.numpy()[:, ::2]) == fast_digest(x[:, ::2])
    assert fast_digest(x.requires_grad_()) == fast_digest(x.detach())
    bf16 = x.detach().bfloat16()
    different = [x, x.reshape(6, 20), x.int(), x.double(), bf16, bf16.half(), x + 1, -x * 0, x * 0, x[:0]]
    assert len({fast_digest(y) for y in different}) == len(different)


def test_only_large_pieces_between_others_are_hashed_by_themselves() -> None:
    for size, pieces in ((100, 1), (1 << 16, 3)):
        x = torch.arange(3 * 2 * size, dtype=torch.uint8).view(3, 2, size)[:, :1]
        assert len(list(digests._pieces(x.numpy()))) == pieces
        assert fast_digest(x) == fast_digest(x.clone()) and state_digest({"x": x}) == state_digest({"x": x.clone()})


def test_digests_name_every_leaf_and_follow_its_numbers() -> None:
    class Step(ArrayTuple):
        obs: Any
        reward: torch.Tensor
        extra: torch.Tensor | None

    image, rewards = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 4)
    found = Digests.of(Step(obs={"image": image, "half": torch.ones(4).bfloat16()}, reward=rewards[:, ::2], extra=None))
    for _ in range(2):
        assert found() == {
            "obs.half": fast_digest(torch.ones(4).bfloat16()),
            "obs.image": fast_digest(image.clone()),
            "reward": fast_digest(rewards[:, ::2].clone()),
        }
        image += 1
        rewards += 1


def test_state_digest_against_hand_made_bytes() -> None:
    w, n = torch.tensor([[1.0], [2.0]]), torch.tensor(3)
    text = b""
    for piece, data in (
        ((b"n", b"int64[]"), struct.pack("<q", 3)),
        ((b"w", b"float32[2, 1]"), struct.pack("<2f", 1.0, 2.0)),
    ):
        text += b"".join(struct.pack("<Q", len(p)) + p for p in piece) + data
    assert state_digest({"w": w, "n": n}) == hashlib.sha256(text).hexdigest()
    assert state_digest({"n": n, "w": w}) == state_digest({"w": w, "n": n})
    assert state_digest({"w": w, "m": n}) != state_digest({"w": w, "n": n})
