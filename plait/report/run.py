"""explain: compile a program while watching, run it once, and report what was recorded.

With a `target` nothing is built for this machine: every captured graph is planned for that device, its kernels are emitted and
compiled for it where that needs no card, and the graph itself runs in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait.api import backend_with
from plait.compiler import Compiled, all_levels, compile_graph, explained, imported, telling
from plait.diagnose.program import copies, raises_in_eager, user_frame
from plait.diagnose.tap import Inside
from plait.emit.cpp import CppKernel
from plait.emit.triton import TritonSource, emit_triton
from plait.emit.writer import identifier
from plait.errors import BuildFailed, CompileError, LowerFailed, PlaitError, UserError
from plait.frontend.baseline import Operator, operators
from plait.frontend.capture import user_line
from plait.options import Options
from plait.plan.device import LIMITS, SPECS
from plait.plan.layout import Layouts
from plait.report.collect import Measured, collect
from plait.report.facts import Fallback, GraphFacts, Resources, Totals, sum_totals
from plait.report.report import Report
from plait.report.roofline import ceilings_of
from plait.runtime import report
from plait.runtime.binary import Usage, usage_of, usages_for
from plait.runtime.build import CppSources, build_cpp, f8_saturates
from plait.runtime.cache import cache_for
from plait.runtime.link import link
from plait.runtime.tune import Tuned

_NO_LIMIT = 1 << 20


@dataclass
class _Seen:
    """A graph on its way through the compiler."""

    record: report.CompileRecord
    operators: tuple[Operator, ...]
    line: str
    measured: dict[str, Measured] = field(default_factory=dict)


def explain(
    fn: Callable[..., Any],
    *args: Any,
    train: bool = False,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compile `fn(*args)`, run it once, and report what was fused, what was not and why, and what that costs.

    `train`: with its backward (from the sum of its results). `target`: plan and compile for a device that need not be here:
    h100, h200, a100, l40s, b200 or cpu; times are predictions then. `options`: as for plait.compile. Raises UserError where the
    program itself raises."""
    return explain_calls(fn, [args], train=train, target=target, options=options)


def explain_calls(
    fn: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    *,
    train: bool = False,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """explain for several calls, one after another: a call of other shapes may be compiled anew. `name`: of the program; `say`
    is told what is being compiled."""
    if target is not None and target not in SPECS:
        raise UserError(f"there is no target {target!r}", hint=f"targets: {', '.join(SPECS)}")
    watch = _Watch(Options.make(None, options), target, say)
    broke = dict(torch._dynamo.utils.counters["graph_break"])
    _run_calls(watch, fn, calls, train)
    after = torch._dynamo.utils.counters["graph_break"]
    graphs = tuple(watch.facts(s) for s in watch.seen)
    device = target or watch.device()
    return Report(
        program=name or _name(fn),
        target=device,
        predicted=target is not None,
        train=train,
        graphs=graphs,
        totals=sum_totals([g.totals for g in graphs]),
        breaks=tuple(_one_line(why) for why, n in after.items() if n > broke.get(why, 0)),
        ceilings=ceilings_of(SPECS[device]),
        _inside=_inside(fn, calls, train, watch),
    )


def run_calls(fn: Callable[..., Any], calls: Sequence[Sequence[Any]], train: bool, options: Options) -> None:
    """Compile a program anew and run its calls once, with the backward if `train`; what goes wrong is said as explain says it."""
    _run_calls(_Watch(options, None), fn, calls, train)


def _run_calls(watch: _Watch, fn: Callable[..., Any], calls: Sequence[Sequence[Any]], train: bool) -> None:
    run = watch.compiled(fn)
    # each report compiles anew, whatever was compiled of this code before
    with torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
        for args in calls:
            _watched_call(fn, run, _with_gradients(fn, args) if train else args, train)


def _inside(fn: Callable[..., Any], calls: Sequence[Sequence[Any]], train: bool, watch: _Watch) -> Inside:
    """The program, to be run again when somebody looks into a kernel: on copies, and without a trace in its gradients."""
    plain = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", None) or fn
    owned = list(plain.parameters()) if isinstance(plain, torch.nn.Module) else []

    def drive(compiled: Callable[[Any], Callable[..., Any]]) -> None:
        run = compiled(plain)
        kept = [p.grad for p in owned]
        for args in calls:
            for p in owned:
                p.grad = None
            _call(run, _with_gradients(plain, copies(args)) if train else copies(args), train)
        for p, grad in zip(owned, kept, strict=True):
            p.grad = grad

    return Inside(watch.options, drive, watch.target)


def _watched_call(fn: Callable[..., Any], run: Callable[..., Any], args: Sequence[Any], train: bool) -> None:
    """Run the compiled program; where it raises, eager says whose fault it is."""
    try:
        _call(run, args, train)
    except PlaitError:
        raise
    except Exception as error:  # Dynamo wraps what a program raises, and what its backend does
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, UserError):
            raise inner from error
        _raise_if_eager_does(fn, args, train)
        words = f"{type(error).__name__}: {_one_line(str(error))}"
        hint = "--debug shows the traceback; please report it where plait is in it"
        raise CompileError(f"eager runs the program, torch.compile does not: {words}", hint=hint) from error


def _call(fn: Callable[..., Any], args: Sequence[Any], train: bool) -> None:
    with nullcontext() if train else torch.no_grad():
        out = fn(*args)
        if train:
            wanted = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
            if not wanted:
                raise UserError("no result of the program has a gradient", hint="explain it without train")
            torch.stack([t.float().sum() for t in wanted]).sum().backward()  # type: ignore[no-untyped-call]


def _with_gradients(fn: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with gradients asked of all floats among them where neither they nor a module want any."""
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        tensors += fn.parameters()
    if any(t.requires_grad for t in tensors):
        return tuple(args)
    return tuple(
        pytree.tree_map(
            lambda t: (
                t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            ),
            list(args),
        )
    )


def _raise_if_eager_does(fn: Callable[..., Any], args: Sequence[Any], train: bool) -> None:
    try:
        _call(fn, args, train)
    except Exception as error:  # the program's own failure, whatever it is
        words = f"{type(error).__name__}: {_one_line(str(error))}"
        raise raises_in_eager(words, user_frame(error)) from error


def _one_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", "") or type(fn).__name__)


class _Watch:
    """A backend that keeps what it compiled."""

    def __init__(self, options: Options, target: str | None, say: Callable[[str], None] = lambda line: None) -> None:
        self.options, self.target, self.say = options, target, say
        self.seen: list[_Seen] = []

    def compiled(self, fn: Any) -> Callable[..., Any]:
        """The program under this backend; of one that is compiled already, what was compiled."""
        inner = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", None) or fn
        spec = SPECS[self.target] if self.target is not None else None
        made = torch.compile(
            inner, backend=lambda gm, inputs: backend_with(self.compile, self.options, gm, inputs, spec)
        )
        assert callable(made)
        return made

    def compile(self, gm: Any, inputs: Sequence[Any], options: Options, *, kind: str) -> Callable[..., Any]:
        seen = _Seen(report.current(), operators(gm, kind == "backward"), user_line(gm.graph))
        self.seen.append(seen)
        self.say(f"compiling {seen.record.name} ({kind}), {len(seen.operators)} operators ...")
        if self.target is None:
            return compile_graph(gm, inputs, options, kind=kind)
        return self.for_target(seen, gm, inputs, kind)

    def for_target(self, seen: _Seen, gm: Any, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
        """Plan for a device and compile what its kernels are there; what runs is the graph as it is."""
        spec = SPECS[self.target or "cpu"]
        graph = imported(gm, inputs, self.options, kind)
        with telling(kind):
            compiled = explained(all_levels(graph, spec, self.options), gm)
        report.compiled(compiled)
        layouts, cuda = Layouts(compiled.graph), compiled.spec.kind == "cuda"
        script = link(compiled.graph, compiled.plan.reading, compiled.launches, layouts, overwrite=cuda)
        seen.record.details["script"] = script
        seen.measured = _on_cpu(compiled, self.options) if spec.kind == "cpu" else _on_card(compiled)
        forward: Callable[..., Any] = gm.forward
        return forward

    def device(self) -> str:
        """The DeviceSpec that graphs were planned for."""
        names = [c.spec.name for s in self.seen if (c := s.record.details.get("compiled")) is not None]
        return names[0] if names else "cpu"

    def facts(self, seen: _Seen) -> GraphFacts:
        """What became of one graph."""
        record = seen.record
        fallbacks = tuple(Fallback(f.scope, f.op, f.reason, f.line) for f in record.fallbacks)
        compiled: Compiled | None = record.details.get("compiled")
        if compiled is not None and record.status == "compiled":
            measured = seen.measured or _measured(compiled, record)
            found = collect(compiled, record.details["script"], seen.operators, measured)
        else:
            found = GraphFacts("", "", record.status, "", (), (), (), (), Totals(operators=len(seen.operators)), 0.0)
        return replace(
            found,
            name=record.name,
            kind=record.kind,
            line=seen.line,
            fallbacks=fallbacks,
            totals=replace(found.totals, fallbacks=len(fallbacks)),
            compile_seconds=record.total_seconds,
            left_out=record.left_out,
        )


# ---------------------------------------------------------------------------------------------------------- binaries
def _on_card(compiled: Compiled) -> dict[str, Measured]:
    """Kernels compiled for a card that need not be here."""
    limits = LIMITS[compiled.spec.name]
    out: dict[str, Measured] = {}
    sources: dict[str, TritonSource] = {}
    for launch in compiled.launches:
        if launch.parts:
            try:
                sources[launch.name] = emit_triton(
                    [p.program for p in launch.parts], launch.name, f8_saturates=f8_saturates()
                )
            except LowerFailed as failed:
                out[launch.name] = Measured(failure=f"does not compile: {failed.message}")
    for (name, source), usage in zip(sources.items(), usages_for(list(sources.values()), limits.arch), strict=True):
        if isinstance(usage, str):
            out[name] = Measured(failure=f"does not compile: {usage}", source=source.text)
            continue
        failure = ""
        if usage.shared > limits.most_shared:
            failure = f"does not run: {usage.shared} B of shared memory a block, the device has {limits.most_shared}"
        out[name] = Measured(_resources(usage, compiled.spec.name), failure=failure, source=source.text)
    return out


def _on_cpu(compiled: Compiled, options: Options) -> dict[str, Measured]:
    """Whether the C++ of each kernel compiles; there are no resources to read."""
    launches = [launch for launch in compiled.launches if launch.parts]
    texts = CppSources([CppKernel(x.name, tuple(p.program for p in x.parts)) for x in launches])
    built = build_cpp(texts, cache_for(options), options.threads, options.level.cxx)
    failures = [f"does not compile: {b.message}" if isinstance(b, BuildFailed) else "" for b in built]
    return {x.name: Measured(failure=failures[k], source=texts.text(k)) for k, x in enumerate(launches)}


def _measured(compiled: Compiled, record: report.CompileRecord) -> dict[str, Measured]:
    """What the built kernels are known to take, and which of their schedules were timed."""
    alive = record.details.get("executable")
    executable = alive() if alive is not None else None
    if executable is None:
        return {}
    out: dict[str, Measured] = {}
    sources: dict[str, str] = record.details.get("sources", {})
    failures = {f.op: f.reason for f in record.fallbacks if f.scope == "group"}
    for launch in compiled.launches:
        if not launch.parts:
            continue
        kernel: Any = executable.kernels[launch.kernel]
        times: dict[str, float] = {}
        chosen, remembered = "", False
        if isinstance(kernel, Tuned):
            remembered = kernel.remembered
            times, at = dict(kernel.times_ms), kernel.choice or 0
            kernel, chosen = kernel.variants[at], kernel.names[at]
        binary = getattr(kernel, "binary", None)
        known = _resources(usage_of(binary), compiled.spec.name) if binary is not None else None
        source = sources.get(launch.name) or sources.get(identifier(launch.name), "")
        out[launch.name] = Measured(known, times, chosen, failures.get(launch.name, ""), source, remembered)
    return out


def _resources(usage: Usage, device: str) -> Resources:
    occupancy = LIMITS[device].occupancy(usage.warps, usage.registers, usage.shared)
    return Resources(usage.registers, usage.spills, usage.shared, occupancy)
