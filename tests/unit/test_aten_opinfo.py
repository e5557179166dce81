"""A sample of many operators from torch's database, call by call against eager, results and gradients.
The whole database is `python -m tests.opinfo`; this is the share of it that fits in a unit test."""

import pytest
import torch

from plait.frontend.fx_import import load_tables
from tests.opinfo import How, check_call, check_op, entries

RESULTS = """rsub true_divide pow lerp addcdiv nan_to_num logaddexp2 xlogy ldexp sinc logit lgamma logical_and var std_mean
linalg.vector_norm logsumexp nansum dist prod aminmax cumprod cummax softmax arange linspace eye index_select
gather take nn.functional.elu nn.functional.gelu nn.functional.mish nn.functional.softplus
nn.functional.hardswish nn.functional.glu nn.functional.logsigmoid nn.functional.layer_norm
nn.functional.group_norm nn.functional.batch_norm nn.functional.huber_loss nn.functional.nll_loss
nn.functional.binary_cross_entropy nn.functional.interpolate"""

HALF = """nn.functional.gelu nn.functional.silu nn.functional.layer_norm nn.functional.group_norm nn.functional.mse_loss
softmax log_softmax var sum logsumexp"""

GRADIENTS = """nn.functional.leaky_relu nn.functional.elu nn.functional.gelu nn.functional.silu nn.functional.mish
nn.functional.softplus nn.functional.hardtanh nn.functional.hardswish nn.functional.hardsigmoid
nn.functional.softshrink nn.functional.hardshrink nn.functional.threshold nn.functional.glu
nn.functional.logsigmoid nn.functional.prelu nn.functional.layer_norm nn.functional.group_norm
nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.nll_loss
nn.functional.binary_cross_entropy softmax log_softmax tanh"""


def _check(name, dtype, how):
    load_tables()
    found = [t for op in entries(name) for t in check_op(op, dtype, 1, how)]
    assert not [w for t in found for w in t.wrong]
    assert any(t.native for t in found)


@pytest.mark.parametrize("name", RESULTS.split())
def test_results(name):
    _check(name, torch.float32, How())


@pytest.mark.parametrize("name", HALF.split())
def test_half_results_rounded_once(name):
    _check(name, torch.bfloat16, How("fused"))


@pytest.mark.parametrize("name", GRADIENTS.split())
def test_gradients(name):
    _check(name, torch.float32, How(grad=True))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_gradient(training):
    load_tables()
    aten = torch.ops.aten
    for shape in ((6, 3), (2, 3, 5, 4)):
        x, grad = torch.randn(shape) + 2, torch.randn(shape)
        w, b, mean, var = torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5
        functional = aten._native_batch_norm_legit_functional.default
        out = functional(x, w, b, mean, var, training, 0.1, 1e-5)
        check_call(functional, x, w, b, mean, var, training, 0.1, 1e-5)
        check_call(aten._native_batch_norm_legit.no_stats, x, w, None, True, 0.1, 1e-5)
        stats = (mean, var, out[1], out[2], training, 1e-5, [True, True, True])
        check_call(aten.native_batch_norm_backward.default, grad, x, w, *stats)
        check_call(aten.native_batch_norm_backward.default, grad, x, None, *stats[:-1], [True, False, False])
    check_call(aten._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5)
    check_call(aten._batch_norm_with_update_functional.default, x, w, b, mean, var, 0.1, 1e-5)


def test_rms_norm_and_its_gradient():
    load_tables()
    aten = torch.ops.aten
    for dtype in (torch.float32, torch.bfloat16):
        x, grad, w = (torch.randn(s, dtype=dtype) for s in ((4, 3, 16), (4, 3, 16), (16,)))
        rstd = aten._fused_rms_norm(x, [16], w, 1e-5)[1]
        check_call(aten._fused_rms_norm.default, x, [16], w, 1e-5)
        check_call(aten._fused_rms_norm.default, x, [16], None, None)
        backward = aten._fused_rms_norm_backward.default
        form = torch._decomp.decomposition_table[backward]
        check_call(backward, grad, x, [16], rstd, w, [True, True], eager_form=form)
