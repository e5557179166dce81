"""Promotion against torch's own, over every pair of types and priorities."""

import itertools
import math

import pytest
import torch

from plait.frontend.context import Context, from_dtype, whole
from plait.frontend.promote import Unlowered, fits, join, result_dtype
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder

TYPES = [d for d in DType if d not in (DType.f8e4m3, DType.f8e5m2, DType.other)]


def _operand(ctx, dtype, ndim):
    return whole(ctx.builder.node("input", (ix.const(2),) * ndim, dtype=dtype, name="x"))


def test_join_is_promote_types():
    for a, b in itertools.product(TYPES, TYPES):
        assert from_dtype(join(a, b)) is torch.promote_types(from_dtype(a), from_dtype(b))


@pytest.mark.parametrize("ranks", [(1, 0), (0, 1), (0, 0), (2, 1)])
def test_result_dtype_of_tensors(ranks):
    ctx = Context(Builder())
    for a, b in itertools.product(TYPES, TYPES):
        x, y = (torch.ones((2,) * n, dtype=from_dtype(d)) for n, d in zip(ranks, (a, b), strict=True))
        got = result_dtype(_operand(ctx, a, ranks[0]), _operand(ctx, b, ranks[1]))
        assert from_dtype(got) is torch.result_type(x, y), (a, b)


@pytest.mark.parametrize("number", [True, 3, 0.5])
@pytest.mark.parametrize("rank", [0, 2])
def test_result_dtype_with_numbers(number, rank):
    ctx = Context(Builder())
    for a in TYPES:
        want = torch.result_type(torch.ones((2,) * rank, dtype=from_dtype(a)), number)
        assert from_dtype(result_dtype(_operand(ctx, a, rank), number)) is want, a


def test_a_symint_counts_as_a_python_integer():
    ctx = Context(Builder())
    assert result_dtype(_operand(ctx, DType.i8, 1), ix.sym("s0")) is DType.i8
    assert result_dtype(_operand(ctx, DType.b1, 1), ix.sym("s0")) is DType.i64


@pytest.mark.parametrize("dtype", [DType.f8e4m3, DType.f8e5m2, DType.other])
def test_storage_formats_take_no_part(dtype):
    ctx = Context(Builder())
    with pytest.raises(Unlowered):
        result_dtype(_operand(ctx, dtype, 1), 1)


NUMBERS = [0, -1, 255, 256, 127, -129, -255, -256, 2**40, 1.5, -0.0, 1e30, 1e300, float("inf"), float("nan"), True]


def test_fits_is_the_checked_conversion_of_masked_fill():
    for dtype, v in itertools.product(TYPES, NUMBERS):
        # floats into integers are truncated before the check there
        if dtype is DType.b1 or (dtype.is_int and isinstance(v, float) and math.isfinite(v) and not v.is_integer()):
            continue
        assert fits(v, dtype) == _torch_takes(v, dtype), (v, dtype)


def _torch_takes(v, dtype):
    x = torch.zeros(2, dtype=from_dtype(dtype))
    try:
        x.masked_fill(torch.tensor([True, False]), v)
    except (RuntimeError, ValueError):
        return False
    return True
