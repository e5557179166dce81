"""What a reproducer's file does when it is run: builds its kernels from their texts, judges them, and times them beside eager.

Nothing is planned anew: the Graph, the tile programs with their schedules and the buffers of every launch are written down,
so that the kernel is the same one wherever this version of plait runs. Where another version writes other code for the same
tile program, that is said.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import plait
from plait.diagnose.recipes import Recipe, drawn, dtype_of
from plait.diagnose.timing import medians_us
from plait.emit.cpp import CppKernel
from plait.emit.gluon import emit_gluon
from plait.emit.triton import TritonSource, emit_triton
from plait.errors import BuildFailed, CheckFailed, PlaitError, UserError
from plait.ir.graph import Graph, Node
from plait.ir.parse import parse_graph
from plait.ir.text import printed_nodes
from plait.options import Options, digest, interpret_triton, triton_is_interpreted
from plait.oracle.compare import Verdict, compare_many, reference, worst_of
from plait.oracle.eval_graph import evaluation
from plait.oracle.eval_tile import flat_view, run_tile
from plait.plan.device import SPECS
from plait.plan.inline import Reading
from plait.plan.layout import Layouts
from plait.plan.plan import Group
from plait.runtime.build import CppSources, build_cpp, build_triton, f8_saturates, identity
from plait.runtime.cache import cache_for
from plait.runtime.executable import Executable
from plait.runtime.kernel import Kernel, Messages, Slots
from plait.runtime.kernel import Launch as LaunchOn
from plait.runtime.link import Launch, link
from plait.tile.check import check_program
from plait.tile.lower import Lowered
from plait.tile.parse import parse_programs
from plait.tile.program import TileProgram
from plait.tile.text import print_program

FORMS = ("cpp", "triton", "gluon")
_ROUNDS = 15
_WAYS = {
    "evaluate": "run the tile programs in plait's evaluator",
    "interpret": "run the Triton code in Triton's interpreter",
}
_DEVICE = re.compile(r'(?<!\\)"(cpu|cuda(:\d+)?)"')


@dataclass(frozen=True)
class Source:
    """The code of a launch in one form, and a short name for it that neither its name nor its comments change."""

    text: str
    fingerprint: str
    made: TritonSource | CppSources


def source_of(name: str, programs: Sequence[TileProgram], form: str) -> Source:
    """The code of a launch. Raises LowerFailed where there is none in this form."""
    if form == "cpp":
        texts = CppSources([CppKernel(name, tuple(programs))])
        return Source(texts.text(0), digest(texts.plain(0)), texts)
    made = (
        emit_gluon(programs[0], f"{name}_h")
        if form == "gluon"
        else emit_triton(list(programs), name, f8_saturates=f8_saturates())
    )
    return Source(made.text, digest(str(identity(made)[0])), made)


def tiles_fingerprint(programs: Sequence[TileProgram]) -> str:
    """A short name for tile programs."""
    return digest("\n".join(print_program(p, header=False) for p in programs))


@dataclass
class Reproducer:
    """One file. `launches`: in order; of a kernel its name, form and parts (members, results and buffers by the names of nodes),
    of an ATen call its node. `eager`: the same in ATen's operators, of the same arguments; `judge`: "eager", or "evaluator"
    where the meaning of `graph` decides. `restrided`: strides in which eager wants an argument."""

    title: str
    plait: str
    graph: str
    tiles: str
    launches: Sequence[Mapping[str, Any]]
    inputs: Sequence[Recipe]
    packed: Sequence[str] = ()
    seed: int = 0
    eager: Callable[..., list[Any]] | None = None
    judge: str = "evaluator"
    restrided: Mapping[int, Sequence[int]] = field(default_factory=dict)
    threads: int | None = None

    # ------------------------------------------------------------------------------------------------ the command line
    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run what the command line asks for; the exit code: 0 right, 1 wrong, 2 it cannot run here."""
        name = Path(sys.argv[0]).name
        parser = argparse.ArgumentParser(
            prog=f"python {name}", description=f"{self.title}. Exit codes: 0 right, 1 wrong, 2 it cannot run here."
        )
        parser.add_argument("--source", action="store_true", help="print the generated code")
        parser.add_argument("--tile", action="store_true", help="print the tile programs")
        parser.add_argument("--graph", action="store_true", help="print the graph")
        how = parser.add_mutually_exclusive_group()
        for way, words in _WAYS.items():
            how.add_argument(f"--{way}", action="store_const", dest="way", const=way, help=words)
        asked = parser.parse_args(arguments)
        try:
            if asked.graph or asked.tile or asked.source:
                texts = [self.graph] * asked.graph + [self.tiles] * asked.tile + self.sources() * asked.source
                print("\n".join(texts), end="")
                return 0
            return self.run(asked.way)
        except PlaitError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1 if isinstance(error, BuildFailed) else 2

    def sources(self) -> list[str]:
        """The code of every launch."""
        parts = self.programs()
        return [source_of(x["name"], parts[k], x["form"]).text for k, x in enumerate(self.kernels)]

    # ------------------------------------------------------------------------------------------------ what it is made of
    @property
    def kernels(self) -> list[Mapping[str, Any]]:
        """The launches that are kernels."""
        return [x for x in self.launches if "parts" in x]

    def programs(self) -> list[list[TileProgram]]:
        """The tile programs of each kernel."""
        found = parse_programs(self.tiles)
        for p in found:
            check_program(p)
        rest = iter(found)
        return [[next(rest) for _ in x["parts"]] for x in self.kernels]

    def device(self, way: str | None) -> str:
        """Where it runs. Raises UserError where that needs a card that is not here."""
        forms = {x["form"] for x in self.kernels}
        if way == "evaluate":
            return "cpu"
        if forms <= {"cpp"}:
            return parse_graph(self.graph).device
        if way == "interpret":
            interpret_triton()
        if triton_is_interpreted():
            if "gluon" in forms:
                raise UserError("kernels in Gluon have no interpreter", hint="--evaluate runs the tile programs")
            return "cpu"
        if not torch.cuda.is_available():
            hint = (
                f"python {Path(sys.argv[0]).name} --evaluate runs its tile programs in plait's evaluator, --interpret its "
                "code in Triton's interpreter; --tile and --source show them"
            )
            raise UserError("it needs a CUDA device, and there is none here", hint=hint)
        return "cuda:0"

    def graph_on(self, device: str) -> Graph:
        """The Graph, on a device."""
        return parse_graph(_DEVICE.sub(f'"{device}"', self.graph))

    # ------------------------------------------------------------------------------------------------ running
    def run(self, way: str | None = None) -> int:
        """Judge and time; 1 when it is wrong. `way`: "evaluate" or "interpret", instead of running machine code."""
        print(f"{self.title}, written by plait {self.plait}")
        device = self.device(way)
        graph = self.graph_on(device)
        executable = self.built(graph, evaluate=way == "evaluate")
        verdicts = self.verdicts(graph, executable, device)
        against = "eager and float64" if self._by_eager else "the meaning of its graph, as eager rounds and in float64"
        status = worst_of(verdicts)
        print(f"{status}: judged against {against}, by plait's verdict rule")
        for v in verdicts:
            print(f"  {v}")
        if way is None and not triton_is_interpreted():
            self.say_times(executable, device)
        return int(status == "FAIL")

    @property
    def _by_eager(self) -> bool:
        return self.judge == "eager" and self.eager is not None

    def built(self, graph: Graph, evaluate: bool = False) -> Executable:
        """The kernels, from their texts. Raises BuildFailed."""
        nodes = {repr(n): n for n in printed_nodes(graph)}
        programs = self.programs()
        launches: list[Launch] = []
        built: list[Kernel] = []
        for number, x in enumerate(self.launches):
            if "call" in x:
                call = _node(nodes, x["call"])
                launches.append(Launch((Group(number, "extern", (call,), (call,)),)))
                continue
            made = programs[len(built)]
            source = source_of(x["name"], made, x["form"])
            self.say_whether_same(x, made, source)
            built.append(_Evaluated(made) if evaluate else self.built_one(source, graph))
            groups, parts = _parts(number, x, made, nodes)
            launches.append(Launch(groups, len(built) - 1, parts, x["name"]))
        inline = {n for n in graph.nodes() if n.kind == "map"} - {
            n for x in launches for g in x.groups for n in g.nodes
        }
        reading = Reading(graph, lambda extents: 1.0, SPECS["cpu"], frozenset(inline))
        script = link(graph, reading, launches, Layouts(graph), overwrite=any(x["form"] != "cpp" for x in self.kernels))
        return Executable(script, built, self.arguments(graph.device)[graph.arity :])

    def built_one(self, source: Source, graph: Graph) -> Kernel:
        """One kernel."""
        if isinstance(source.made, CppSources):
            (found,) = build_cpp(source.made, cache_for(Options.make()), self.threads)
        else:
            (found,) = build_triton([source.made], graph.device, graph.hint)
        if isinstance(found, BuildFailed):
            raise found
        return found

    def say_whether_same(self, x: Mapping[str, Any], programs: Sequence[TileProgram], source: Source) -> None:
        """Whether what is built is what was recorded."""
        if tiles_fingerprint(programs) != x["tiles"]:
            print(f"{x['name']}: NOT the recorded kernel: its tile program was edited since")
        elif source.fingerprint != x["source"]:
            now = plait.__version__
            print(
                f"{x['name']}: NOT the recorded kernel: of the same tile program plait {now} makes other code here "
                f"({source.fingerprint}, recorded {x['source']})"
            )
        else:
            print(f"{x['name']}: the recorded kernel ({x['form']}, code {source.fingerprint})")

    def arguments(self, device: str) -> list[Any]:
        """Arguments, then constants, made anew."""
        for r in self.inputs:
            if "dtype" in r:
                dtype_of(r)
        on_card = any(x["form"] != "cpp" for x in self.kernels)
        return drawn(self.inputs, self.packed, device if on_card else None)

    # ------------------------------------------------------------------------------------------------ judging
    def verdicts(self, graph: Graph, executable: Executable, device: str) -> list[Verdict]:
        """One run, judged: results, then arguments after it."""
        eager, eager_args, exact, exact_args = (
            self.truth_of_eager(device) if self._by_eager else self.truth(graph, device)
        )
        torch.manual_seed(self.seed)
        try:
            if all(o.writes_to is None for o in graph.outputs):
                # no other reference to the arguments, so that what may be written over is
                got = pytree.tree_leaves(executable.run(self.arguments(device)[: graph.arity]))
                return compare_many(_cpu(got), _cpu(eager), _cpu(exact), name="result ")
            args = self.arguments(device)[: graph.arity]
            got = pytree.tree_leaves(executable.run(list(args)))
        except CheckFailed as error:
            return [Verdict("FAIL", f"the tile program: {error}", "run")]
        except Exception as error:  # whatever the interpreter lacks; machine code raises these two
            if triton_is_interpreted():  # it lacks much of what kernels call
                words = f"Triton's interpreter cannot run it: {str(error).splitlines()[0]}"
                raise UserError(words, hint="--evaluate runs the tile programs in plait's evaluator") from error
            if not isinstance(error, IndexError | RuntimeError):
                raise
            return [Verdict("FAIL", f"raises {type(error).__name__}: {error}", "run")]
        return compare_many(_cpu(got), _cpu(eager), _cpu(exact), name="result ") + compare_many(
            _cpu(args), _cpu(eager_args), _cpu(exact_args), name="argument "
        )

    def truth(self, graph: Graph, device: str) -> tuple[Any, Any, Any, Any]:
        """Results and arguments after the call, as the Graph means them: as eager rounds, and in double."""
        found: list[Any] = []
        for mode in ("eager", "float64"):
            given = self.arguments(device)
            constants = dict(
                zip((graph.constants[k] for k in sorted(graph.constants)), given[graph.arity :], strict=True)
            )
            torch.manual_seed(self.seed)
            try:
                run = evaluation(graph, given[: graph.arity], dtype_mode=mode, constants=constants)
                found += [pytree.tree_leaves(list(run.returned())), given[: graph.arity]]
            except (RuntimeError, TypeError, NotImplementedError):
                if mode == "eager":
                    raise
                found += found  # torch's own double precision cannot run a call of it: eager is the only reference
        return found[0], found[1], found[2], found[3]

    def truth_of_eager(self, device: str) -> tuple[Any, Any, Any, Any]:
        """The same of ATen's operators."""
        assert self.eager is not None
        run, args = self.eager, self.for_eager(device)
        torch.manual_seed(self.seed)
        with torch.no_grad():
            eager = pytree.tree_leaves(run(*args))
            torch.manual_seed(self.seed)
            try:
                exact, after = reference(lambda _, *a: run(*a), [None, *self.for_eager(device)], with_args=True)
            except Exception:  # torch's own double precision cannot run it: eager is the only reference
                exact, after = eager, [None, *args]
        count = parse_graph(self.graph).arity
        return eager, args[:count], pytree.tree_leaves(exact), list(after[1:])[:count]

    def for_eager(self, device: str) -> list[Any]:
        """Arguments and constants as eager wants them."""
        args = self.arguments(device)
        for k, strides in self.restrided.items():
            x = args[k]
            args[k] = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
        return args

    # ------------------------------------------------------------------------------------------------ timing
    def say_times(self, executable: Executable, device: str) -> None:
        """Print medians."""
        count = executable.script.arity - len(executable.constants)
        mine = self.arguments(device)[:count]
        calls: list[Callable[[], Any]] = [lambda: executable.run(list(mine))]
        if self.eager is not None:
            run, theirs = self.eager, self.for_eager(device)
            calls.append(lambda: run(*theirs))
        with torch.no_grad():
            times = medians_us(calls, device.startswith("cuda"), _ROUNDS)
        where = torch.cuda.get_device_name() if device.startswith("cuda") else f"cpu, {torch.get_num_threads()} threads"
        text = f"time on {where}: {times[0]:.1f} us"
        if len(times) > 1:
            text += f", eager {times[1]:.1f} us, {times[1] / times[0]:.2f}x"
        print(f"{text} (median of {_ROUNDS} interleaved batches)")


class _Evaluated:
    """See runtime.kernel.Kernel: tile programs in the evaluator, part after part, on the CPU."""

    def __init__(self, programs: Sequence[TileProgram]) -> None:
        self.programs = tuple(programs)

    def bind(self, buffers: tuple[int, ...], symbols: Sequence[int], messages: Messages) -> LaunchOn:
        """See Kernel."""

        def launch(slots: Slots) -> None:
            places, numbers = iter(buffers), iter(symbols)
            for p in self.programs:
                own = [flat_view(slots[next(places)]) for b in p.buffers if b.role != "scratch"]
                given = [next(numbers) for _ in p.numbers]
                run_tile(p, own, dict(zip(p.symbols, given, strict=False)))

        return launch


def _node(nodes: Mapping[str, Node], name: str) -> Node:
    if name not in nodes:
        raise UserError(f"the graph of this file has no {name}", hint="write the file again")
    return nodes[name]


def _parts(
    number: int, x: Mapping[str, Any], programs: Sequence[TileProgram], nodes: Mapping[str, Node]
) -> tuple[tuple[Group, ...], tuple[Lowered, ...]]:
    """The groups of a launch, and its parts."""
    groups: list[Group] = []
    parts: list[Lowered] = []
    for part, program in zip(x["parts"], programs, strict=True):
        members, stored, buffers = (
            tuple(_node(nodes, n) for n in part[k].split()) for k in ("nodes", "stored", "buffers")
        )
        groups.append(Group(number, "kernel", members, stored))
        parts.append(Lowered(program, buffers))
    return tuple(groups), tuple(parts)


def _cpu(xs: Sequence[Any]) -> list[Any]:
    return [x.cpu() if isinstance(x, Tensor) else x for x in xs]
