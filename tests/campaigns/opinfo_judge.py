"""All graphs of one operator's samples: built as one C++ library, run on the values that eager's run had, and judged."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.emit.cpp import CppKernel
from plait.errors import BuildFailed
from plait.oracle.compare import FAIL, compare
from plait.oracle.reference import noise_of, reference
from plait.plan.layout import Layouts
from plait.runtime.build import CppSources, build_cpp
from plait.runtime.cache import cache_for
from plait.runtime.executable import Executable
from plait.runtime.link import Launch, link
from tests.campaigns.opinfo_trace import OPTIONS, Sample, Traced, copies, sample_of, through_dynamo, trace


@dataclass
class Outcome:
    """What became of one operator: its samples, those that ran through a plait kernel, reasons for eager, complaints."""

    name: str
    samples: int = 0
    native: int = 0
    eager: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """One word. "native": at least one kernel in every sample; "part": in some; "aten": in none."""
        if self.wrong or self.broke:
            return "wrong" if self.wrong else "broke"
        if not self.samples:
            return "empty"
        return "native" if self.native == self.samples else "part" if self.native else "aten"

    def line(self) -> str:
        """For people."""
        bad = [f"\n    WRONG {w}" for w in self.wrong[:4]] + [f"\n    BROKE {b}" for b in self.broke[:4]]
        return f"{self.name}: {self.state} {self.native}/{self.samples}" + "".join(bad)


@dataclass
class _Case:
    """A sample with its graphs."""

    shown: str
    graphs: list[Traced]


def run_entry(op: Any, dtype: torch.dtype, *, train: bool = False, limit: int | None = None) -> Outcome:
    """All samples of one operator, or the first `limit`."""
    out = Outcome(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))
    torch.manual_seed(0)
    cases: list[_Case] = []
    for given in list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=train), limit)):
        sample = sample_of(op, given, train)
        try:
            eager = sample.run(sample.fn)
        except Exception:  # eager itself refuses the sample (it has no gradient, say): nothing to compare with
            continue
        out.samples += 1
        shown = str([tuple(t.shape) for t in sample.tensors])
        if (case := _traced(out, sample, shown, eager)) is not None:
            cases.append(case)
    _build_and_judge(out, cases)
    return out


def _traced(out: Outcome, sample: Sample, shown: str, eager: Any) -> _Case | None:
    """The sample's graphs; None where AOT autograd has none and the sample went through torch.compile instead."""
    try:
        if not sample.is_plain():
            raise NotImplementedError("a tensor that is not dense")
        graphs, results, args = trace(sample)
    except Exception as error:
        _as_torch_compile_does(out, sample, shown, eager, error)
        return None
    # the graphs' own eager run is held against the operator's: decompositions and the split into forward and backward
    if not any(_draws(g.gm) for g in graphs):
        _compare_all(out, f"captured {shown}", (results, args), eager, lambda: _exactly(sample))
    return _Case(shown, graphs)


def _as_torch_compile_does(out: Outcome, sample: Sample, shown: str, eager: Any, error: Exception) -> None:
    whole = through_dynamo(sample)
    reason = f"not traceable: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:80]}"
    out.eager[reason] += 1
    out.eager.update(f"graph: {r[:100]}" for r in whole.reasons)
    if whole.broke:
        out.broke.append(f"torch.compile {shown}: {whole.broke[:300]}")
        return
    if whole.refused:
        out.eager[f"torch refuses: {whole.refused.partition(chr(10))[0][:80]}"] += 1
        return
    out.native += whole.kernels > 0
    if any(torch.Tag.nondeterministic_seeded in t.tags for t in _operators_of(sample)):
        return
    _compare_all(out, f"torch.compile {shown}", (whole.results, whole.args), eager, lambda: _exactly(sample))


def _operators_of(sample: Sample) -> set[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[Any] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        sample.run(sample.fn)
    return seen


def _exactly(sample: Sample) -> Any:
    wide = Sample(sample.fn, [t.double() if t.is_floating_point() else t for t in sample.tensors], sample.train)
    wide.tensors = [w.detach().requires_grad_(t.requires_grad) for w, t in zip(wide.tensors, sample.tensors)]
    return reference(lambda: wide.run(wide.fn), ())


# ------------------------------------------------------------------------------------------------------------- building
def _build_and_judge(out: Outcome, cases: Sequence[_Case]) -> None:
    graphs = [g for c in cases for g in c.graphs if g.compiled is not None]
    launches = {id(g): _launches(g) for g in graphs}
    every = [launch for g in graphs for launch in launches[id(g)]]
    kernels = [CppKernel(f"k{i}", tuple(p.program for p in launch.parts)) for i, launch in enumerate(every)]
    try:
        built = build_cpp(CppSources(kernels), cache_for(OPTIONS)) if kernels else []
    except Exception as error:
        out.broke.append(f"emit: {type(error).__name__}: {str(error)[:300]}")
        return
    rest = iter(built)
    for c in cases:
        mine = [(g, list(itertools.islice(rest, len(launches[id(g)])))) for g in c.graphs if g.compiled is not None]
        out.native += any(b for _, b in mine)
        for g in c.graphs:
            if g.broke:
                out.broke.append(f"{g.kind} {c.shown}: {g.broke[:400]}")
            elif g.fallback:
                out.eager[f"graph: {g.fallback[:100]}"] += 1
        for g, kernels_of in mine:
            with torch.no_grad():  # as AOT autograd calls graphs
                _judge(out, f"{g.kind} {c.shown}", g, kernels_of)


def _launches(g: Traced) -> list[Launch]:
    assert g.compiled is not None
    return [launch for launch in g.compiled.launches if launch.parts]


def _judge(out: Outcome, shown: str, g: Traced, built: Sequence[Any]) -> None:
    failed = next((b for b in built if isinstance(b, BuildFailed)), None)
    if failed is not None:
        out.broke.append(f"build {shown}: {failed.message[:300]}")
        return
    if g.outputs is None:  # compiled, but never run: the backward of nothing
        return
    assert g.compiled is not None
    graph, given = g.compiled.graph, copies(g.inputs)
    try:
        script = link(graph, g.compiled.plan.reading, g.compiled.launches, Layouts(graph))
        constants = [_attribute(g.gm, name) for _, name in sorted(graph.constants.items())]
        got = Executable(script, built, constants, lambda name: _attribute(g.gm, name))(*given)
    except Exception as error:
        out.broke.append(f"run {shown}: {type(error).__name__}: {str(error)[:300]}")
        return
    skip_outputs, skip_inputs = undetermined(g.gm)
    # what was never determined is compared with itself, but for its form
    given = [e if k in skip_inputs else v for k, (v, e) in enumerate(zip(given, g.inputs_after, strict=True))]
    for k in skip_outputs:
        e = g.outputs[k]
        if isinstance(e, torch.Tensor) and (got[k].shape, got[k].dtype) != (e.shape, e.dtype):
            out.wrong.append(f"{shown} out {k}: {got[k].dtype}{list(got[k].shape)}, eager {e.dtype}{list(e.shape)}")
    got = [g.outputs[k] if k in skip_outputs else v for k, v in enumerate(got)]
    run = _Whole(g)
    _compare_all(out, shown, (got, given), (g.outputs, g.inputs_after), run.exact, run.noise)


class _Whole:
    """The float64 run of a graph: its results and its arguments afterwards."""

    def __init__(self, g: Traced) -> None:
        self.g = g

    def run(self, *args: Any) -> Any:
        """The graph on any types."""
        args = tuple(copies(args))
        return list(self.g.gm(*args)), list(args)

    def exact(self) -> Any:
        """In double."""
        return reference(_plain(self.run), self.g.inputs)

    def noise(self, exact: Any) -> list[float]:
        """How far half an ulp in the inputs moves each leaf."""
        return noise_of(_plain(self.run), self.g.inputs, exact)


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: fn(*args)


def _attribute(gm: Any, name: str) -> Any:
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm


# -------------------------------------------------------------------------------------------------------------- judging
def _compare_all(
    out: Outcome,
    shown: str,
    got: Any,
    eager: Any,
    exact_of: Callable[[], Any],
    noise_of_exact: Callable[[Any], list[float]] | None = None,
) -> None:
    """Leaf by leaf; the float64 run is made only when some leaf is not eager's own value."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(eager)
    if len(ours) != len(theirs):
        out.wrong.append(f"{shown}: {len(ours)} results, eager has {len(theirs)}")
        return
    differ = [k for k, (a, b) in enumerate(zip(ours, theirs)) if not _identical(a, b)]
    if not differ:
        return
    try:
        whole = exact_of()
        exact = pytree.tree_leaves(whole)
    except Exception:  # no form in double
        whole, exact = None, []
    noise: list[float] = []
    for k in differ:
        a, b = _dense(ours[k]), _dense(theirs[k])
        wide = exact[k] if len(exact) == len(theirs) else b
        x = _dense(wide) if isinstance(wide, torch.Tensor) and isinstance(b, torch.Tensor) else b
        if isinstance(b, torch.Tensor) and x.shape != b.shape:
            x = b
        verdict = compare(a, b, x)
        if verdict.status == FAIL and whole is not None and noise_of_exact is not None:
            noise = noise or noise_of_exact(whole)
            verdict = compare(a, b, x, noise=noise[k])
        if verdict.status == FAIL:
            out.wrong.append(f"{shown} out {k}: {verdict.message[:250]}")


def _identical(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.dtype is not b.dtype or a.shape != b.shape or a.layout is not b.layout:
        return False
    a, b = _dense(a), _dense(b)
    same = a == b
    return bool((same | ((a != a) & (b != b))).all())


def _dense(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().dequantize() if x.is_quantized else x.detach()
    return (x if x.layout is torch.strided else x.to_dense()).resolve_conj().resolve_neg()


def undetermined(gm: Any) -> tuple[set[int], set[int]]:
    """Results and arguments of a graph that hang on random draws or on memory nobody has written."""
    loose: set[Any] = set()
    places = {n: k for k, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    arguments: set[int] = set()
    for n in gm.graph.nodes:
        if _is_loose(n.target) or any(i in loose for i in n.all_input_nodes):
            if n.op == "output":
                break
            loose.add(n)
            if n.target is torch.ops.aten.copy_.default and n.args[0] in places:
                arguments.add(places[n.args[0]])
    results = gm.graph.output_node().args[0]
    return {k for k, n in enumerate(results) if n in loose}, arguments


def _is_loose(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    base = target._schema.name.split("::")[1]
    return torch.Tag.nondeterministic_seeded in target.tags or base.startswith(("empty", "new_empty"))


def _draws(gm: Any) -> bool:
    return any(_is_loose(n.target) for n in gm.graph.nodes)
