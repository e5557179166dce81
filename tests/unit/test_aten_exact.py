"""Lowerings whose answer is exact in eager: the same bits, for special values and every type."""

import itertools
import math

import pytest
import torch

from plait.frontend.context import LOWERINGS, Context
from plait.frontend.fx_import import load_tables
from plait.ir.dtype import DType
from plait.ir.graph import Builder
from plait.oracle.eval_graph import evaluate
from tests.frontend_eval import imported
from tests.opinfo import NotNative, run

load_tables()
aten = torch.ops.aten
inf, nan = math.inf, math.nan

# torch's vectorised loops take other paths than its scalar tails: the values repeat to fill both
FLOATS = [0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0, 1e-40, -1e-40, 6.5e4, -7e4, 3e9, inf, -inf, nan]
INTS = [0, 1, -1, 2, -2, 7, -7, 63, 64, 100, -128, 127]


def floats(dtype):
    return torch.tensor(FLOATS * 3).to(dtype)


def pairs(dtype):
    values = FLOATS if dtype.is_floating_point else [True, False] if dtype is torch.bool else INTS
    both = list(itertools.product(values, values))
    a, b = (torch.tensor(side) for side in zip(*both, strict=True))
    return a.to(dtype), b.to(dtype)


def same(got, want, signs=True):
    assert got.dtype is want.dtype and got.shape == want.shape
    if want.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan())
        got, want = got.nan_to_num(nan=0.0).float(), want.nan_to_num(nan=0.0).float()
        assert not signs or torch.equal(torch.signbit(got), torch.signbit(want))
    assert torch.equal(got, want)


def check(op, *args, signs=True, **kwargs):
    want = op(*args, **kwargs)
    got = run(str(op), args, kwargs, want)
    for g, w in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        same(g, w, signs)


KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]
ARITHMETIC = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]
COMPARE = [aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor]
EXTREMES = [aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default]
LOGIC = [aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default]


@pytest.mark.parametrize("dtype", KINDS)
def test_two_operands(dtype):
    a, b = pairs(dtype)
    for op in ARITHMETIC + COMPARE + LOGIC:
        if not (op is aten.sub.Tensor and dtype is torch.bool):
            check(op, a, b)
    for op in EXTREMES:
        # which of two zeros wins depends on eager's vector width
        check(op, a, b, signs=False)
    check(aten.copysign.Tensor, a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integer_division_by_signs_and_shifts_out_of_range(dtype):
    a, b = pairs(dtype)
    for op in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.pow.Tensor_Tensor,
               aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor):  # fmt: skip
        check(op, a, b)
    a, b = a[b != 0], b[b != 0]
    for op in (aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default):
        check(op, a, b)
    for mode in ("floor", "trunc"):
        check(aten.div.Tensor_mode, a, b, rounding_mode=mode)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integer_division_by_zero_raises(dtype):
    a, b = torch.tensor([5, 7], dtype=dtype), torch.tensor([2, 0], dtype=dtype)
    for op in (aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default):
        with pytest.raises(RuntimeError):
            run(str(op), (a, b), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_division_by_signs(dtype):
    a, b = pairs(dtype)
    for op in (aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default):
        check(op, a, b)
    for mode in ("floor", "trunc"):
        check(aten.div.Tensor_mode, a, b, rounding_mode=mode)


ONE = [aten.neg, aten.abs, aten.sign, aten.floor, aten.ceil, aten.trunc, aten.round, aten.frac, aten.signbit, aten.isnan,
       aten.isinf, aten.isposinf, aten.isneginf, aten.relu, aten.nan_to_num, aten.logical_not,
       aten.reciprocal, aten.sqrt, aten.hardshrink, aten.leaky_relu]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_float(dtype):
    for packet in ONE:
        check(packet.default, floats(dtype))


@pytest.mark.parametrize("bounds", [(0.0, None), (None, 0.0), (-0.0, 1.0), (2, -2), (nan, None), (None, nan)])
def test_clamp_keeps_zero_signs_and_nan(bounds):
    for dtype in (torch.float32, torch.bfloat16):
        check(aten.clamp.default, floats(dtype), *bounds)


@pytest.mark.parametrize("target", [*KINDS, torch.float16, torch.int32, torch.int16])
def test_conversions(target):
    for source in (*KINDS, torch.float16):
        if source.is_floating_point:
            # what no integer type can hold is undefined in C, and eager's own loops disagree about it
            values = [v for v in FLOATS if target.is_floating_point or target is torch.bool or abs(v) < 100]
            x = torch.tensor(values * 3).to(source)
        else:
            x = torch.tensor(INTS * 3).to(source)
        check(aten._to_copy.default, x, dtype=target)


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_to_float8(target):
    for source in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        x = torch.tensor([448.0, 449.0, 464.0, 465.0, -1000.0, 57344.0, 61440.0, 2**-9, 2**-10, -0.0, 17.3]).to(source)
        got = run("aten._to_copy.default", (x,), {"dtype": target})
        assert got.dtype is target
        same(got.float(), x.to(target).float())


def test_numbers_wrap_or_are_refused_as_in_eager():
    x = torch.tensor([1, -1, 100], dtype=torch.int8)
    u = torch.tensor([1, 255, 100], dtype=torch.uint8)
    check(aten.add.Tensor, x, 300)
    check(aten.lt.Scalar, u, 300)
    check(aten.eq.Scalar, u, -1)
    check(aten.add.Tensor, u, -1)
    check(aten.masked_fill.Scalar, torch.arange(5), torch.arange(5) > 2, 1.5)
    for call in ((aten.clamp.default, x, None, 300), (aten.masked_fill.Scalar, u, u > 0, 300)):
        with pytest.raises(RuntimeError, match="overflow"):
            call[0](*call[1:])
        with pytest.raises(NotNative):
            run(str(call[0]), call[1:], {})


def test_a_number_meets_half_precision_as_in_eager():
    x = torch.linspace(-3, 3, 256).bfloat16()
    for number in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor(-0.1, dtype=torch.float64)):
        for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
            check(op, x, number)
            if isinstance(number, torch.Tensor):
                check(op, number, x)
        check(aten.where.self, x > 0, torch.as_tensor(number), x)
    check(aten.clamp.default, x, 0.1, 0.3)
    check(aten.remainder.Scalar, x, 0.1)
    check(aten.gt.Scalar, x, 0.1)


def test_bools():
    a, b = pairs(torch.bool)
    check(aten.add.Tensor, a, b)
    check(aten.mul.Tensor, a, b)
    check(aten.add.Tensor, a, 1)
    check(aten.bitwise_not.default, a)
    check(aten.sum.default, a)
    check(aten.amax.default, a)
    check(aten.max.dim, a.reshape(2, 2), 1)
    check(aten.cumsum.default, a, 0)
    check(aten.cummax.default, a, 0)
    with pytest.raises(NotNative):
        run("aten.sub.Tensor", (a, b), {})


def test_any_and_all_of_uint8_are_uint8():
    x = torch.tensor([[0, 3, 0], [1, 7, 0]], dtype=torch.uint8)
    check(aten.any.default, x)
    check(aten.all.dim, x, 1)
    check(aten.any.dims, x, [])


def test_reductions_of_nothing():
    x = torch.zeros(2, 0)
    check(aten.sum.dim_IntList, x, [1])
    check(aten.prod.dim_int, x, 1)
    check(aten.any.dim, x, 1)
    check(aten.all.dim, x, 1)
    check(aten.mean.dim, x, [1])
    check(aten.logsumexp.default, x, [1])
    for op in (aten.amax.default, aten.amin.default):
        with pytest.raises(NotNative):
            run(str(op), (x, [1]), {})


def test_arg_extremes_take_the_first_and_see_nan():
    x = torch.tensor([[1.0, 3.0, 3.0], [nan, 5.0, nan], [2.0, nan, 9.0], [-inf, -inf, -inf]])
    for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim):
        check(op, x, 1)
        check(op, x.bfloat16(), 0)
    check(aten.cummax.default, x, 1)
    check(aten.cummin.default, x, 0)


def test_the_variance_of_constants_is_zero():
    for value in (0.1, 1.0, 3.3e5, -7.7):
        x = torch.full((3, 37), value)
        assert torch.equal(run("aten.var.correction", (x, [1]), {"correction": 1}), torch.zeros(3))
        out, mean, _ = run("aten.native_layer_norm.default", (x, [37], None, None, 1e-5), {})
        assert torch.equal(out, torch.zeros(3, 37))
        assert torch.equal(mean, x[:, :1])


def test_which_negative_indices_wrap():
    x, t = torch.arange(12.0).reshape(4, 3), torch.tensor([-1, 0])
    check(aten.index.Tensor, x, [t])
    check(aten.index.Tensor, x, [None, t])
    check(aten.take.default, x, t)
    for call in ((aten.embedding.default, x, t), (aten.index_select.default, x, 0, t),
                 (aten.gather.default, x, 1, t.reshape(2, 1)), (aten.index.Tensor, x, [torch.tensor([4])]),
                 (aten.index.Tensor, x, [torch.tensor([-5])])):  # fmt: skip
        with pytest.raises((RuntimeError, IndexError)):
            call[0](*call[1:])
        with pytest.raises((RuntimeError, IndexError)):
            run(str(call[0]), call[1:], {})


def test_where_index_tensors_put_their_axes():
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    i, j = torch.tensor([[0, 1, 1]]), torch.tensor([[2], [0]])
    check(aten.index.Tensor, x, [i, j])
    check(aten.index.Tensor, x, [None, j, i])
    check(aten.index.Tensor, x, [i, None, j])
    check(aten.index.Tensor, x, [None, i, None, j])
    check(aten.index.Tensor, x, [torch.tensor(1), None, torch.tensor(0)])


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll_loss_ignores_weighs_and_raises(reduction):
    x, w = torch.randn(5, 4), torch.rand(4)
    t = torch.tensor([1, -100, 3, 0, -100])
    for weight in (None, w):
        want = aten.nll_loss_forward(x, t, weight, reduction, -100)
        got = run("aten.nll_loss_forward.default", (x, t, weight, reduction, -100), {}, want)
        torch.testing.assert_close(got, want)
        grad = torch.ones_like(want[0])
        back = (grad, x, t, weight, reduction, -100, want[1])
        torch.testing.assert_close(run("aten.nll_loss_backward.default", back, {}), aten.nll_loss_backward(*back))
    with pytest.raises(IndexError):
        run("aten.nll_loss_forward.default", (x, torch.tensor([1, 2, 4, 0, 0]), None, reduction, -100), {})


def test_no_two_draws_are_one():
    ctx = Context(Builder())
    ctx._seed = (ctx.const(1, DType.i64), ctx.const(0, DType.i64))
    first, second = (LOWERINGS["aten.rand.default"](ctx, [4]) for _ in range(2))
    assert first.source is not second.source
    eager = Context(Builder(), rng="eager")
    assert LOWERINGS["aten.rand.default"](eager, [4]) is NotImplemented


def test_half_uniforms_stay_below_one():
    for dtype in (torch.bfloat16, torch.float16):
        u = run("aten.rand.default", ([4096],), {"dtype": dtype})
        assert float(u.min()) >= 0 and float(u.max()) < 1
        assert abs(float(u.float().mean()) - 0.5) < 0.02


def test_dropout_keeps_and_scales():
    x = torch.ones(4096)
    out, mask = run("aten.native_dropout.default", (x, 0.25, True), {})
    assert abs(float(mask.float().mean()) - 0.75) < 0.03
    assert torch.equal(out, mask.float() / 0.75)
    same(run("aten.native_dropout.default", (x, 0.25, False), {})[0], x)


def after(reader):
    return lambda t: reader(t * 1.01)


def test_what_jumps_sees_rounded_halves():
    """The fused evaluator keeps (x * 1.01) unrounded, but not for these readers."""
    x = torch.linspace(1.0, 3.0, 257).bfloat16()
    for reader in (
        lambda y: y.to(torch.int32),
        lambda y: y.to(torch.float8_e4m3fn),
        lambda y: y // 0.5,
        lambda y: y % 0.25,
        lambda y: torch.frac(y),
        lambda y: torch.cat([y, y]).to(torch.int32),
        lambda y: torch.cummax(y.flip(0), 0).indices,
    ):
        graph, _ = imported(after(reader), [x])
        (got,) = evaluate(graph, [x], dtype_mode="fused")
        want = reader(x * 1.01)
        assert got.dtype is want.dtype
        same(got.float(), want.float())
