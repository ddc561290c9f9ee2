"""GRU and LSTM over sequences, forwards and backwards, with the bits of torch's replaced operations.
lockstep.models.core has the formulas.

Shape legend: S slices, T steps, n columns of a slice, N = S * T * n samples, slice by slice and step by step; R = S * n
rows that advance together, slice by slice; H hidden size, G gates, K numbers of a state: H, or 2H of h and c.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64

from lockstep.kernels.cache import apart, compiled
from lockstep.kernels.dense import ACTIVATION, BIAS, NONE, OUTPUTS, SOURCE, WEIGHT, backward
from lockstep.kernels.math import sigmoid
from lockstep.kernels.products import panel_product, panels_of
from lockstep.kernels.vectors import address

LSTM, GRU = 4, 5
"""Kinds of cores, among the activations of a table of layers: see lockstep.kernels.recurrent_network."""
KEPT = 3
"""How many numbers of each unit and sample the way back needs besides the gates. The first is h before the step. For an
LSTM, c before the step and tanh c follow; for a GRU, what the reset gate multiplies, and an unused one."""
_ZERO, _ONE, _TWO = map(np.float32, (0, 1, 2))
_PANELS, _ROWS, _FLAGS = float32[:, :, ::1], float32[:, ::1], boolean[::1]


@compiled
def _place(row: int, t: int, steps: int, columns: int) -> int:
    """The sample of a row at a step."""
    return (row // columns * steps + t) * columns + row % columns


@compiled
def _squash(x: np.ndarray, first: int, last: int, factor: np.float32) -> None:
    """Replace numbers of x by their sigmoids or, with a factor of 2, by their hyperbolic tangents, which cores compute
    as 2 sigmoid(2x) - 1."""
    of = x[first:last]
    if factor == _ONE:
        for i in range(len(of)):
            of[i] = sigmoid(of[i])
    else:
        for i in range(len(of)):
            of[i] = sigmoid(of[i] * _TWO) * _TWO - _ONE


@apart(_PANELS, float32[::1], int64, int64, _FLAGS, float32[:, :], _ROWS, _ROWS, _PANELS)
def lstm(
    panels: np.ndarray,
    bias: np.ndarray,
    steps: int,
    columns: int,
    start: np.ndarray,
    state: np.ndarray,
    gates: np.ndarray,
    h: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Run an LSTM.

    Args:
        panels: of the hidden weights as [H, 4H]: see lockstep.kernels.products.panels_of.
        bias: of the hidden weights, [4H].
        steps, columns: T and n.
        start: bool [N]: where the state is zeroed before the step.
        state: float32 [R, 2H], before the first step. It is replaced by that after the last step.
        gates: float32 [N, 4H]: the projected input. It is replaced by the gates i, f, o, g.
        h: the outputs, float32 [N, H], which are written.
        kept: float32 [KEPT, N, H], written for lstm_back.
    """
    rows, size = len(state), h.shape[1]
    now, before, after = (
        np.empty((rows, 4 * size), np.float32),
        np.empty((rows, size), np.float32),
        np.empty(size, np.float32),
    )
    for t in range(steps):
        for i in range(rows):
            place = _place(i, t, steps, columns)
            keep = _ZERO if start[place] else _ONE
            to, of = now[i], gates[place]
            for j in range(4 * size):
                to[j] = of[j] + bias[j]
            h_tm1, c_tm1 = kept[0, place], kept[1, place]
            for j in range(size):
                h_tm1[j] = state[i, j] * keep
                c_tm1[j] = state[i, size + j] * keep
            to = before[i]
            for j in range(size):
                to[j] = h_tm1[j]
        to_now = address(now), 4 * size
        panel_product((address(before), size), panels, to_now, to_now, rows, 4 * size)
        for i in range(rows):
            place = _place(i, t, steps, columns)
            gate, c_tm1, tanh_c, out = gates[place], kept[1, place], kept[2, place], h[place]
            gate[:] = now[i]
            _squash(gate, 0, 3 * size, _ONE)
            _squash(gate, 3 * size, 4 * size, _TWO)
            for j in range(size):
                after[j] = gate[size + j] * c_tm1[j] + gate[j] * gate[3 * size + j]
            for j in range(size):
                tanh_c[j] = after[j]
            _squash(tanh_c, 0, size, _TWO)
            for j in range(size):
                out[j] = gate[2 * size + j] * tanh_c[j]
            for j in range(size):
                state[i, j] = out[j]
                state[i, size + j] = after[j]


@apart(_PANELS, int64, int64, _FLAGS, _ROWS, _PANELS, _ROWS, _ROWS)
def lstm_back(
    panels: np.ndarray,
    steps: int,
    columns: int,
    start: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    by_h: np.ndarray,
    delta: np.ndarray,
) -> None:
    """Write the gradients by the gates before their activation, which are also those by the projected input. Other
    arguments are those of lstm, and what it wrote.

    Args:
        panels: of the hidden weights as [4H, H].
        by_h: the gradient by outputs, float32 [N, H].
        delta: those gradients, float32 [N, 4H]; written.
    """
    size = by_h.shape[1]
    rows = len(by_h) // steps
    now, back = np.empty((rows, 4 * size), np.float32), np.zeros((rows, size), np.float32)
    by_c, zeros = np.zeros((rows, size), np.float32), np.zeros(size, np.float32)
    keep = _ZERO  # nothing follows the last step
    for t in range(steps - 1, -1, -1):
        for i in range(rows):
            place = _place(i, t, steps, columns)
            if t < steps - 1:
                keep = _ZERO if start[place + columns] else _ONE
            gate, c_tm1, tanh_c = gates[place], kept[1, place], kept[2, place]
            into, out, dc, dh, of = delta[place], now[i], by_c[i], back[i], by_h[place]
            for j in range(size):
                dh[j] = of[j] + dh[j] * keep if t < steps - 1 else of[j]
            for j in range(size):
                o = gate[2 * size + j]
                dc[j] = dc[j] + dh[j] * (o - (o * tanh_c[j]) * tanh_c[j])
            for j in range(size):
                i_, f, o, g = gate[j], gate[size + j], gate[2 * size + j], gate[3 * size + j]
                out[j] = ((i_ - i_ * i_) * g) * dc[j]
                out[size + j] = ((f - f * f) * c_tm1[j]) * dc[j]
                out[2 * size + j] = ((o - o * o) * tanh_c[j]) * dh[j]
                out[3 * size + j] = (i_ - (i_ * g) * g) * dc[j]
            keep_now = _ZERO if start[place] else _ONE
            for j in range(size):
                dc[j] = dc[j] * (gate[size + j] * keep_now)
            for j in range(4 * size):
                into[j] = out[j]
        if t:
            panel_product((address(now), 4 * size), panels, (address(zeros), 0), (address(back), size), rows, size)


@apart(_PANELS, float32[::1], int64, int64, _FLAGS, float32[:, :], _ROWS, _ROWS, _PANELS)
def gru(
    panels: np.ndarray,
    bias: np.ndarray,
    steps: int,
    columns: int,
    start: np.ndarray,
    state: np.ndarray,
    gates: np.ndarray,
    h: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Run a GRU: as lstm, with a state [R, H] and 3H gates r, z, n."""
    rows, size = len(state), h.shape[1]
    now, before = np.empty((rows, 3 * size), np.float32), np.empty((rows, size), np.float32)
    for t in range(steps):
        for i in range(rows):
            place = _place(i, t, steps, columns)
            keep = _ZERO if start[place] else _ONE
            h_tm1, to = kept[0, place], before[i]
            for j in range(size):
                h_tm1[j] = state[i, j] * keep
            for j in range(size):
                to[j] = h_tm1[j]
        to_now = address(now), 3 * size
        panel_product((address(before), size), panels, (address(bias), 0), to_now, rows, 3 * size)
        for i in range(rows):
            place = _place(i, t, steps, columns)
            gate, hidden, h_tm1, hidden_n, out = gates[place], now[i], kept[0, place], kept[1, place], h[place]
            for j in range(2 * size):
                gate[j] = gate[j] + hidden[j]
            _squash(gate, 0, 2 * size, _ONE)
            for j in range(size):
                hidden_n[j] = hidden[2 * size + j]
            for j in range(size):
                gate[2 * size + j] = gate[2 * size + j] + gate[j] * hidden_n[j]
            _squash(gate, 2 * size, 3 * size, _TWO)
            for j in range(size):
                n = gate[2 * size + j]
                out[j] = n + (h_tm1[j] - n) * gate[size + j]
            for j in range(size):
                state[i, j] = out[j]


@apart(_PANELS, int64, int64, _FLAGS, _ROWS, _PANELS, _ROWS, _ROWS, _ROWS)
def gru_back(
    panels: np.ndarray,
    steps: int,
    columns: int,
    start: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    by_h: np.ndarray,
    by_projected: np.ndarray,
    delta: np.ndarray,
) -> None:
    """Write to by_projected the gradient by the projected input, and to delta that by what the hidden weights emit:
    float32 [N, 3H] each. Other arguments are those of lstm_back."""
    size = by_h.shape[1]
    rows = len(by_h) // steps
    now, back = np.empty((rows, 3 * size), np.float32), np.zeros((rows, size), np.float32)
    later, zeros = np.zeros((rows, size), np.float32), np.zeros(size, np.float32)
    keep = _ZERO  # nothing follows the last step
    for t in range(steps - 1, -1, -1):
        for i in range(rows):
            place = _place(i, t, steps, columns)
            if t < steps - 1:
                keep = _ZERO if start[place + columns] else _ONE
            gate, h_tm1, hidden_n = gates[place], kept[0, place], kept[1, place]
            of, into, hidden, out = by_h[place], by_projected[place], delta[place], now[i]
            before, dh = back[i], later[i]  # of the next step: the gradient by h directly
            for j in range(size):
                dh[j] = of[j] + (before[j] + dh[j]) * keep if t < steps - 1 else of[j]
            for j in range(size):
                r, z, n = gate[j], gate[size + j], gate[2 * size + j]
                by_z = ((z - z * z) * (h_tm1[j] - n)) * dh[j]
                by_n = ((_ONE - n * n) * (_ONE - z)) * dh[j]
                into[j] = ((r - r * r) * hidden_n[j]) * by_n
                into[size + j] = by_z
                into[2 * size + j] = by_n
            for j in range(size):
                dh[j] = dh[j] * gate[size + j]
            for j in range(2 * size):
                out[j] = into[j]
            for j in range(size):
                out[2 * size + j] = into[2 * size + j] * gate[j]
            for j in range(3 * size):
                hidden[j] = out[j]
        if t:
            panel_product((address(now), 3 * size), panels, (address(zeros), 0), (address(back), size), rows, size)


@compiled
def with_extra(features: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """What a core takes: features [N, F], which extra features [N, E] follow. Without any, the features themselves."""
    (samples, size), more = features.shape, extra.shape[1]
    if more == 0:
        return features
    found = np.empty((samples, size + more), np.float32)
    for i in range(samples):
        for j in range(size):
            found[i, j] = features[i, j]
        for j in range(more):
            found[i, size + j] = extra[i, j]
    return found


@compiled
def without_extra(by_inputs: np.ndarray, by_features: np.ndarray) -> None:
    """Write to by_features [N, F] the part of the gradient by what a core takes, [N, F + E]."""
    samples, size = by_features.shape
    for i in range(samples):
        for j in range(size):
            by_features[i, j] = by_inputs[i, j]


@compiled
def core_panels(row: np.ndarray, wide: int, parameters: np.ndarray) -> np.ndarray:
    """The hidden weights of a core as [H, G * H]: see lstm.

    Args:
        row: of the core, int64 [14]: see lockstep.kernels.recurrent_network.
        wide: G * H.
        parameters: float32 [P].
    """
    size = row[OUTPUTS]
    return panels_of((address(parameters) + 4 * row[WEIGHT], 1, size), size, wide)


@compiled
def core_forward(
    row: np.ndarray,
    parameters: np.ndarray,
    panels: np.ndarray,
    columns: int,
    start: np.ndarray,
    state: np.ndarray,
    gates: np.ndarray,
    h: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Run a core. row and parameters are those of core_panels, the rest those of lstm."""
    steps, begin = len(h) // len(state), row[BIAS]
    bias = parameters[begin : begin + gates.shape[1]]
    if row[ACTIVATION] == LSTM:
        lstm(panels, bias, steps, columns, start, state, gates, h, kept)
    else:
        gru(panels, bias, steps, columns, start, state, gates, h, kept)


@compiled
def core_back(
    row: np.ndarray,
    parameters: np.ndarray,
    steps: int,
    columns: int,
    start: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    by_h: np.ndarray,
    by_projected: np.ndarray,
    gradient: np.ndarray,
    joined: bool,
) -> None:
    """Write each slice's gradient by a core's hidden weights and biases, and to by_projected [N, G * H] the gradient by
    the projected input, given that by the core's outputs. Arguments are those of core_forward, lstm_back and
    lockstep.kernels.dense.backward."""
    size, wide = by_h.shape[1], by_projected.shape[1]
    panels = panels_of((address(parameters) + 4 * row[WEIGHT], size, 1), wide, size)
    delta = by_projected
    if row[ACTIVATION] == LSTM:
        lstm_back(panels, steps, columns, start, gates, kept, by_h, by_projected)
    else:
        delta = np.empty_like(by_projected)
        gru_back(panels, steps, columns, start, gates, kept, by_h, by_projected, delta)
    hidden = row.copy().reshape((1, len(row)))
    hidden[0, OUTPUTS], hidden[0, ACTIVATION], hidden[0, SOURCE] = wide, NONE, -1
    h_tm1, flat = kept[0], gates.reshape(gates.size)
    backward(parameters, hidden, h_tm1, flat, delta.reshape(delta.size), gradient, True, joined, h_tm1[:0])
