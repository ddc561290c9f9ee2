"""Returns against hand-computed numbers, and against forward-view sums written independently of the recursions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.returns import backward_scan, gae, n_step_returns, vtrace
from lockstep.kernels import returns as kernels


class Case(NamedTuple):
    r_t: Tensor
    v_t: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    log_ratio_t: Tensor


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


NEVER = flags(0, 0, 0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rollouts whose episodes end anywhere: 1 terminated, 2 truncated, 3 both, 4 a life lost (without a reset step)."""
    steps, envs = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    ends = np.zeros((steps, envs), int)
    valid = np.ones((steps, envs), bool)
    for env in range(envs):
        resetting = draw(st.booleans())
        for t in range(steps):
            valid[t, env] = not resetting
            ends[t, env] = 0 if resetting else draw(st.sampled_from([0, 0, 1, 2, 3, 4]))
            resetting = ends[t, env] in (1, 2, 3)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Case(
        torch.from_numpy(rng.normal(size=(steps, envs))),
        torch.from_numpy(rng.normal(size=(steps + 1, envs))),
        torch.from_numpy(np.isin(ends, (1, 3, 4))),
        torch.from_numpy(np.isin(ends, (2, 3))),
        torch.from_numpy(valid),
        torch.from_numpy(rng.normal(size=(steps, envs)) * valid),
    )


def last_step(case: Case, t: int, env: int) -> int:
    """The last step of the rollout that still belongs to the episode of step t."""
    for k in range(t, len(case.r_t)):
        if case.terminated[k, env] or case.truncated[k, env]:
            return k
    return len(case.r_t) - 1


def n_step_return(case: Case, t: int, env: int, n: int, discount: float) -> float:
    """Discounted sum of n rewards, and of the value after them unless they ended in a termination."""
    total = sum(discount**i * float(case.r_t[t + i, env]) for i in range(n))
    if not case.terminated[t + n - 1, env]:
        total += discount**n * float(case.v_t[t + n, env])
    return total


def lambda_return(case: Case, t: int, env: int, discount: float, lambda_: float) -> float:
    """Forward view: the geometric average of all n-step returns that fit."""
    longest = last_step(case, t, env) - t + 1
    total = lambda_ ** (longest - 1) * n_step_return(case, t, env, longest, discount)
    for n in range(1, longest):
        total += (1 - lambda_) * lambda_ ** (n - 1) * n_step_return(case, t, env, n, discount)
    return total


def vtrace_target(
    case: Case, s: int, env: int, discount: float, lambda_: float, rho_clip: float, c_clip: float
) -> float:
    """Equation 1 of the paper, term by term."""
    total, product = float(case.v_t[s, env]), 1.0
    for t in range(s, last_step(case, s, env) + 1):
        ratio = math.exp(case.log_ratio_t[t, env])
        delta = n_step_return(case, t, env, 1, discount) - float(case.v_t[t, env])
        total += discount ** (t - s) * product * min(rho_clip, ratio) * delta
        product *= lambda_ * min(c_clip, ratio)
    return total


def vtrace_advantage(
    case: Case, s: int, env: int, discount: float, lambda_: float, rho_clip: float, c_clip: float
) -> float:
    if case.terminated[s, env]:
        q = 0.0
    elif s == last_step(case, s, env):
        q = float(case.v_t[s + 1, env])
    else:
        target = vtrace_target(case, s + 1, env, discount, lambda_, rho_clip, c_clip)
        q = lambda_ * target + (1 - lambda_) * float(case.v_t[s + 1, env])
    return float(case.r_t[s, env]) + discount * q - float(case.v_t[s, env])


def test_gae_by_hand() -> None:
    r_t, v_t = column(1, 2, 3), column(4, 5, 6, 7)
    advantage, target = gae(r_t, v_t, NEVER, NEVER, 0.5, 0.5)
    # δ = (1 + 2.5 - 4, 2 + 3 - 5, 3 + 3.5 - 6) = (-0.5, 0, 0.5), each later one weighted by 0.25 more.
    assert advantage[:, 0].tolist() == [-0.5 + 0.25 * 0.125, 0.125, 0.5]
    assert torch.equal(target, advantage + v_t[:-1])


def test_gae_terminated_by_hand() -> None:
    advantage, _ = gae(column(1, 2, 3), column(4, 5, 6, 7), flags(0, 1, 0), NEVER, 0.5, 0.5)
    assert advantage[:, 0].tolist() == [-0.5 + 0.25 * -3.0, 2.0 - 5.0, 0.5]


def test_gae_truncated_by_hand() -> None:
    advantage, _ = gae(column(1, 2, 3), column(4, 5, 6, 7), NEVER, flags(0, 1, 0), 0.5, 0.5)
    assert advantage[:, 0].tolist() == [-0.5, 0.0, 0.5]


def test_n_step_returns_by_hand() -> None:
    r_t, v_t = column(1, 2, 4), column(100, 200, 300, 8)
    assert n_step_returns(r_t, v_t, NEVER, NEVER, 0.5)[:, 0].tolist() == [1 + 1 + 1 + 1, 2 + 2 + 2, 4 + 4]
    assert n_step_returns(r_t, v_t, flags(0, 1, 0), NEVER, 0.5)[:, 0].tolist() == [1 + 1, 2, 4 + 4]
    assert n_step_returns(r_t, v_t, NEVER, flags(0, 1, 0), 0.5)[:, 0].tolist() == [1 + 1 + 75, 2 + 150, 4 + 4]
    assert n_step_returns(r_t, v_t, flags(0, 0, 1), NEVER, 0.5)[:, 0].tolist() == [1 + 1 + 1, 2 + 2, 4]
    assert n_step_returns(r_t, v_t, NEVER, flags(0, 0, 1), 0.5)[:, 0].tolist() == [4, 6, 8]


def test_vtrace_by_hand() -> None:
    never = flags(0, 0)
    ratio, r_t, v_t = column(2, 0.5), column(1, 2), column(1, 2, 4)
    trace = vtrace(ratio.log(), r_t, v_t, never, never, 0.5)
    # ρ = c = (1, 0.5); δ = (1 + 1 - 1, 0.5 (2 + 2 - 2)) = (1, 1); vs - v = (1 + 0.5 · 1 · 1, 1).
    torch.testing.assert_close(trace.vs, column(2.5, 3.0))
    torch.testing.assert_close(trace.rho, column(1.0, 0.5))
    torch.testing.assert_close(trace.advantage, column(1 + 1.5 - 1, 2 + 2 - 2))
    torch.testing.assert_close(trace.pg_advantage, column(1.5, 1.0))
    # ρ̄ = 2 doubles δ_0; λ = 0.5 halves c_0 and mixes q_1 = (3 + 2) / 2.
    wider = vtrace(ratio.log(), r_t, v_t, never, never, 0.5, lambda_=0.5, rho_clip=2.0)
    torch.testing.assert_close(wider.vs, column(1 + 2 + 0.25, 3.0))
    torch.testing.assert_close(wider.pg_advantage, column(2 * (1 + 1.25 - 1), 1.0))


def test_vtrace_stops_the_gradient() -> None:
    v_t = torch.ones(3, 1, requires_grad=True)
    never = flags(0, 0)
    trace = vtrace(torch.zeros(2, 1, requires_grad=True), torch.ones(2, 1), v_t, never, never, 0.9)
    assert not any(part.requires_grad for part in trace)


@given(cases(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
@settings(max_examples=100)
def test_gae_is_the_forward_view(case: Case, discount: float, lambda_: float) -> None:
    advantage, target = gae(case.r_t, case.v_t, case.terminated, case.truncated, discount, lambda_)
    for t, env in np.argwhere(case.valid.numpy()).tolist():
        expected = lambda_return(case, t, env, discount, lambda_)
        assert float(target[t, env]) == pytest.approx(expected, abs=1e-12)
        assert float(advantage[t, env]) == pytest.approx(expected - float(case.v_t[t, env]), abs=1e-12)


@given(cases(), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
@settings(max_examples=100)
def test_n_step_returns_are_the_explicit_sums(case: Case, discount: float) -> None:
    target = n_step_returns(case.r_t, case.v_t, case.terminated, case.truncated, discount)
    for t, env in np.argwhere(case.valid.numpy()).tolist():
        expected = n_step_return(case, t, env, last_step(case, t, env) - t + 1, discount)
        assert float(target[t, env]) == pytest.approx(expected, abs=1e-12)


@given(cases(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=100)
def test_vtrace_is_equation_1(case: Case, discount: float, lambda_: float, rho_clip: float) -> None:
    clips = (rho_clip, min(rho_clip, 1.0))
    trace = vtrace(
        case.log_ratio_t, case.r_t, case.v_t, case.terminated, case.truncated, discount,
        lambda_=lambda_, rho_clip=clips[0], c_clip=clips[1],
    )  # fmt: skip
    for t, env in np.argwhere(case.valid.numpy()).tolist():
        assert float(trace.vs[t, env]) == pytest.approx(
            vtrace_target(case, t, env, discount, lambda_, *clips), abs=1e-12
        )
        assert float(trace.advantage[t, env]) == pytest.approx(
            vtrace_advantage(case, t, env, discount, lambda_, *clips), abs=1e-12
        )


@given(cases(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=100)
def test_vtrace_of_the_kernel_is_equation_1(case: Case, discount: float, lambda_: float, rho_clip: float) -> None:
    clips = (rho_clip, min(rho_clip, 1.0))
    ratio, r_t, v_t = (x.float().numpy() for x in (case.log_ratio_t.exp(), case.r_t, case.v_t))
    vs, advantage, rho = (np.empty(ratio.shape, np.float32) for _ in range(3))
    hyper = map(np.float32, (discount, lambda_, *clips))
    kernels.vtrace(ratio, r_t, v_t, case.terminated.numpy(), case.truncated.numpy(), *hyper, vs, advantage, rho)
    np.testing.assert_array_equal(rho, np.minimum(ratio, np.float32(rho_clip)))
    for t, env in np.argwhere(case.valid.numpy()).tolist():
        target, gap = (f(case, t, env, discount, lambda_, *clips) for f in (vtrace_target, vtrace_advantage))
        assert float(vs[t, env]) == pytest.approx(target, rel=1e-4, abs=1e-4)
        assert float(advantage[t, env]) == pytest.approx(gap, rel=1e-4, abs=1e-4)


@given(cases(), st.sampled_from([0.0, 0.6, 1.0]))
@settings(max_examples=50)
def test_vtrace_on_policy_is_gae_and_n_step(case: Case, lambda_: float) -> None:
    ends = case.terminated, case.truncated
    on_policy = torch.zeros_like(case.r_t)
    trace = vtrace(on_policy, case.r_t, case.v_t, *ends, 0.9, lambda_=lambda_)
    torch.testing.assert_close(trace.vs, gae(case.r_t, case.v_t, *ends, 0.9, lambda_)[1])
    full = vtrace(on_policy, case.r_t, case.v_t, *ends, 0.9)
    returns = n_step_returns(case.r_t, case.v_t, *ends, 0.9)
    torch.testing.assert_close(full.vs, returns)
    torch.testing.assert_close(full.pg_advantage, returns - case.v_t[:-1])


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_reset_steps_change_no_bit_of_valid_ones(case: Case, seed: int) -> None:
    noise = torch.from_numpy(np.random.default_rng(seed).normal(scale=1e6, size=case.r_t.shape))
    r_t = torch.where(case.valid, case.r_t, noise)
    log_ratio_t = torch.where(case.valid, case.log_ratio_t, noise.clamp(-20, 20))
    ends = case.terminated, case.truncated
    before = [
        *gae(case.r_t, case.v_t, *ends, 0.9, 0.8),
        n_step_returns(case.r_t, case.v_t, *ends, 0.9),
        *vtrace(case.log_ratio_t, case.r_t, case.v_t, *ends, 0.9, rho_clip=2.0, c_clip=1.5),
    ]
    after = [
        *gae(r_t, case.v_t, *ends, 0.9, 0.8),
        n_step_returns(r_t, case.v_t, *ends, 0.9),
        *vtrace(log_ratio_t, r_t, case.v_t, *ends, 0.9, rho_clip=2.0, c_clip=1.5),
    ]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[case.valid], y[case.valid])


def test_columns_do_not_mix() -> None:
    rng = np.random.default_rng(0)
    r_t, v_t = (torch.from_numpy(rng.normal(size=(t, 5))).float() for t in (9, 10))
    terminated, truncated = (torch.from_numpy(rng.random((9, 5)) < 0.2) for _ in range(2))
    whole = gae(r_t, v_t, terminated, truncated, 0.99, 0.95)[0]
    for env in range(5):
        one = slice(env, env + 1)
        alone = gae(r_t[:, one], v_t[:, one], terminated[:, one], truncated[:, one], 0.99, 0.95)[0]
        assert torch.equal(whole[:, one], alone)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 13, 128])
def test_the_scan_of_gpus_adds_up_what_the_loop_does(steps: int) -> None:
    draw = torch.Generator().manual_seed(steps)
    x_t = torch.randn(steps, 5, generator=draw, dtype=torch.float64)
    decay_t = 0.99 * (torch.rand(steps, 5, generator=draw) > 0.1).double()
    expected, y_tp1 = torch.empty_like(x_t), torch.zeros(5, dtype=torch.float64)
    for t in reversed(range(steps)):
        y_tp1 = x_t[t] + decay_t[t] * y_tp1
        expected[t] = y_tp1
    torch.testing.assert_close(backward_scan(x_t, decay_t), expected, rtol=1e-12, atol=1e-12)
