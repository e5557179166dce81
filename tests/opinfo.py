"""Lowerings against eager, sample by sample of torch's own operator database.

Every call that make_fx finds in a sample is lowered by itself on the values it really got, evaluated by the oracle and
compared with what the call returned. `python tests/opinfo.py [--dtype float32] [--only NAME] [--samples N]` prints what
is wrong and how many operators of the database have at least one native node in every sample.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from plait.frontend.context import LOWERINGS, Context, Tensor, as_read, to_dtype, whole
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import load_tables
from plait.ir import index as ix
from plait.ir.dtype import DType
from plait.ir.graph import Builder, Graph, Input, Layout, Output, Read, contiguous_strides
from plait.oracle.compare import FAIL
from plait.oracle.compare import compare as verdict_of
from plait.oracle.eval_graph import evaluate
from plait.oracle.reference import reference

RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform")


class NotNative(Exception):
    """A call that goes to ATen, with the reason."""


def _exprs(shape: Sequence[int]) -> tuple[ix.Expr, ...]:
    return tuple(ix.const(n) for n in shape)


def lower(name: str, args: Any, kwargs: Any, val: Any = None, **options: Any) -> tuple[Any, Graph, list[torch.Tensor]]:
    """The tree of lazy results of one call on real tensors, and a Graph that computes its leaves."""
    if name not in LOWERINGS:
        raise NotNative("no lowering")
    builder = Builder()
    ctx = Context(builder, **options)
    results = [v for v in pytree.tree_leaves(val) if isinstance(v, torch.Tensor)]
    ctx.expected = tuple((_exprs(v.shape), to_dtype(v.dtype)) for v in results)
    ctx._seed = (ctx.const(1234567, DType.i64), ctx.const(0, DType.i64))
    inputs: list[Input] = []
    values: list[torch.Tensor] = []

    def take(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return ix.const(int(x))
        if not isinstance(x, torch.Tensor):
            return x
        dtype = to_dtype(x.dtype)
        if dtype is None or x.layout is not torch.strided:
            raise NotNative(f"{x.dtype} {x.layout}")
        source = builder.node("input", _exprs(x.shape), dtype=dtype, name=f"a{len(inputs)}")
        inputs.append(Input(source, len(inputs), Layout(_exprs(x.stride()))))
        values.append(x)
        return whole(source)

    result = LOWERINGS[name](ctx, *pytree.tree_map(take, args), **pytree.tree_map(take, kwargs))
    if result is NotImplemented:
        raise NotNative(ctx.reason or "not implemented")
    outputs = []
    for k, t in enumerate(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)):
        r = as_read(t)
        read = Read(r.source, r.index, r.guard, r.fill, domain=t.shape)
        outputs.append(Output(f"o{k}", read, contiguous_strides(t.shape)))
    return result, Graph(tuple(inputs), tuple(outputs)), values


def run(name: str, args: Any, kwargs: Any, val: Any = None, mode: str = "eager", **options: Any) -> Any:
    """The call's results as the oracle evaluates them."""
    tree, graph, values = lower(name, args, kwargs, val, **options)
    got = iter(evaluate(graph, values, dtype_mode=mode))
    return pytree.tree_map(lambda t: next(got) if isinstance(t, Tensor) else t, tree)


@dataclass(frozen=True)
class How:
    """What to run: the evaluator's mode, gradients instead of results, core ATen as plait's users get it."""

    mode: str = "eager"
    grad: bool = False
    core: bool = True


@dataclass
class Tally:
    """What the calls of one sample came to."""

    native: int = 0
    extern: int = 0
    wrong: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)


class Checker(torch.fx.Interpreter):
    """Runs a traced sample eagerly and every call of it natively as well."""

    def __init__(self, module: torch.fx.GraphModule, tally: Tally, mode: str = "eager") -> None:
        super().__init__(module)
        self.tally, self.mode = tally, mode

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Eager's result; the native one is compared on the side."""
        if not isinstance(target, torch._ops.OpOverload) or str(target) not in LOWERINGS:
            if isinstance(target, torch._ops.OpOverload):
                self.tally.extern += 1
                self.tally.reasons[f"{target}: no lowering"] += 1
            return super().call_function(target, args, kwargs)
        kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        try:
            eager = super().call_function(target, args, kwargs)
        except Exception as error:
            self._must_fail(str(target), kept, error)
            raise
        try:
            got = run(str(target), args, kwargs, eager, self.mode)
        except NotNative as why:
            self.tally.extern += 1
            self.tally.reasons[f"{target}: {why}"] += 1
            return eager
        except Exception:
            self.tally.wrong.append(f"{target} {shown(args, kwargs)}\n{traceback.format_exc(limit=-4)}")
            return eager
        self.tally.native += 1
        if not any(w in str(target) for w in RANDOM) and "empty" not in str(target):
            self.compare(target, args, kwargs, got, eager)
        return eager

    def _must_fail(self, name: str, call: Any, error: Exception) -> None:
        try:
            run(name, *call)
        except Exception:
            return
        self.tally.wrong.append(f"{name} {shown(*call)}: eager raises {error!s:.80}, plait does not")

    def compare(self, target: Any, args: Any, kwargs: Any, got: Any, eager: Any) -> None:
        """Judge one call's results."""
        got_leaves, leaves = pytree.tree_leaves(got), pytree.tree_leaves(eager)
        try:
            exact = pytree.tree_leaves(reference(lambda *a: target(*a, **kwargs), args))
        except Exception:
            exact = [x.double() if isinstance(x, torch.Tensor) else x for x in leaves]
        if len(got_leaves) != len(leaves):
            self.tally.wrong.append(f"{target} {shown(args, kwargs)}: {len(got_leaves)} results, not {len(leaves)}")
            return
        for g, e, x in zip(got_leaves, leaves, exact, strict=True):
            if g is e is None or (isinstance(g, torch.Tensor) and isinstance(e, torch.Tensor) and _same(g, e)):
                continue
            verdict = verdict_of(g, e, x if isinstance(x, torch.Tensor) and x.shape == e.shape else e.double())
            if verdict.status == FAIL:
                self.tally.wrong.append(
                    f"{target} {shown(args, kwargs)}: {verdict}\n  got {g!r:.300}\n  eager {e!r:.300}"
                )


def check_call(target: Any, *args: Any, eager_form: Any = None, **kwargs: Any) -> None:
    """One call, native against eager (or another form of it, where this device has no such kernel); AssertionError with
    what is wrong, NotNative where it is ATen's."""
    tally = Tally()
    judge = Checker(torch.fx.GraphModule({}, torch.fx.Graph()), tally)
    eager = (eager_form or target)(*args, **kwargs)
    judge.compare(target, args, kwargs, run(str(target), args, kwargs, eager), eager)
    assert not tally.wrong, tally.wrong


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if not (
        a.is_floating_point()) else a.dtype is b.dtype and a.shape == b.shape and bool(
        ((a == b) | (a.isnan() & b.isnan())).all())  # fmt: skip


def shown(args: Any, kwargs: Any) -> str:
    """Arguments, tensors as dtype[shape]."""

    def one(x: Any) -> str:
        return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return f"{pytree.tree_map(one, args)} {pytree.tree_map(one, kwargs)}"


def check_sample(op: Any, sample: Any, tally: Tally, how: How) -> None:
    """Trace one sample and check every call of it."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> Any:
        full = list(flat)
        for k, t in zip(places, tensors, strict=True):
            full[k] = t
        x, args, kwargs = pytree.tree_unflatten(full, spec)
        if not how.grad:
            return op.op(x, *args, **kwargs)
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        for k, t in zip(places, leaves, strict=True):
            full[k] = t
        x, args, kwargs = pytree.tree_unflatten(full, spec)
        outs = [o for o in pytree.tree_leaves(op.op(x, *args, **kwargs)) if isinstance(o, torch.Tensor)]
        outs = [o for o in outs if o.requires_grad and o.is_floating_point()]
        wanted = [t for t in leaves if t.requires_grad]
        return torch.autograd.grad(outs, wanted, [torch.cos(o.detach()) for o in outs], allow_unused=True)

    tensors = [flat[k].detach() for k in places]
    traced = _trace(fn, tensors, decompositions() if how.core else {}, functional=not how.grad)
    Checker(traced, tally, how.mode).run(*tensors)


def _trace(fn: Any, tensors: list[torch.Tensor], table: Any, functional: bool) -> torch.fx.GraphModule:
    if functional:
        try:
            return make_fx(torch.func.functionalize(fn, remove="mutations"), decomposition_table=table)(*tensors)
        except Exception:  # an operator that functionalisation does not know
            pass
    return make_fx(fn, decomposition_table=table)(*tensors)


def entries(only: str = "") -> Iterator[Any]:
    """The operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    yield from (op for op in op_db if only in (op.name, ""))


def check_op(op: Any, dtype: torch.dtype, samples: int, how: How) -> list[Tally]:
    """One tally a sample; samples that cannot be traced are left out."""
    out: list[Tally] = []
    if dtype not in op.supported_dtypes("cpu"):
        return out
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), samples):
        tally = Tally()
        try:
            check_sample(op, sample, tally, how)
        except Exception as error:
            if not tally.wrong:
                continue
            tally.wrong.append(f"stopped: {error!s:.100}")
        out.append(tally)
    return out


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--whole", action="store_true", help="do not decompose to core ATen first")
    parser.add_argument("--grad", action="store_true", help="gradients")
    parser.add_argument("--reasons", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load_tables()
    how = How(options.mode, options.grad, not options.whole)
    native, total, wrong = 0, 0, 0
    reasons: collections.Counter[str] = collections.Counter()
    for op in entries(options.only):
        dtype = getattr(torch, options.dtype)
        if options.dtype == "float32" and dtype not in op.supported_dtypes("cpu"):
            dtype = torch.int64
        total += 1
        try:
            tallies = check_op(op, dtype, options.samples, how)
        except Exception as error:
            print(f"!! {op.name}: {error!s:.100}")
            continue
        native += bool(tallies) and all(t.native for t in tallies)
        for t in tallies:
            reasons.update(set(t.reasons))
        found = [w for t in tallies for w in t.wrong]
        wrong += bool(found)
        for w in found[:2]:
            print(f"-- {op.name}.{op.variant_test_name}: {w}")
    print(f"{total} operators, {native} with a native node in every sample, {wrong} with a wrong result")
    if options.reasons:
        for why, count in reasons.most_common():
            print(count, why)


if __name__ == "__main__":
    sys.exit(main())
