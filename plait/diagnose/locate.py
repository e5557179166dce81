"""Where a compiled program first departs from eager: which graph, which level, which kernel, which operator.

Graphs are taken in the order in which they ran, each on the inputs that it really had. In the first that departs: the Graph
as imported and as rewritten is evaluated, then every kernel is judged on its own inputs, and the first that departs is cut
short after each of its operators, once for the tile evaluator and once for the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.diagnose.kernels import Kernels, Ran, run_watched
from plait.diagnose.program import copies
from plait.diagnose.reduce import Values
from plait.diagnose.watch import Call, Seen
from plait.errors import PlaitError
from plait.frontend.fx_import import import_fx
from plait.frontend.origins import origin_of
from plait.frontend.saved import as_wanted
from plait.ir.graph import Graph, Node
from plait.options import Options
from plait.oracle.compare import Verdict, compare, compare_many, reference, sharing, why_shared_otherwise
from plait.oracle.draws import Draws
from plait.oracle.eval_graph import evaluation


@dataclass(frozen=True)
class Place:
    """The first departure. `level`: capture, import, rewriting, tile program, code, call, or "" where none departs by itself. `kernel`:
    its number among the steps of the graph; `operator` and `line`: the user's, `words`: what was found."""

    graph: str = ""
    level: str = ""
    kernel: int | None = None
    kernel_name: str = ""
    operator: str = ""
    line: str = ""
    words: str = ""

    def __str__(self) -> str:
        if not self.graph:
            return self.words
        step = "" if self.kernel is None else f", kernel {self.kernel} {self.kernel_name}"
        where = f", {self.operator}" if self.operator else ""
        return f"{self.graph}{step}{where}" + (f" at {self.line}" if self.line else "") + f": {self.words}"


NOWHERE = Place(
    words="no graph departs on its own inputs: small departures add up, or what is around the graphs differs"
)


def first_departure(seen: Sequence[Seen], options: Options) -> Place:
    """The first graph that departs on the inputs it had, and where in it. Where none does by the rule as it is without a
    measure of noise, by eager's own error alone; then by where results lie."""
    for noise in (None, 0.0):
        for s in seen:
            for call in s.calls:
                bad = _bad(graph_verdicts(s, call, noise))
                if bad:
                    return _within(s, call, options, bad, noise)
    for s in seen:
        for call in s.calls if s.kind == "inference" else ():
            other = _why_elsewhere(s, call)
            if other is not None:
                return Place(s.title, "call", words=f"its results have the right values, but {other}")
    return NOWHERE


def _why_elsewhere(seen: Seen, call: Call) -> str | None:
    """What differs of the strides and memory of a graph's results."""
    args = copies(call.before)
    torch.set_rng_state(call.rng)
    eager = seen.eager(*args)
    bad = _bad(compare_many(list(call.results), eager, eager, strides=True, name="result "))
    return bad[0].message if bad else why_shared_otherwise(call.shares, sharing(eager, args))


def graph_verdicts(seen: Seen, call: Call, noise: float | None = None) -> list[Verdict]:
    """One run of a compiled graph against its captured form in eager and in float64; `noise`: see compare."""
    args, drawn = copies(call.before), Draws()
    torch.set_rng_state(call.rng)
    with drawn.recorded():
        eager = seen.eager(*args)
    try:
        exact, after = _reference(seen, call, drawn)
    except Exception:  # torch's own double precision cannot run it: eager is the only reference
        exact, after = eager, args
    got = list(call.results)
    verdicts = compare_many(got, eager, exact, name="result ", noise=_each(noise, eager))
    return verdicts + compare_many(list(call.after), args, list(after), name="argument ", noise=_each(noise, args))


def _each(noise: float | None, values: Sequence[Any]) -> list[float] | None:
    return None if noise is None else [noise] * len(pytree.tree_leaves(list(values)))


def _reference(seen: Seen, call: Call, drawn: Draws) -> tuple[Any, Any]:
    def run(owner: None, *args: Any) -> list[Any]:
        with drawn.again():
            return seen.eager(*args)

    found = reference(run, [None, *copies(call.before)], with_args=True)
    return found[0], found[1][1:]


def _bad(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [v for v in verdicts if v.status == "FAIL"]


# ---------------------------------------------------------------------------------------------------- inside a graph
def _within(seen: Seen, call: Call, options: Options, bad: Sequence[Verdict], noise: float | None) -> Place:
    compiled, executable = seen.compiled, seen.executable
    if compiled is None or executable is None:
        return Place(seen.title, "import", words=f"it runs in eager, and differs all the same: {bad[0]}")
    wanted = _Wanted(seen, call, noise)
    try:
        imported = import_fx(seen.gm, seen.examples, numerics=options.numerics, rng=options.rng)
        for level, graph in (("import", imported), ("rewriting", compiled.graph)):
            place = wanted.departs(level, graph)
            if place is not None:
                return place
        return _in_kernels(seen, call, options, wanted) or Place(
            seen.title, "call", words=f"every kernel is right on its own inputs, yet {bad[0]}"
        )
    except (KeyError, NotImplementedError) as error:  # sizes that depend on data, types the evaluators only pass on
        return Place(seen.title, "", words=f"it departs ({bad[0]}); its parts cannot be run one by one: {error!r}")


class _Wanted:
    """What the captured graph gives in eager: its results, and the value of each FX node."""

    def __init__(self, seen: Seen, call: Call, noise: float | None) -> None:
        self.seen, self.call, self.noise = seen, call, noise
        torch.set_rng_state(call.rng)
        found = Values(seen.gm)
        with torch.no_grad():
            found.run(*as_wanted(seen.gm, seen.examples, copies(call.before)), enable_io_processing=False)
        self.eager = {k: v for k, v in found.values.items() if isinstance(v, Tensor)}
        torch.set_rng_state(call.rng)
        drawn = Draws()
        with drawn.recorded():
            results = seen.eager(*copies(call.before))
        self.results = [x.cpu() if isinstance(x, Tensor) else x for x in results]
        try:
            exact = _reference(seen, call, drawn)[0]
        except Exception:  # torch's own double precision cannot run it
            exact = self.results
        self.exact = exact
        self.fx = {n.name: n for n in seen.gm.graph.nodes}
        self.constants = {n: _attribute(seen.gm, n) for n in compiled_constants(seen)}

    def departs(self, level: str, graph: Graph) -> Place | None:
        """Where a Graph means something else than the FX graph: the first node that stands for an FX node and differs."""
        torch.set_rng_state(self.call.rng)
        run = evaluation(graph, copies(self.call.before), dtype_mode="eager", constants=self.constants)
        got = pytree.tree_leaves(list(run.returned()))
        verdicts = compare_many(got, self.results, self.exact, noise=_each(self.noise, self.results))
        if not _bad(verdicts):
            return None
        for n, fx_name in stands_for(graph).items():
            eager, value = self.eager.get(fx_name), run.values.get(n)
            if eager is None or value is None or n.kind == "source" or value.rounded.shape != eager.shape:
                continue
            if value.rounded.dtype is not eager.dtype:
                continue
            # node by node there is no float64: what is beyond a share of eager's own value is wrong
            exact = eager.cpu().double() if eager.is_floating_point() else eager.cpu()
            if compare(value.rounded, eager.cpu(), exact, noise=self.noise).status == "FAIL":
                return Place(self.seen.title, level, None, "", *self.named(n, graph), _at_level(level))
        # a result of an operator that has several: named by what is returned
        wrong = next((r for r, v in zip(graph.returns, verdicts, strict=False) if v.status == "FAIL"), ("none",))
        if wrong[0] != "tensor":
            return Place(self.seen.title, level, words=_at_level(level))
        operator, line = self.named(graph.outputs[wrong[1]].read.source, graph)
        return Place(self.seen.title, level, None, "", operator, line, _at_level(level))

    def named(self, n: Node, graph: Graph) -> tuple[str, str]:
        """The operator that the user called, and its line."""
        for o in graph.origins.get(n, ()):
            found = self.fx.get(o.fx)
            if found is not None:
                return operator_name(found, n), o.line
        return n.op, ""


def _at_level(level: str) -> str:
    if level == "import":
        return "the Graph that was imported from the captured program means something else"
    return "a rewrite changed what the Graph means; plait bisect names the rule"


def _in_kernels(seen: Seen, call: Call, options: Options, wanted: _Wanted) -> Place | None:
    compiled, executable = seen.compiled, seen.executable
    assert compiled is not None and executable is not None
    torch.set_rng_state(call.rng)
    _, ran = run_watched(executable, compiled, copies(call.before))
    kernels = Kernels(compiled, executable, call.before, options, wanted.noise)
    for r in ran:
        place = _in_kernel(seen, kernels, r, wanted)
        if place is not None:
            return place
    return None


def _in_kernel(seen: Seen, kernels: Kernels, ran: Ran, wanted: _Wanted) -> Place | None:
    for _, group, part, read, wrote in kernels.parts(ran):
        verdicts = kernels.judge(wrote, read)
        wrong = [n for n, v in verdicts.items() if v.status == "FAIL"]
        if not wrong:
            continue
        try:
            tiles = kernels.judge(kernels.by_tiles(part, read), read)
            faulty = any(v.status == "FAIL" for v in tiles.values())
            words = "the tile program is wrong" if faulty else "the tile program is right, its code is wrong"
        except PlaitError as error:
            faulty, words = True, f"the tile program is wrong ({error.message.splitlines()[0]})"
        first = kernels.first_wrong(group, part, read, code=not faulty)
        at = first if first is not None else wrong[0]
        if first is None:
            words += "; cut short after any one operator it is right"
        graph = kernels.graph
        level = "tile program" if faulty else "code"
        step = kernels.step_of(ran)
        name = kernels.compiled.launches[step].name
        return Place(seen.title, level, step, name, *wanted.named(at, graph), f"{words}; {_plain(verdicts[wrong[0]])}")
    return None


def _plain(v: Verdict) -> str:
    return v.message or str(v)


# ---------------------------------------------------------------------------------------------------- FX and Graph nodes
def stands_for(graph: Graph) -> dict[Node, str]:
    """The node that holds the value of an FX node: the last one made for it -> the FX node's name."""
    last: dict[str, Node] = {}
    for n in graph.nodes():
        for o in graph.origins.get(n, ())[:1]:
            last[o.fx] = n
    return {n: name for name, n in sorted(last.items(), key=lambda item: item[1].serial)}


def operator_name(found: fx.Node, n: Node) -> str:
    """aten.exp of an FX node; with what plait made of it, where that has another name."""
    target = (
        str(found.target).removesuffix(".default").removesuffix(".Tensor")
        if found.op == "call_function"
        else found.name
    )
    return target if n.op in target else f"{n.op} of {target}"


def line_of(found: fx.Node) -> str:
    """The user's line."""
    return origin_of(found).line


def compiled_constants(seen: Seen) -> list[str]:
    """Names of the module attributes that a compiled graph takes as arguments."""
    assert seen.compiled is not None
    return list(seen.compiled.graph.constants.values())


def _attribute(gm: Any, name: str) -> Any:
    found = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found
