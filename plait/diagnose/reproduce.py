"""The text of a reproducer: one kernel, or one graph, of a compiled program as a Python file that runs on its own.

Everything in it is a literal: texts that plait's parsers read, numbers, and ATen's operators by name. The user's names and lines
stand in strings and comments of printable ASCII only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plait
from plait.compiler import Compiled, all_levels, imported
from plait.diagnose.aten import NoText, function_text, one_line, with_views
from plait.diagnose.cut import cut, overwritten_by, read_and_written
from plait.diagnose.kernels import run_watched
from plait.diagnose.locate import stands_for
from plait.diagnose.program import copies
from plait.diagnose.recipes import Recipe, recipes_of
from plait.diagnose.reproducer import source_of, tiles_fingerprint
from plait.diagnose.watch import Call, Seen
from plait.errors import LowerFailed, UserError
from plait.frontend.saved import strides_wanted
from plait.ir.fuel import limited
from plait.ir.graph import Graph, Node
from plait.ir.text import print_graph, printed_nodes
from plait.options import Options, digest
from plait.oracle.eval_graph import evaluation
from plait.oracle.semantics import TORCH
from plait.plan.device import SPECS
from plait.plan.layout import Layouts, room
from plait.runtime import report
from plait.runtime.build import identity
from plait.runtime.executable import Executable
from plait.runtime.gluon_kernel import GluonKernel
from plait.runtime.link import Launch, link
from plait.runtime.sizes import Binder, Sizes
from plait.runtime.steps import Script
from plait.runtime.triton_kernel import TritonKernel
from plait.runtime.tune import Tuned
from plait.tile.program import TileProgram
from plait.tile.schedule import parse_schedule
from plait.tile.text import print_program

MARK = '"""A reproducer that plait '
_ODD = re.compile(r"[^\w .,:()/=+*\[\]<>-]", re.ASCII)
_WIDTH = 110


@dataclass(frozen=True)
class Subject:
    """A compiled graph and the arguments of one call of it, its constants among them last. `executable` is None where its kernels
    were planned for another device. `gm`, with its example inputs, is the captured graph, if there is one."""

    title: str
    compiled: Compiled
    script: Script
    args: tuple[Any, ...]
    executable: Executable | None = None
    gm: Any = None
    examples: tuple[Any, ...] = ()
    rng: Tensor | None = None
    threads: int | None = None

    @property
    def graph(self) -> Graph:
        return self.compiled.graph

    @property
    def constants(self) -> dict[str, Any]:
        """Tensors of the module, by name."""
        names = [self.graph.constants[k] for k in sorted(self.graph.constants)]
        return dict(zip(names, self.args[self.graph.arity :], strict=True))


def subject_of(seen: Seen, call: Call, options: Options, target: str | None) -> Subject:
    """A graph that was watched, with one of its calls; planned for `target` where that is another device."""
    compiled, executable = seen.compiled, seen.executable
    if target is not None:
        with report.compiling(seen.kind), limited(options.fuel):
            graph = imported(seen.gm, seen.examples, options, seen.kind)
            compiled, executable = all_levels(graph, SPECS[target], options), None
    assert compiled is not None
    if executable is not None:
        script = executable.script
    else:
        reading, cuda = compiled.plan.reading, compiled.spec.kind == "cuda"
        script = link(compiled.graph, reading, compiled.launches, Layouts(compiled.graph), overwrite=cuda)
    constants = [_attribute(seen.gm, compiled.graph.constants[k]) for k in sorted(compiled.graph.constants)]
    args = (*call.before, *constants)
    return Subject(seen.title, compiled, script, args, executable, seen.gm, seen.examples, call.rng, options.threads)


def _attribute(gm: Any, name: str) -> Any:
    found = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------------------------------------- a kernel
def kernel_text(subject: Subject, step: int, values: bool = False) -> str:
    """The file of one launch, by its number among the steps. Raises UserError for what is no kernel, or cannot be written down."""
    launches = subject.compiled.launches
    kernels = [k for k, launch in enumerate(launches) if launch.parts]
    if not 0 <= step < len(launches) or not launches[step].parts:
        found = f"step {step} is an ATen call" if 0 <= step < len(launches) else f"there is no step {step}"
        hint = f"kernels are the steps {', '.join(map(str, kernels))}" if kernels else "the graph has no kernels"
        raise UserError(f"{found}, and no kernel", hint=hint)
    launch = launches[step]
    read, _ = read_and_written(launch)
    symbols = Binder(subject.script.bindings).bind(subject.args)
    graph = cut(subject.graph, launch, symbols, overwritten_by(subject.script, launch))
    tensors = _values_read(subject, launch, read, symbols)
    args = [*tensors, *(symbols[s] for s in graph.bindings)]
    names = [*(f"what {launch.name} reads of {_plain(repr(n))}" for n in read), *graph.bindings]
    eager, why = "", "its kernels were planned for another device"
    if subject.gm is not None and subject.executable is not None:
        try:
            eager = _eager_of_kernel(subject, launch, read, graph)
        except NoText as reason:
            why = str(reason)
    written = _File(
        title=f"kernel {step} ({launch.name}) of {subject.title}",
        graph=graph,
        launches=[_kernel(subject, launch, _names(graph))],
        names=[*map(repr, read), *graph.bindings],
        eager=eager or f"# not timed beside eager, whose operators cannot be written down alone: {one_line(why)}\n",
        judge="evaluator",
        threads=subject.threads,
    )
    return written.text(args, names, values)


def _values_read(
    subject: Subject, launch: Launch, read: Sequence[Node], symbols: Mapping[str, int | float]
) -> list[Tensor]:
    """What a launch read in the call, as it lay in memory."""
    args = list(subject.args[: subject.graph.arity])
    found: dict[Node, Tensor] = {}
    if subject.rng is not None:
        torch.set_rng_state(subject.rng)
    if subject.executable is not None and subject.executable.kernels[launch.kernel] is not None:
        _, ran = run_watched(subject.executable, subject.compiled, copies(args))
        mine = next(r for r in ran if r.kernel == launch.kernel)
        tensors = [n for part in launch.parts for n in part.tensors]
        found = {tensors[k]: x for k, x in mine.read.items()}
        return [found[n] for n in read]
    run = evaluation(subject.graph, copies(args), dtype_mode="eager", constants=subject.constants)
    layouts, sizes = Layouts(subject.graph), Sizes(symbols)
    for n in read:
        shape, strides = sizes.all(n.shape), sizes.all(layouts.strides(n))
        memory = torch.zeros(max(room(shape, strides), 1), dtype=TORCH[n.dtype])
        laid = memory.as_strided(shape, strides)
        once = tuple(slice(0, 1) if s == 0 and e > 1 else slice(None) for s, e in zip(strides, shape, strict=True))
        laid[once] = run.values[n].rounded[once].to(laid.dtype)
        found[n] = laid
    return [found[n] for n in read]


def _eager_of_kernel(subject: Subject, launch: Launch, read: Sequence[Node], graph: Graph) -> str:
    """ATen's operators of a kernel, of what the kernel reads. Raises NoText."""
    whole, reading = subject.graph, subject.compiled.plan.reading
    placeholders = [n for n in subject.gm.graph.nodes if n.op == "placeholder"]
    values = stands_for(whole)
    known = {values[n]: k for k, n in enumerate(read) if n in values and n.op != "input"}
    at = {i.node: i.position for i in whole.inputs}
    known |= {placeholders[at[n]].name: k for k, n in enumerate(read) if n in at and at[n] < len(placeholders)}
    numbers = {how[1]: s for s, how in whole.bindings.items() if how[0] == "scalar"}
    order = list(graph.bindings)
    known |= {placeholders[p].name: len(read) + order.index(s) for p, s in numbers.items() if s in order}
    members = [n for g in launch.groups for n in reading.with_inline(g.nodes)]
    about = [o.fx for n in members for o in whole.origins.get(n, ())]
    nodes, given, shown = with_views(subject.gm, about, known)
    return function_text(nodes, given, graph.arity, shown, "What the kernel computes, in ATen's operators.")


# ------------------------------------------------------------------------------------------------------------- a graph
def graph_text(subject: Subject, values: bool = False) -> str:
    """The file of a whole graph. Raises UserError where it has parts that cannot be written down."""
    graph = subject.graph
    text = print_graph(graph)
    if '("attr", ' in text:
        raise UserError("the graph calls a subgraph, which is not written down", hint="reproduce one of its kernels")
    nodes = _names(graph)
    launches = [
        _kernel(subject, launch, nodes) if launch.parts else {"call": repr(launch.groups[0].nodes[0])}
        for launch in subject.compiled.launches
    ]
    eager, why, restrided = "", "it was planned for another device", {}
    if subject.gm is not None and subject.executable is not None:
        try:
            eager = _eager_of_graph(subject)
            restrided = {k: list(s) for k, s in strides_wanted(subject.gm, subject.examples).items()}
        except NoText as reason:
            why = str(reason)
    draws = any(n.kind == "random" for n in graph.nodes())
    names = [f"argument {k}" for k in range(graph.arity)] + [f"constant {_plain(n)}" for n in subject.constants]
    written = _File(
        title=subject.title,
        graph=graph,
        launches=launches,
        names=names,
        eager=eager
        or f"# judged by the meaning of its graph, as it cannot be written in ATen's operators: {one_line(why)}\n",
        judge="eager" if eager and not draws else "evaluator",
        restrided=restrided,
        threads=subject.threads,
    )
    return written.text(list(subject.args), names, values)


def _eager_of_graph(subject: Subject) -> str:
    fx_graph = subject.gm.graph
    order = list(subject.constants)
    given = {}
    count = 0
    for n in fx_graph.nodes:
        if n.op == "placeholder":
            given[n], count = count, count + 1
    inside = [n for n in fx_graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    for n in fx_graph.nodes:
        if n.op == "get_attr":
            if str(n.target) not in order:
                raise NoText(f"it has the attribute {n.target}")
            given[n] = count + order.index(str(n.target))
    (results,) = fx_graph.output_node().args
    returned = list(results) if isinstance(results, tuple | list) else [results]
    about = "The graph as it was captured, in ATen's operators."
    return function_text(inside, given, count + len(order), returned, about)


# ------------------------------------------------------------------------------------------------------------- launches
def _names(graph: Graph) -> dict[int, str]:
    """What the nodes of a graph are called, by number."""
    return {n.serial: repr(n) for n in printed_nodes(graph)}


def _kernel(subject: Subject, launch: Launch, names: Mapping[int, str]) -> dict[str, Any]:
    """What is written down of a launch, whose nodes have these names in the file, and its programs under "programs"."""
    programs = [p.program for p in launch.parts]
    built: Any = None if subject.executable is None else subject.executable.kernels[launch.kernel]
    form = "triton" if subject.compiled.spec.kind == "cuda" else "cpp"
    if isinstance(built, Tuned):
        at = built.choice or 0
        built, chosen = built.variants[at], built.names[at]
        if not isinstance(built, GluonKernel):
            programs = [replace(programs[0], schedule=parse_schedule(chosen))]
    if isinstance(built, GluonKernel | TritonKernel):
        form = "gluon" if isinstance(built, GluonKernel) else "triton"
        source = digest(str(identity(built.source)[0]))
    else:
        try:
            source = source_of(launch.name, programs, form).fingerprint
        except LowerFailed as failed:
            raise UserError(
                f"{launch.name} has no code in this form: {failed.message}", hint="reproduce another kernel"
            ) from failed
    parts = [
        {
            "nodes": " ".join(names[n.serial] for n in g.nodes if n.serial in names),
            "stored": " ".join(names[n.serial] for n in g.stored),
            "buffers": " ".join(names[n.serial] for n in p.tensors),
        }
        for g, p in zip(launch.groups, launch.parts, strict=True)
    ]
    return {
        "name": launch.name,
        "form": form,
        "source": source,
        "tiles": tiles_fingerprint(programs),
        "parts": parts,
        "programs": programs,
    }


# ------------------------------------------------------------------------------------------------------------- the file
@dataclass
class _File:
    title: str
    graph: Graph
    launches: list[dict[str, Any]]
    names: Sequence[str]
    eager: str
    judge: str
    restrided: Mapping[int, Sequence[int]] | None = None
    threads: int | None = None

    def text(self, args: Sequence[Any], names: Sequence[str], values: bool) -> str:
        """The whole file."""
        packed: list[str] | None = [] if values else None
        recipes = recipes_of(args, names, packed)
        programs: list[TileProgram] = [p for x in self.launches for p in x.pop("programs", ())]
        cards = any(x.get("form", "cpp") != "cpp" for x in self.launches)
        needs = "torch, plait, and a CUDA device (or --interpret)" if cards else "torch, plait, and a C++ compiler"
        title = _plain(self.title)
        runs = "import torch\n" if "torch." in self.eager else ""
        runs = "".join(f"import {m}\n" for m in ("math", "operator") if f"{m}." in self.eager) + runs
        has_eager = self.eager.startswith("def ")
        head = f"""{MARK}{plait.__version__} wrote: {title}

python FILE              judge it against eager and float64, and time it; exit code 0 right, 1 wrong, 2 it cannot run here
python FILE --source     print its code; --tile: its tile programs, --graph: its graph

Arguments are {"those of the call" if values else "drawn: like those of the call, and the same in every run"}. It needs {needs}.
\"\"\"

{runs}"""
        sections = [
            head.rstrip() + "\n",
            _literal_list("INPUTS", recipes, self.names),
            "\n" + self.eager + "\n" if has_eager else self.eager,
            _literal_text("GRAPH", print_graph(self.graph)),
            _literal_text("TILES", "\n".join(print_program(p) for p in programs)),
            _literal_list("LAUNCHES", self.launches),
            *([_literal_packed(packed)] if packed else []),
            self._main(title, has_eager, bool(packed)),
        ]
        return "\n".join(sections)

    def _main(self, title: str, has_eager: bool, has_values: bool) -> str:
        given = [
            f"title={title!a}",
            f"plait={plait.__version__!a}",
            *("graph=GRAPH", "tiles=TILES", "launches=LAUNCHES", "inputs=INPUTS"),
        ]
        given += ["packed=VALUES"] if has_values else []
        given += ["eager=eager", f"judge={self.judge!a}"] if has_eager else []
        given += [f"restrided={dict(self.restrided)!r}"] if self.restrided else []
        given += [f"threads={self.threads!r}"] if self.threads else []
        body = "".join(f"        {x},\n" for x in given)
        return (
            'if __name__ == "__main__":\n    from plait.diagnose.reproducer import Reproducer\n\n'
            f"    made = Reproducer(\n{body}    )\n    raise SystemExit(made.main())\n"
        )


def _plain(text: str) -> str:
    """Text for a docstring: letters, digits and marks that end no string and begin no escape."""
    return _ODD.sub("?", text)


def _literal_text(name: str, text: str) -> str:
    """Readable where that is safe, else one literal a line."""
    safe = all(c == "\n" or 32 <= ord(c) < 127 for c in text) and "'''" not in text and not text.endswith(("'", "\\"))
    if safe and not text.startswith("'"):
        return f"{name} = r'''{text}'''\n"
    rows = "".join(f"    {row + chr(10)!a}\n" for row in text.split("\n")[:-1])
    return f"{name} = (\n{rows})\n"


def _literal_list(name: str, items: Sequence[Mapping[str, Any]], about: Sequence[str] = ()) -> str:
    rows = []
    for k, item in enumerate(items):
        note = f"    # {one_line(about[k])}\n" if about else ""
        rows.append(f"{note}    {_literal(item)},\n")
    return f"{name} = [\n{''.join(rows)}]\n"


def _literal(v: Any) -> str:
    """A literal of ASCII."""
    if isinstance(v, Mapping):
        return "{" + ", ".join(f"{k!a}: {_literal(x)}" for k, x in v.items()) + "}"
    if isinstance(v, list):
        return "[" + ", ".join(map(_literal, v)) + "]"
    return ascii(v)


def _literal_packed(packed: Sequence[str]) -> str:
    rows = []
    for text in packed:
        lines = "".join(f"        {text[k : k + _WIDTH]!a}\n" for k in range(0, len(text), _WIDTH))
        rows.append(f"    (\n{lines}    ),\n")
    return f"VALUES = [\n{''.join(rows)}]\n"


# ------------------------------------------------------------------------------------------------------------- writing it
def write_file(path: str | Path, text: str) -> Path:
    """Write a reproducer, over an older one but over nothing else. Raises UserError."""
    path = Path(path)
    try:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as there:
                if there.read(len(MARK)) != MARK:
                    raise UserError(
                        f"{path} is there, and is no reproducer of plait's", hint="name another file, or remove it"
                    )
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", hint="name a file in a folder of your own") from error
    return path


__all__ = ["Recipe", "Subject", "graph_text", "kernel_text", "write_file"]
