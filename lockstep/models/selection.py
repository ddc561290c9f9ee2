"""Selects each action's entry from those of all actions."""

from __future__ import annotations

import torch
from torch import Tensor


def of_action(x: Tensor, action: Tensor) -> Tensor:
    """[..., A], [...] -> [...]. The actions may have fewer dimensions and are then expanded."""
    if _on_gpu(x):
        return torch.where(is_action(action, x.shape[-1]), x, 0.0).sum(-1)
    index = action.long().expand(x.shape[:-1]).unsqueeze(-1)
    return x.gather(-1, index).squeeze(-1)


def numbers_of_action(x: Tensor, action: Tensor) -> Tensor:
    """[..., A, K], [...] -> [..., K]"""
    if _on_gpu(x):
        return torch.where(is_action(action, x.shape[-2]).unsqueeze(-1), x, 0.0).sum(-2)
    index = action.long()[..., None, None].expand(*action.shape, 1, x.shape[-1])
    return x.gather(-2, index).squeeze(-2)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def is_action(action: Tensor, actions: int) -> Tensor:
    """Whole numbers [...] -> one-hot bool [..., A]. Unlike one_hot, it does not wait for a GPU.

    On a GPU, a sum over this mask is deterministic and can be captured. The backward pass of gather uses atomic
    additions, and its deterministic version sorts.
    """
    return action.unsqueeze(-1) == torch.arange(actions, device=action.device)
