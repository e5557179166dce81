"""Executable: slots, sizes early and late, ATen calls with views, returns, lifetimes, faults, threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plait.errors import InternalError
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Builder, Graph, Input, Layout, Read, contiguous_strides, identity
from plait.runtime import executable as ex
from plait.runtime.calls import inplace_form
from plait.runtime.executable import Executable
from plait.runtime.guarded import boxed
from plait.runtime.kernel import Launch, Messages, Slots, raise_fault
from plait.runtime.tune import Tuned

N, M = ix.sym("n"), ix.sym("m")


class PythonKernel:
    """A kernel made of torch calls."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.binds = fn, 0

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> Launch:
        self.binds += 1

        def launch(slots: Slots) -> None:
            code = self.fn(*[slots[b] for b in buffers], *symbols)
            if isinstance(code, int) and code:
                raise_fault(code, messages)

        return launch


def shape(*dims: Any) -> tuple[ix.Expr, ...]:
    return tuple(ix.to_expr(d) for d in dims)


def alloc(slot: int, *dims: Any, dtype: DType = DType.f32) -> ex.AllocStep:
    s = shape(*dims)
    return ex.AllocStep(slot, s, contiguous_strides(s), dtype, "cpu")


def script(steps: Sequence[Any], returns: Sequence[Any], **fields: Any) -> ex.Script:
    given = {"arity": 1, "slots": 8, "inputs": (ex.InputSlot(0, 0),)}
    return ex.Script(**{**given, **fields}, steps=tuple(steps), returns=tuple(returns))


def call(*args: Any, **kwargs: Any) -> Any:
    return ("call", ("tuple", args), ("dict", tuple(kwargs.items())))


def test_kernel_runs_between_allocation_and_return() -> None:
    add = PythonKernel(lambda x, out: out.copy_(x + 1))
    run = Executable(script([alloc(1, 2, 3), ex.KernelStep(0, (0, 1))], [ex.SlotOut(1)]), [add])
    for _ in range(3):
        x = torch.randn(2, 3)
        assert torch.equal(run(x)[0], x + 1)
    assert add.binds == 1


def test_sizes_are_worked_out_once_a_set() -> None:
    fill = PythonKernel(lambda out, n, twice: out.fill_(n + twice))
    steps = [alloc(1, N, 2), ex.KernelStep(0, (1,), (N, N * 2))]
    bindings = {"n": ("size", 0, 0), "m": ("derived", N + 1)}
    run = Executable(script(steps, [ex.SlotOut(1), ex.ScalarOut(M)], bindings=bindings), [fill])
    for n in (3, 5, 3, 5, 4):
        out, m = run(torch.empty(n, 7))
        assert out.shape == (n, 2)
        assert torch.equal(out, torch.full((n, 2), 3.0 * n))
        assert m == n + 1
    assert fill.binds == 3


def test_kept_sizes_are_bounded() -> None:
    run = Executable(script([alloc(1, N)], [ex.SlotOut(1)], bindings={"n": ("size", 0, 0)}), [])
    for n in range(200):
        assert run(torch.empty(n))[0].shape == (n,)
    assert len(run._closed) <= 64


def test_data_dependent_sizes_reach_later_steps_and_returns() -> None:
    steps = [
        ex.ExternStep("aten.nonzero.default", call(Arg(0)), (ex.OperandView(0, whole=True),), (1,)),
        alloc(2, N, N + 1),
        ex.KernelStep(0, (2,), (N,)),
        ex.FreeStep(1),
    ]
    bindings = {"n": ("slot", 1, 0), "m": ("derived", N * 10)}
    returns = [ex.SlotOut(2), ex.ScalarOut(M), ex.ViewOut(2, shape(N), shape(N + 1))]
    fill = PythonKernel(lambda out, n: out.fill_(n))
    run = Executable(script(steps, returns, bindings=bindings), [fill])
    for values in ([1.0, 0, 2], [0.0, 0, 0], [1.0, 1, 1]):
        n = int(torch.tensor(values).count_nonzero())
        out, m, column = run(torch.tensor(values))
        assert torch.equal(out, torch.full((n, n + 1), float(n)))
        assert m == 10 * n
        assert column.shape == (n,)
        assert n == 0 or column.data_ptr() == out.data_ptr()


def test_extern_gets_strided_operands_and_keywords() -> None:
    views = (
        ex.OperandView(0, shape(3, 2), shape(1, 3), ix.const(3)),
        ex.OperandView(0, shape(2, 3), shape(3, 1), ix.const(3)),
    )
    steps = [
        ex.ExternStep("aten.mm.default", call(Arg(0), Arg(1)), views, (1,)),
        ex.ExternStep(
            "aten.add.Tensor", call(Arg(0), Arg(0), alpha=2), (ex.OperandView(1, whole=True),), (2,), "opaque"
        ),
        ex.ExternStep(
            "aten.cat.default",
            call(("list", (Arg(0), Arg(1))), 1),
            tuple(ex.OperandView(k, whole=True) for k in (1, 2)),
            (3,),
        ),
        ex.ExternStep("aten.topk.default", call(Arg(0), 2), (ex.OperandView(3, whole=True),), (None, 4)),
    ]
    x = torch.randn(4, 3)
    base = torch.cat([torch.zeros(1, 3), x])[1:]  # the argument itself starts at an offset
    assert base.storage_offset() == 3
    got = Executable(script(steps, [ex.SlotOut(3), ex.SlotOut(4)]), [])(base)
    a, b = x.as_strided((3, 2), (1, 3), 3), x[1:3]
    want = torch.cat([a @ b, (a @ b) * 3], 1)
    torch.testing.assert_close(got[0], want)
    assert torch.equal(got[1], want.topk(2)[1])


def test_result_with_other_strides_than_promised_is_copied() -> None:
    promised = ((shape(2, 3), shape(1, 2)),)
    one = ex.OperandView(0, whole=True)
    clone = ex.ExternStep("aten.clone.default", call(Arg(0)), (one,), (1,), expects=promised)
    out = Executable(script([clone], [ex.SlotOut(1)]), [])(x := torch.randn(2, 3))[0]
    assert out.stride() == (1, 2)
    assert torch.equal(out, x)


@pytest.mark.parametrize("target", ["aten._to_sparse.default", "aten._to_sparse_csr.default"])
def test_sparse_result_has_no_strides_to_settle(target: str) -> None:
    expects = ((shape(4, 3), shape(3, 1)),)
    operand = ex.OperandView(0, whole=True)
    step = ex.ExternStep(target, call(Arg(0)), (operand,), (1,), "opaque", None, "", expects)
    x = torch.randn(4, 3).relu()
    assert torch.equal(Executable(script([step], [ex.SlotOut(1)]), [])(x)[0].to_dense(), x)


def test_inplace_call_writes_into_its_operand() -> None:
    steps = [
        ex.ExternStep(
            "aten.index_put.default",
            call(Arg(0), ("list", (Arg(1),)), Arg(2), False),
            (
                ex.OperandView(0, shape(2, 3), shape(3, 1), ix.const(3)),
                *(ex.OperandView(k, whole=True) for k in (1, 2)),
            ),
            (3,),
            "scatter",
            inplace=0,
        )
    ]
    inputs = tuple(ex.InputSlot(k, k) for k in range(3))
    run = Executable(script(steps, [ex.SlotOut(3)], arity=3, inputs=inputs), [])
    x, rows, values = torch.zeros(3, 3), torch.tensor([1]), torch.ones(1, 3)
    out = run(x, rows, values)[0]
    assert x.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert out.data_ptr() == x[1:].data_ptr()
    assert inplace_form("aten._unsafe_index_put.default") == "aten.index_put_.default"
    with pytest.raises(InternalError, match="first argument"):
        Executable(
            script(
                [ex.ExternStep("aten.add.Tensor", call(1, Arg(0)), (ex.OperandView(0, whole=True),), (1,), inplace=0)],
                [],
            ),
            [],
        )(x)


def test_mutation_is_written_back_and_arguments_come_back_as_they_are() -> None:
    steps = [
        alloc(1, 3),
        ex.KernelStep(0, (0, 1)),
        ex.CopyStep(ex.OperandView(0, whole=True), ex.OperandView(1, whole=True)),
    ]
    run = Executable(
        script(steps, [ex.InputOut(0), ex.NoneOut(), ex.ValueOut(7), ex.ItemOut(2), ex.InputOut(1)], arity=2,
               inputs=(ex.InputSlot(0, 0), ex.InputSlot(1, 2, DType.f64))),
        [PythonKernel(lambda x, out: out.copy_(x * 2))],
    )  # fmt: skip
    x = torch.ones(3, requires_grad=True)
    out = run(x, 0.1)
    assert out[0] is x
    assert out[1:] == [None, 7, 0.1, 0.1]
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_constants_follow_the_arguments() -> None:
    add = ex.ExternStep(
        "aten.add.Tensor", call(Arg(0), Arg(1)), tuple(ex.OperandView(k, whole=True) for k in (0, 1)), (2,)
    )
    s = script([add], [ex.SlotOut(2)], arity=2, inputs=(ex.InputSlot(0, 0), ex.InputSlot(1, 1)))
    run = Executable(s, [], constants=(torch.full((2,), 5.0),))
    assert run(torch.ones(2))[0].tolist() == [6.0, 6.0]
    with pytest.raises(InternalError, match="arguments"):
        run(torch.ones(2), torch.ones(2))


def test_arguments_and_dead_slots_are_released_during_the_run() -> None:
    seen: list[bool] = []
    refs: list[Any] = []
    steps = [
        ex.ExternStep("aten.neg.default", call(Arg(0)), (ex.OperandView(0, whole=True),), (1,)),
        ex.KernelStep(0, (1,)),
        ex.FreeStep(0),
        ex.FreeStep(1),
        ex.KernelStep(1, ()),
    ]
    kernels = [
        PythonKernel(lambda x: refs.append(weakref.ref(x))),
        PythonKernel(lambda: seen.extend(r() is None for r in refs)),
    ]
    run = boxed(Executable(script(steps, []), kernels))
    args = [torch.randn(3)]
    refs.append(weakref.ref(args[0]))
    run(args)
    assert not args
    assert seen == [True, True]


def written_over(kernel: Any = None) -> Executable:
    """Slot 1 is 2 * argument, then slot 2 is slot 1 plus one, in its place."""
    double = PythonKernel(lambda x, t: t.copy_(x).mul_(2))
    add = kernel or PythonKernel(lambda t, u: torch.add(t, 1, out=u))
    steps = [
        alloc(1, 4),
        ex.KernelStep(0, (0, 1)),
        ex.AllocStep(2, shape(2, 2), contiguous_strides(shape(2, 2)), DType.f32, "cpu", 1, 1),
        ex.KernelStep(1, (1, 2)),
        ex.FreeStep(1),
    ]
    return Executable(script(steps, [ex.SlotOut(2)]), [double, add])


def test_a_result_is_written_over_what_nobody_needs() -> None:
    where: list[tuple[int, int]] = []

    def add(t: torch.Tensor, u: torch.Tensor) -> None:
        where.append((t.data_ptr(), u.data_ptr()))
        u.copy_(t.view(2, 2) + 1)

    (out,) = written_over(PythonKernel(add))(torch.ones(4))
    assert torch.equal(out, torch.full((2, 2), 3.0)) and out._base is None
    assert where == [(out.data_ptr(), out.data_ptr())]


def test_what_somebody_holds_is_not_written_over() -> None:
    """A tensor over the memory, or another name of the tensor."""
    kept: list[torch.Tensor] = []
    for keep in (lambda t: t, lambda t: t.view(2, 2), lambda t: t.detach()):
        kept.clear()

        def double(x: torch.Tensor, t: torch.Tensor) -> None:
            kept.append(keep(t.copy_(x).mul_(2)))  # noqa: B023

        run = written_over(PythonKernel(lambda t, u: u.copy_(t.view(2, 2) + 1)))
        run.kernels[0].fn = double  # type: ignore[attr-defined]
        (out,) = run(torch.ones(4))
        assert torch.equal(out, torch.full((2, 2), 3.0)) and torch.equal(kept[0].flatten(), torch.full((4,), 2.0))


def test_a_kernel_that_is_being_timed_writes_over_nothing() -> None:
    """It runs again and again on the same values."""
    add = PythonKernel(lambda t, u: u.copy_(t.view(2, 2) + 1))
    tuned = Tuned([add, add], ["a", "b"])
    run = written_over(tuned)
    seen: list[bool] = []

    def several(launches: Any, slots: Any) -> int:
        seen.append(slots[1].data_ptr() == slots[2].data_ptr())
        for go in (*launches, *launches):
            go(slots)
        tuned.choice = 1
        return 1

    tuned._choose = several  # type: ignore[method-assign]
    assert torch.equal(run(torch.ones(4))[0], torch.full((2, 2), 3.0))
    assert torch.equal(run(torch.ones(4))[0], torch.full((2, 2), 3.0))
    assert seen == [False]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (2, IndexError, "row out of range"),
        (1001, IndexError, "token out of range"),
        (999, RuntimeError, "ZeroDivisionError"),
    ],
)
def test_return_codes_raise_what_eager_raises(code: int, kind: type[Exception], words: str) -> None:
    messages = (("", "row out of range"), ("token out of range",))
    run = Executable(script([ex.KernelStep(0, (0,), (), messages)], []), [PythonKernel(lambda x: code)])
    with pytest.raises(kind, match=words):
        run(torch.ones(1))


def test_group_that_could_not_be_built_is_evaluated() -> None:
    b = Builder()
    x = b.node("input", shape(2, 3), dtype=DType.f32, name="x")
    e = b.node("exp", x.axes, [Read(x, identity(x.axes))])
    total = b.node("sum", x.axes, [Read(e, identity(e.axes))], reduce=1)
    graph = Graph((Input(x, 0, Layout(contiguous_strides(x.axes))),), ())
    steps = [alloc(1, 2), ex.EagerStep(graph, ((x, 0),), (total,), (1,), reason="no compiler")]
    given = torch.randn(2, 3)
    out = Executable(script(steps, [ex.SlotOut(1)]), [])(given)[0]
    torch.testing.assert_close(out, given.exp().sum(-1))


def test_lazily_negated_argument_is_made_real() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    out = Executable(script([alloc(1, 3), ex.KernelStep(0, (0, 1))], [ex.SlotOut(1)]),
                     [PythonKernel(lambda x, out: 1000 * x.is_neg() or out.copy_(x) is None)])(x)[0]  # fmt: skip
    torch.testing.assert_close(out, -z.imag)


def test_threads_do_not_disturb_each_other() -> None:
    steps = [alloc(1, N, 64), ex.KernelStep(0, (0, 1)), alloc(2, N), ex.KernelStep(1, (1, 2)), ex.FreeStep(1)]
    kernels = [PythonKernel(lambda x, out: out.copy_(x * 2)), PythonKernel(lambda x, out: out.copy_(x.sum(1)))]
    run = Executable(script(steps, [ex.SlotOut(2)], bindings={"n": ("size", 0, 0)}), kernels)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in range(50):
                x = torch.full((1 + (seed + k) % 5, 64), float(seed))
                assert run(x)[0].tolist() == [128.0 * seed] * x.shape[0]
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
