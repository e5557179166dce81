"""Built kernels and a Script to an Executable: the last stage of the compiler page.

A kernel that could not be built takes only its own groups along: their steps are replaced by reference evaluation,
counted and warned about (under strict, raised). Where none can be built, the whole graph is left to eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from plait.emit.cpp import CppKernel
from plait.emit.gluon import GluonSource, emit_gluon
from plait.emit.gluon_shape import loads_beside_factors
from plait.emit.triton import TritonSource, emit_triton
from plait.errors import BadOption, BuildFailed, LowerFailed, OverrideFailed, UnsupportedProgram
from plait.ir import index as ix
from plait.ir.fuel import take
from plait.options import Options, triton_is_interpreted
from plait.runtime import override, report
from plait.runtime.build import (
    LEFT_OUT,
    Built,
    CppSources,
    build_cpp,
    build_triton,
    count_failures,
    f8_saturates,
    identity,
    triton_version,
)
from plait.runtime.cache import cache_for
from plait.runtime.choices import Choices, Note, choices_for, content_key
from plait.runtime.dump import record_levels
from plait.runtime.executable import EagerStep, Executable, KernelStep, Script, Step
from plait.runtime.follow import has_made
from plait.runtime.gluon_kernel import GluonKernel, can_run
from plait.runtime.link import Launch
from plait.runtime.tune import Tuned
from plait.tile.alternatives import alternatives
from plait.tile.schedule import Schedule

_TUNE_FROM_NS = 8000.0  # predicted; below that launching dominates


def assemble(gm: Any, compiled: Any, script: Script, options: Options, loops: Sequence[Executable] = ()) -> Executable:
    """Emit, build and bind the kernels of `compiled` (compiler.Compiled); `loops` run a block of each of its loops."""
    launches: Sequence[Launch] = [launch for launch in compiled.launches if launch.parts]
    graph = compiled.graph
    constants = [_attribute(gm, name) for _, name in sorted(graph.constants.items())]
    record = report.current()
    with record.stage("build"):
        built = _build(launches, compiled, options)
    for launch, b in zip(launches, built, strict=True) if options.groups is None and options.backend != "eval" else ():
        if isinstance(b, BuildFailed) and _is_pinned(launch, options):
            raise BadOption(f"the schedule pinned for {launch.name} does not fit: {b.message}", artifact=b.artifact)
    if launches and options.backend != "eval" and all(isinstance(b, BuildFailed) for b in built):
        # no compiler, say: eager runs the whole graph better than the evaluator would
        assert isinstance(built[0], BuildFailed)
        raise built[0]
    failed = {k: built[k] for k in count_failures(built, [launch.name for launch in launches])}
    if failed and options.strict:
        first = next(iter(failed.values()))
        assert isinstance(first, BuildFailed)
        raise UnsupportedProgram(first.message, hint=first.hint, artifact=first.artifact) from first
    if failed:
        steps = tuple(_in_eager(s, launches, failed, graph, options) for s in script.steps)
        script = replace(script, steps=steps)
    kernels: list[Any] = [None if k in failed else b for k, b in enumerate(built)]
    pool_bytes = None if options.pool_mb == Options().pool_mb else options.pool_mb << 20
    graphs = options.records_graphs and record.kind == "inference"
    made = Executable(script, kernels, constants, lambda name: _attribute(gm, name), pool_bytes, graphs, loops)
    record.details["executable"] = weakref.ref(made)
    return made


def _build(launches: Sequence[Launch], compiled: Any, options: Options) -> list[Built]:
    graph = compiled.graph
    target = options.backend
    if target == "auto":
        target = "triton" if graph.device.startswith("cuda") else "cpp"
    if target == "eval":
        return [BuildFailed("backend=eval: reference evaluation") for _ in launches]
    if options.groups is not None:
        # for bisection: only some launches become kernels
        chosen = [k for k in range(len(launches)) if k in options.groups]
        rest = replace(options, groups=None)
        some = dict(zip(chosen, _build([launches[k] for k in chosen], compiled, rest), strict=True))
        return [some.get(k) or BuildFailed("not among the groups asked for") for k in range(len(launches))]
    programs = [tuple(part.program for part in launch.parts) for launch in launches]
    if target == "triton":
        return _build_triton(launches, compiled, options)
    texts = CppSources([CppKernel(launch.name, p) for p, launch in zip(programs, launches, strict=True)])
    own = {name: texts.text(k) for k, name in enumerate(texts.names)}
    mine = override.of(options)
    replaced = mine.sources(own, "cpp") if mine is not None else {}
    record_levels(compiled, own | replaced, options)
    # what files replaced is nobody else's business
    cache = cache_for(options if mine is None or not mine.replaced else replace(options, cache_dir="0"))
    return _built_as_replaced(
        build_cpp(texts.with_texts(replaced), cache, options.threads, options.level.cxx), texts.names, replaced
    )


def _built_as_replaced(built: list[Built], names: Sequence[str], replaced: Mapping[str, str]) -> list[Built]:
    """The built kernels; one whose text the user wrote must be among them."""
    for b, name in zip(built, names, strict=True):
        if isinstance(b, BuildFailed) and name in replaced:
            raise OverrideFailed(f"the source of {name} that PLAIT_OVERRIDE has: {b.message}", artifact=b.artifact)
    return built


@dataclass(frozen=True)
class _Forms:
    """What does the same for a launch: sources and their schedules, the default first, or before it one in Gluon."""

    launch: Launch
    sources: tuple[TritonSource, ...]
    names: tuple[str, ...]
    known: bool = False  # which of them is the fastest

    def optional(self, place: int) -> bool:
        """Whether a source is there only to be timed beside the default one."""
        return not self.known and place != (self.names[0] == "gluon")

    def only(self, places: Sequence[int]) -> _Forms:
        """Some of them."""
        return replace(self, sources=tuple(self.sources[p] for p in places), names=tuple(self.names[p] for p in places))


def _build_triton(launches: Sequence[Launch], compiled: Any, options: Options) -> list[Built]:
    """Triton kernels, each under its schedule and, where it is worth measuring, under neighbouring ones, unless what was fastest
    is remembered."""
    graph = compiled.graph
    forms = [_forms_of(launch, graph.device, options) for launch in launches]
    mine = override.of(options)
    replaced = mine.sources({s.name: s.text for f in forms for s in f.sources}, "py") if mine is not None else {}
    forms = [_with_replaced(f, replaced) for f in forms]
    sources = [s for f in forms for s in f.sources]
    record_levels(compiled, {s.name: s.text for s in sources}, options)
    # what files replaced is nobody else's business
    notes = _notes(forms, graph, options) if mine is None or not mine.replaced else [None for _ in forms]
    wanted = [_wanted(f, note) for f, note in zip(forms, notes, strict=True)]
    built = _built_forms(wanted, graph)
    lost = [k for k, (f, w) in enumerate(zip(forms, wanted, strict=True)) if f != w and _fails(built[k])]
    for k, b in zip(lost, _built_forms([forms[k] for k in lost], graph), strict=True):
        built[k], wanted[k] = b, forms[k]
    _built_as_replaced([b for bs in built for b in bs], [s.name for w in wanted for s in w.sources], replaced)
    return [_chosen(w, b, note) for w, b, note in zip(wanted, built, notes, strict=True)]


def _forms_of(launch: Launch, device: str, options: Options) -> _Forms:
    schedules = _schedules(launch, options)
    lower = _in_gluon(launch, device, options)
    sources: list[TritonSource] = [] if lower is None else [lower]
    for n, schedule in enumerate(schedules):
        parts = [p.program if schedule is None else replace(p.program, schedule=schedule) for p in launch.parts]
        name = launch.name if n == 0 else f"{launch.name}_v{n}"
        sources.append(emit_triton(parts, name, f8_saturates=f8_saturates()))
    names = [str(launch.parts[0].program.schedule if s is None else s) for s in schedules]
    return _Forms(launch, tuple(sources), tuple(["gluon"] * (lower is not None) + names))


def _with_replaced(forms: _Forms, replaced: Mapping[str, str]) -> _Forms:
    """With the user's texts; of a launch that has one, no other form is built."""
    mine = [k for k, s in enumerate(forms.sources) if s.name in replaced]
    if not mine:
        return forms
    if any(forms.names[k] == "gluon" for k in mine):
        named = forms.sources[mine[0]].name
        raise OverrideFailed(f"{named} is a form in Gluon, which is not replaced", hint='gluon="off"')
    own = forms.only(mine)
    return replace(own, sources=tuple(replace(s, text=replaced[s.name]) for s in own.sources))


def _notes(forms: Sequence[_Forms], graph: Any, options: Options) -> list[Note | None]:
    """Where the choice of each launch that has several forms is remembered."""
    several = any(len(f.names) > 1 for f in forms) and find_spec("triton") is not None
    choices = choices_for(options, graph.device) if several else None
    if choices is None:
        return [None for _ in forms]
    return [_note(f, choices, graph.hint) if len(f.names) > 1 else None for f in forms]


def _note(forms: _Forms, choices: Choices, hint: Callable[[ix.Expr], int]) -> Note:
    sizes = [(a.name, hint(ix.sym(a.name))) for a in forms.sources[0].args if a.kind == "symbol"]
    about = [(name, *identity(s)) for name, s in zip(forms.names, forms.sources, strict=True)]
    return Note(choices, content_key(choices.device, [(triton_version(), sizes), *about]), forms.launch.name)


def _wanted(forms: _Forms, note: Note | None) -> _Forms:
    """What has to be built: where the fastest is known, only that (and one that takes tensors which Gluon does not)."""
    known = note.known(forms.names) if note is not None else None
    if known is None:
        return forms
    at = forms.names.index(known.name)
    return replace(forms.only([0, 1] if known.name == "gluon" else [at]), known=True)


def _built_forms(forms: Sequence[_Forms], graph: Any) -> list[list[Built]]:
    flat = [(f, k) for f in forms for k in range(len(f.sources))]
    optional = {at for at, (f, k) in enumerate(flat) if f.optional(k)}
    rest = iter(build_triton([f.sources[k] for f, k in flat], graph.device, graph.hint, optional))
    return [[next(rest) for _ in f.sources] for f in forms]


def _fails(built: Sequence[Built]) -> bool:
    return any(isinstance(b, BuildFailed) for b in built)


def _chosen(forms: _Forms, built: Sequence[Built], note: Note | None) -> Built:
    """One kernel of several that do the same: the default first, or before it one in Gluon, which needs another beside itself
    for tensors that are not aligned."""
    names = forms.names
    usable = [(b, n) for b, n in zip(built, names, strict=True) if not isinstance(b, BuildFailed)]
    plain = [b for b, _ in usable if not isinstance(b, GluonKernel)]
    lower, default = built[0], built[names[0] == "gluon"]
    if isinstance(lower, BuildFailed) and lower is not default:
        report.current().details.setdefault("gluon", {})[forms.launch.name] = lower.message
    if not plain:
        return default
    if isinstance(lower, GluonKernel):
        lower.plain = plain[0]
    if any(isinstance(b, BuildFailed) and b.message == LEFT_OUT for b in built):
        note = None  # the best of some is not to be remembered as the best of all
    made = Tuned([b for b, _ in usable], [n for _, n in usable], note)
    if len(usable) == 1 and not made.remembered:
        return usable[0][0]
    has_made(made)
    return made


def _in_gluon(launch: Launch, device: str, options: Options) -> GluonSource | None:
    """The launch as a kernel for Hopper, where that is asked for and there is a form of it."""
    if options.gluon == "off" or not options.level.tries or not can_run(device):
        return None
    said: dict[str, str] = report.current().details.setdefault("gluon", {})
    if _is_pinned(launch, options):
        said[launch.name] = "its schedule is pinned"
        return None
    if len(launch.parts) != 1:
        said[launch.name] = "several parts"
        return None
    if options.gluon == "measured" and loads_beside_factors(launch.parts[0].program):
        said[launch.name] = "values are loaded along the stream, which has not run on a card yet"
        return None
    try:
        made = emit_gluon(launch.parts[0].program, f"{launch.name}_h")
        if options.gluon == "measured" and made.by_rows:
            said[launch.name] = "its loop is bounded by numbers of the rows, which has not run on a card yet"
            return None
        return made if take("variants", "gluon", lambda: f"a Gluon form of {launch.name}") else None
    except LowerFailed as failed:
        said[launch.name] = failed.message
        return None


def _is_pinned(launch: Launch, options: Options) -> bool:
    """Whether the user says what schedule a part has: nothing else is tried then."""
    return any(options.pinned(p.program.name, report.current().kind) is not None for p in launch.parts)


def _schedules(launch: Launch, options: Options) -> list[Schedule | None]:
    """The default schedule (None: as lowered), and others beside it for single static kernels that take a while."""
    program = launch.parts[0].program
    worth = (
        not _is_pinned(launch, options)
        and len(launch.parts) == 1
        and not program.symbols
        and launch.groups[0].predicted_ns > _TUNE_FROM_NS
    )
    if not worth or not options.level.tries or triton_is_interpreted():
        return [None]
    others = alternatives(program)
    if not others or not take(
        "variants", "timed", lambda: f"other schedules of {launch.name} timed beside {program.schedule}"
    ):
        return [None]
    return [None, *others]


def _attribute(gm: Any, name: str) -> Any:
    found = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _in_eager(step: Step, launches: Sequence[Launch], failed: dict[int, Built], graph: Any, options: Options) -> Step:
    """The step itself, or, for a kernel that was not built, its groups evaluated."""
    if not isinstance(step, KernelStep) or step.kernel not in failed:
        return step
    launch = launches[step.kernel]
    nodes = [n for part in launch.parts for n in part.tensors]
    slots = dict(zip(nodes, step.buffers, strict=True))
    stored = tuple(dict.fromkeys(n for g in launch.groups for n in g.stored))
    return EagerStep(
        graph,
        tuple((n, s) for n, s in slots.items() if n not in stored),
        stored,
        tuple(slots[n] for n in stored),
        "eager" if options.numerics == "eager" else "fused",
        f"kernel {launch.name} was not built",
    )
