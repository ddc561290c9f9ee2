"""The operations of torch that portable arithmetic replaces, by their names in torch.ops.aten.

lockstep.portable.mode writes their results where an operation in place must write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.portable import elementwise, matrices, sums

OPERATIONS: dict[str, Callable[..., Any]] = {
    "exp": elementwise.exp,
    "expm1": elementwise.expm1,
    "log": elementwise.log,
    "log1p": elementwise.log1p,
    "tanh": elementwise.tanh,
    "tanh_backward": elementwise.tanh_backward,
    "sigmoid": elementwise.sigmoid,
    "sigmoid_backward": elementwise.sigmoid_backward,
    "softplus": elementwise.softplus,
    "softplus_backward": elementwise.softplus_backward,
    "special_ndtri": elementwise.ndtri,
    "erf": elementwise.erf,
    "erfc": elementwise.erfc,
    "sin": elementwise.sin,
    "cos": elementwise.cos,
    "atanh": elementwise.atanh,
    "elu": elementwise.elu,
    "elu_backward": elementwise.elu_backward,
    "pow": elementwise.power,
    "sqrt": elementwise.sqrt,
    "rsqrt": elementwise.rsqrt,
    "addcmul": elementwise.addcmul,
    "addcdiv": elementwise.addcdiv,
    "lerp": elementwise.lerp,
    "lerp_": elementwise.lerp_in_place,
    "xlogy": elementwise.xlogy,
    "smooth_l1_loss": sums.smooth_l1_loss,
    "smooth_l1_loss_backward": sums.smooth_l1_loss_backward,
    "mse_loss": sums.mse_loss,
    "mse_loss_backward": sums.mse_loss_backward,
    "sum": sums.total,
    "mean": sums.mean,
    "var": sums.variance,
    "std": sums.deviation,
    "linalg_vector_norm": sums.vector_norm,
    "_log_softmax": sums.log_softmax,
    "_log_softmax_backward_data": sums.log_softmax_backward,
    "_softmax": sums.softmax,
    "_softmax_backward_data": sums.softmax_backward,
    "logsumexp": sums.logsumexp,
    "native_layer_norm": sums.layer_norm,
    "native_layer_norm_backward": sums.layer_norm_backward,
    "mm": matrices.mm,
    "addmm": matrices.addmm,
    "bmm": matrices.bmm,
    "baddbmm": matrices.baddbmm,
    "mv": matrices.mv,
    "addmv": matrices.addmv,
    "dot": matrices.dot,
    "mkldnn::_linear_pointwise": matrices.linear_pointwise,
    "convolution": matrices.convolution,
    "convolution_backward": matrices.convolution_backward,
    "arange": elementwise.arange,
    "linspace": elementwise.linspace,
    "uniform_": elementwise.uniform,
    "normal_": elementwise.normal,
    "linalg_qr": matrices.qr,
}
"""By name; see torch's native_functions.yaml for their arguments."""
