"""The comparison policy: what passes, what warns, what fails."""

from __future__ import annotations

import pytest
import torch

from plait.errors import Mismatch
from plait.oracle.compare import Step, check, check_call, compare, compare_many, reference

torch.manual_seed(0)
X = torch.randn(64, 256)


def softmax_wrong(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.max())
    return e / (e.sum(-1, keepdim=True) + 1e-3)


def test_same_result_passes_and_reordered_sum_passes() -> None:
    exact = X.double().sum(-1)
    eager = X.sum(-1)
    assert compare(eager, eager, exact).status == "PASS"
    other = X.flip(1).reshape(64, 16, 16).sum(-1).sum(-1)
    assert compare(other, eager, exact).status in ("PASS", "WARN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_better_than_eager_passes(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    exact = x.double().exp().sqrt()
    assert compare(exact.to(dtype), x.exp().sqrt(), exact).status == "PASS"


def test_wrong_values_fail_with_the_worst_index() -> None:
    eager, exact = torch.softmax(X, -1), torch.softmax(X.double(), -1)
    v = compare(softmax_wrong(X), eager, exact)
    assert v.status == "FAIL" and v.worst is not None and v.e_plait > v.e_eager
    one = eager.clone()
    one[3, 7] += 1e-4
    v = compare(one, eager, exact)
    assert v.status == "FAIL" and v.worst == (3, 7)
    with pytest.raises(Mismatch, match="FAIL"):
        check(one, eager, exact)


def test_accumulating_in_bf16_fails() -> None:
    x = X.bfloat16()
    acc = torch.zeros(64, dtype=torch.bfloat16)
    for k in range(256):
        acc = acc + x[:, k]
    assert compare(acc, x.sum(-1), x.double().sum(-1)).status == "FAIL"


def test_form_must_be_equal() -> None:
    e = X
    d = X.double()
    assert compare(X.half(), e, d).status == "FAIL"
    assert compare(X[:1], e, d).status == "FAIL"
    assert compare(X.t().contiguous().t(), e, d).status == "PASS"
    assert compare(X.t().contiguous().t(), e, d, strides=True).status == "FAIL"
    # the stride of a dimension of size 1 addresses nothing
    a = torch.randn(1, 4)
    assert compare(a.as_strided((1, 4), (9, 1)), a, a.double(), strides=True).status == "PASS"


def test_integers_are_exact_but_for_declared_steps() -> None:
    pre = torch.tensor([1.0, 2.0 - 2**-24, 5.5], dtype=torch.float64)
    eager, got = torch.tensor([1, 1, 5]), torch.tensor([1, 2, 5])
    assert compare(got, eager, eager).status == "FAIL"
    v = compare(got, eager, eager, steps=[Step(pre, pre.round(), torch.float32)])
    assert v.status == "PASS" and v.explained == 1
    assert compare(got + 1, eager, eager, steps=[Step(pre, pre.round(), torch.float32)]).status == "FAIL"


def test_nan_and_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    exact = torch.tensor([1.0, inf, nan, 70000.0], dtype=torch.float64)
    eager = exact.half()  # 70000 is inf in half
    assert compare(eager.clone(), eager, exact).status == "PASS"
    assert compare(torch.tensor([1.0, inf, 0.0, inf]).half(), eager, exact).status == "FAIL"
    assert compare(torch.tensor([1.0, -inf, nan, inf]).half(), eager, exact).status == "FAIL"
    overflowed = torch.tensor([inf, 1.0]).half()
    right = torch.tensor([250.0, 1.0])
    assert compare(right.half(), overflowed, right.double()).status == "WARN"
    assert compare(torch.tensor([3.0, 1.0]).half(), overflowed, right.double()).status == "FAIL"


def test_structures() -> None:
    tree = {"a": [X, 3], "b": (None, 2.5)}
    wide = {"a": [X.double(), 3], "b": (None, 2.5)}
    assert {v.status for v in compare_many(tree, tree, wide)} == {"PASS"}
    assert compare_many([X], (X,), (X.double(),))[0].status == "FAIL"
    assert any(v.status == "FAIL" for v in compare_many({"a": [X, 4], "b": (None, 2.5)}, tree, wide))


def test_reference_runs_a_copy_in_double() -> None:
    m = torch.nn.Sequential(torch.nn.Linear(256, 8), torch.nn.BatchNorm1d(8))
    out = reference(m, [X])
    assert out.dtype is torch.float64 and m[0].weight.dtype is torch.float32
    assert float(m[1].running_mean.abs().sum()) == 0
    assert reference(m[0].forward, [X]).dtype is torch.float64

    def mixes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.to(torch.float32)

    w = torch.randn(256, 3)
    assert torch.equal(reference(mixes, [X, w]), X.double() @ w.double())


def test_reference_keeps_the_programs_own_roundings_and_no_others() -> None:
    x = X[:4]

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.1).to(torch.bfloat16).to(torch.float32) + 1

    exact = reference(round_trip, [x])
    assert exact.dtype is torch.float64
    assert torch.equal(exact, (x.double() * 1.1).bfloat16().double() + 1)
    assert compare(x * 1.1 + 1, round_trip(x), exact).status == "FAIL"
    assert torch.equal(reference(round_trip, [x], all_double=True), x.double() * 1.1 + 1)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.half() * 3, -1).float()

    # only the cast rounds: the product and the softmax, half in eager, are exact in the reference
    exact = reference(narrow, [x])
    assert torch.equal(exact, torch.softmax(x.half().double() * 3, -1))
    assert compare(torch.softmax(x.half().float() * 3, -1), narrow(x), exact).status == "PASS"


def test_reference_of_a_program_that_looks_at_bits() -> None:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return (x.float().view(torch.int32) & 1).double().mean()

    assert float(reference(bits, [X])) == float(bits(X))


def test_check_call_sees_values_arguments_and_aliasing() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.mul_(2)
        return [torch.softmax(x, -1), x[0], x.sum()]

    check_call(fn, fn, [X, X[:2].clone()])

    def forgets(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.softmax(x, -1), x[0], x.sum()]

    def copies(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.mul_(2)
        return [torch.softmax(x, -1), x[0].clone(), x.sum()]

    def roughly(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.mul_(2)
        return [torch.softmax(x * (1 + 3e-6), -1), x[0], x.sum()]

    for wrong, match in ((forgets, "arg1"), (copies, "aliasing"), (roughly, "out0")):
        with pytest.raises(Mismatch, match=match):
            check_call(wrong, fn, [X, X[:2].clone()])
