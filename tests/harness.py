"""Runs a program in eager and compiled and compares everything a user can observe.

`agree(fn, call, call, ...)`: each call is a tuple of arguments; `fn` a function or a module. Compared are results (judged by
the verdict rule against float64, or bit for bit), dtypes, shapes, strides, structure, which tensors share memory or are one
object, arguments and module state after the call, and with `train` every gradient and the requires_grad flags.
`--backend NAME` of pytest runs the same tests on another backend, to see that a test itself is right.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.oracle.compare import compare
from plait.oracle.reference import reference

BACKEND: dict[int, str] = {0: "plait"}  # set by the conftest of tests/regress from --backend


@dataclass
class Expect:
    """How strict one test is. `exact`: bits, not a verdict. `observe(out, grads)`: compare what it returns, not the results
    (random programs). `may_raise`: an exception is accepted where a wrong result is not. `grad_mode`: grad on though no
    gradient is compared. `all_double`: the float64 reference ignores the program's own float casts."""

    train: bool = False
    exact: bool = False
    strides: bool = True
    grad_mode: bool = False
    may_raise: bool = False
    all_double: bool = False
    strict: bool = True
    dynamic: bool | None = None
    numerics: str | None = None
    max_graphs: int | None = None
    threads: int = 0
    observe: Callable[[Any, dict[str, Tensor]], Any] | None = None


@dataclass
class Seen:
    """What one call showed."""

    out: Any
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    after: Any = None
    alias: Any = None
    wants_grad: list[bool] = field(default_factory=list)


def agree(fn: Callable[..., Any], *calls: tuple[Any, ...], **how: Any) -> None:
    """Every call gives compiled what it gives in eager."""
    expect = Expect(**how)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    theirs, ours = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn, fn
    compiled = compiled_form(ours, expect)
    copies = [clone_all(c) for c in calls]
    exact_runs, eager_runs = [], []
    for i, call in enumerate(calls):
        judged = not expect.exact and expect.observe is None
        exact_runs.append(_reference_run(theirs, call, expect) if judged else None)
        eager_runs.append(run_once(theirs, theirs, call, expect, i))
    got_runs = _run_all(compiled, ours, copies, expect)
    for i, (eager, exact, got) in enumerate(zip(eager_runs, exact_runs, got_runs)):
        if isinstance(got, Exception):
            if expect.may_raise:
                continue
            raise AssertionError(f"call {i}: the compiled form raised {type(got).__name__}: {got}") from got
        _compare_seen(f"call {i}", eager, exact, got, expect)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0, "nothing was compiled"
    if expect.max_graphs is not None:
        assert graphs <= expect.max_graphs, f"{graphs} graphs were compiled, at most {expect.max_graphs} are needed"


def both_raise(fn: Callable[..., Any], *args: Any) -> None:
    """Eager raises; the compiled form must raise too: no number, no crash."""
    torch._dynamo.reset()
    copies = clone_all(args)
    with torch.no_grad():
        with _must_raise("eager"):
            fn(*args)
        with _must_raise("the compiled form"):
            compiled_form(fn, Expect(strict=False))(*copies)


@contextlib.contextmanager
def _must_raise(who: str) -> Any:
    try:
        yield
    except Exception:  # any kind will do: eager's own kinds differ from operator to operator
        return
    raise AssertionError(f"{who} did not raise")


def compiled_form(fn: Callable[..., Any], expect: Expect) -> Callable[..., Any]:
    """torch.compile with the backend under test."""
    if BACKEND[0] != "plait":
        return torch.compile(fn, backend=BACKEND[0], dynamic=expect.dynamic)
    from plait.api import backend

    options: dict[str, Any] = {"strict": expect.strict}
    if expect.numerics is not None:
        options["numerics"] = expect.numerics
    return torch.compile(fn, backend=backend, dynamic=expect.dynamic, options=options)


def _run_all(compiled: Any, owner: Any, calls: Sequence[Any], expect: Expect) -> list[Seen | Exception]:
    found: list[Any] = [None] * len(calls)

    def go(i: int) -> None:
        try:
            found[i] = run_once(compiled, owner, calls[i], expect, i)
        except Exception as error:  # reported by the caller, which knows whether it is allowed
            found[i] = error

    width = max(expect.threads, 1)
    for first in range(0, len(calls), width):
        batch = range(first, min(first + width, len(calls)))
        if expect.threads:
            workers = [threading.Thread(target=go, args=(i,)) for i in batch]
            for w in workers:
                w.start()
            for w in workers:
                w.join()
        else:
            go(first)
    return found


def run_once(call: Callable[..., Any], owner: Any, args: Any, expect: Expect, number: int = 0) -> Seen:
    """One call, with its backward if asked."""
    inputs = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
    named = [(f"argument {i}", t) for i, t in enumerate(inputs)]
    state = [*owner.named_parameters(), *owner.named_buffers()] if isinstance(owner, nn.Module) else []
    for _, t in named + state:
        if t.is_leaf and t.requires_grad:
            t.grad = None
    torch.manual_seed(1000 + number)
    with torch.set_grad_enabled(expect.train or expect.grad_mode):
        out = call(*args)
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    seen = Seen(pytree.tree_map(_snapshot, out), alias=_alias(outs, named + state))
    if expect.train:
        seen.wants_grad = [t.requires_grad for t in outs]
        loss = _loss(outs)
        if loss is not None:
            loss.backward()
        leaves = [(n, t) for n, t in named + state if t.is_leaf and t.requires_grad]
        seen.grads = {n: None if t.grad is None else _snapshot(t.grad) for n, t in leaves}
    if expect.observe is not None:
        seen.out = expect.observe(seen.out, seen.grads)
    seen.after = {n: _snapshot(t) for n, t in named + state}
    return seen


def _loss(outs: Sequence[Tensor]) -> Tensor | None:
    """A weighted sum of all results that carry a gradient, with another weight for every element."""
    total: Tensor | None = None
    for t in outs:
        if t.requires_grad:
            real = torch.view_as_real(t) if t.is_complex() else t
            wide = torch.float64 if real.dtype == torch.float64 else torch.float32
            weight = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=wide)[: real.numel()].reshape(real.shape)
            part = (real.to(wide) * weight).sum()
            total = part if total is None else total + part
    return total


def _reference_run(fn: Any, call: Any, expect: Expect) -> Seen:
    """The same in float64, from the same module state."""
    quiet = Expect(train=expect.train, grad_mode=expect.grad_mode)

    def program(*args: Any) -> Any:
        owner, rest = (args[0], args[1:]) if isinstance(fn, nn.Module) else (fn, args)
        seen = run_once(owner, owner, rest, quiet)
        return seen.out, seen.grads, seen.after

    args = (fn, *call) if isinstance(fn, nn.Module) else call
    return Seen(*reference(program, args, all_double=expect.all_double))


def _snapshot(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().resolve_conj().clone(memory_format=torch.preserve_format)


def clone_all(tree: Any) -> Any:
    """A copy of every tensor with its strides, offset and requires_grad; tensors that share memory still do."""
    storages: dict[int, Any] = {}

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        old = t.untyped_storage()
        new = storages.setdefault(old.data_ptr() or id(t), old.clone())
        made = torch.empty(0, dtype=t.dtype).set_(new, t.storage_offset(), t.shape, t.stride())
        return made.requires_grad_(t.requires_grad)

    return pytree.tree_map(one, tree)


def _alias(outs: Sequence[Tensor], named: Sequence[tuple[str, Tensor]]) -> list[Any]:
    """For each result: which inputs it shares memory with, which one it is, and which earlier results it overlaps."""
    places = [o.untyped_storage().data_ptr() if o.numel() else 0 for o in outs]
    known = [(n, t, t.untyped_storage().data_ptr() if t.numel() else 0) for n, t in named]
    return [
        (
            [n for n, _, p in known if p and p == place],
            [n for n, t, _ in known if t is o],
            [k for k in range(i) if place and places[k] == place],
        )
        for i, (o, place) in enumerate(zip(outs, places))
    ]


def _compare_seen(where: str, eager: Seen, exact: Seen | None, got: Seen, expect: Expect) -> None:
    if expect.observe is not None:
        assert got.out == eager.out, f"{where}: observed {got.out}, eager {eager.out}"
        return
    assert got.alias == eager.alias, f"{where}: (shares, is, overlaps) {got.alias}, eager {eager.alias}"
    assert got.wants_grad == eager.wants_grad, f"{where}: requires_grad {got.wants_grad}, eager {eager.wants_grad}"
    for kind in ("out", "grads", "after"):
        ours, form = pytree.tree_flatten(getattr(got, kind))
        theirs, their_form = pytree.tree_flatten(getattr(eager, kind))
        assert form == their_form, f"{where}: structure of {kind} is {form}, eager has {their_form}"
        wide = pytree.tree_leaves(getattr(exact, kind)) if exact is not None else [None] * len(ours)
        for k, (g, e, x) in enumerate(zip(ours, theirs, wide, strict=True)):
            name = f"{where}: {kind} {k}"
            if expect.exact or x is None:
                assert_same_bits(g, e, name, expect.strides and kind == "out")
                continue
            verdict = compare(g, e, x, strides=expect.strides and kind == "out", name=name)
            assert verdict.status != "FAIL", str(verdict)


def assert_same_bits(got: Any, eager: Any, name: str, strides: bool = False) -> None:
    """Equal in type, form and every value; NaN equals NaN, and the signs of zeros count."""
    if not isinstance(eager, Tensor):
        assert type(got) is type(eager) and (got == eager or got != got and eager != eager), (
            f"{name}: {got!r}, eager {eager!r}"
        )
        return
    assert got.dtype == eager.dtype, f"{name}: dtype {got.dtype}, eager {eager.dtype}"
    assert got.shape == eager.shape, f"{name}: shape {got.shape}, eager {eager.shape}"
    if strides:
        pairs = [(a, b) for a, b, n in zip(got.stride(), eager.stride(), eager.shape) if n > 1]
        assert all(a == b for a, b in pairs), f"{name}: strides {got.stride()}, eager {eager.stride()}"
    g, e = got, eager
    if e.dtype.is_floating_point and e.element_size() == 1:
        g, e = g.float(), e.float()
    same = g == e
    if e.dtype.is_floating_point:
        same = (same & (torch.signbit(g) == torch.signbit(e))) | (g.isnan() & e.isnan())
    assert bool(same.all()), (
        f"{name}: {int((~same).sum())} of {same.numel()} differ: {g[~same][:4]}, eager {e[~same][:4]}"
    )
