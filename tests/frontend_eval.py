"""A brute-force reading of imported graphs with numpy: every read by its index map, point by point. Independent of
plait/oracle, and only for graphs that move elements and compute little."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from plait.frontend.externs import call, decompositions
from plait.frontend.fx_import import import_fx
from plait.ir.bindings import bind_symbols, sym_values
from plait.ir.graph import Graph, Node, Read, Shape
from plait.ir.index import Atom, Expr

_MAPS: dict[str, Any] = {
    "copy": lambda a: a,
    "abs": np.abs,
    "sub": np.subtract,
    "add": np.add,
    "mul": np.multiply,
    "neg": np.negative,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "lt": np.less,
    "gt": np.greater,
    "where": np.where,
}


class Brute:
    """Values of one graph for given arguments."""

    def __init__(self, graph: Graph, args: list[Any], gm: Any = None) -> None:
        constants = [getattr(gm, n) for n in graph.constants.values()]
        self.graph, self.args = graph, [*args, *constants]
        self.symbols = sym_values(bind_symbols(graph.bindings, self.args))
        self.values: dict[Node, Any] = {
            i.node: np.asarray(torch.as_tensor(self.args[i.position]).detach()) for i in graph.inputs
        }
        for n in graph.nodes():
            if n not in self.values:
                self.values[n] = self.compute(n)

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        return tuple(e.evaluate(self.symbols) for e in shape)

    def over(self, e: Expr, extents: tuple[int, ...], reads: dict[int, Any]) -> Any:
        env: dict[Atom, Any] = dict(self.symbols)
        grid = np.indices(extents)
        env |= {Atom.make("axis", d): grid[d] for d in range(len(extents))}
        env |= {Atom.make("value", k): v for k, v in reads.items()}
        return np.broadcast_to(np.asarray(e.evaluate(env)), extents)  # type: ignore[arg-type]

    def read(self, r: Read, extents: tuple[int, ...], reads: dict[int, Any]) -> tuple[Any, Any]:
        """(value, where the guard holds)."""
        holds = np.ones(extents, dtype=bool)
        for g in r.guard:
            holds &= self.over(g, extents, reads) >= 0
        places = [self.over(e, extents, reads) for e in r.index]
        source = self.values[r.source]
        for p, n in zip(places, source.shape, strict=True):
            assert bool(((p >= 0) & (p < n) | ~holds).all()), f"{r} is out of bounds"
        if source.size == 0:
            return np.full(extents, r.fill, dtype=source.dtype), holds
        found = source[tuple(np.where(holds, p, 0) for p in places)] if places else np.broadcast_to(source, extents)
        return np.where(holds, found, np.asarray(r.fill, dtype=source.dtype)), holds

    def compute(self, n: Node) -> Any:
        extents = self.sizes(n.axes)
        if n.op == "extern":
            return np.asarray(call(n, [torch.from_numpy(self.operand(r)) for r in n.reads], self.size))
        if n.op == "const":
            return np.asarray(n.attr("value"), dtype=_numpy(n))
        if n.op == "index":
            return self.over(n.attr("expr"), extents, {})
        got: dict[int, Any] = {}
        order = list(range(len(n.reads)))
        for k in order[1:] + order[:1] if n.op == "gather" else order:
            got[k] = self.read(n.reads[k], extents, {j: v[0] for j, v in got.items()})
        if n.op == "gather":
            return got[0][0]
        if n.op == "pieces":
            out = got[order[-1]][0]
            for k in reversed(order):
                out = np.where(got[k][1], got[k][0], out)
            return out
        if n.op == "cast":
            return got[0][0].astype(_numpy(n))
        if n.op == "bitcast":
            return np.ascontiguousarray(got[0][0]).view(_numpy(n))
        return _MAPS[n.op](*(got[k][0] for k in order))

    def size(self, e: Expr) -> int:
        return e.evaluate(self.symbols)

    def operand(self, r: Read) -> Any:
        assert r.domain is not None
        return np.array(self.read(r, self.sizes(r.domain), {})[0])

    def outputs(self) -> list[Any]:
        return [self.operand(o.read) for o in self.graph.outputs]


def _numpy(n: Node) -> Any:
    return {"bool": bool, "f32": np.float32, "f64": np.float64}.get(n.dtype.value) or np.dtype(
        n.dtype.value.replace("i", "int").replace("u", "uint")
        if not n.dtype.value.startswith("u")
        else n.dtype.value.replace("u", "uint")
    )


def imported(fn: Any, args: list[Any], mode: str = "fake", **options: Any) -> tuple[Graph, Any]:
    """The Graph of fn at args, and the FX graph it came from."""
    gm = make_fx(fn, decompositions(), tracing_mode=mode)(*args)
    return import_fx(gm, args, **options), gm


def check(fn: Any, args: list[Any], mode: str = "fake", externs: bool = False) -> Graph:
    """Import fn, evaluate the graph by brute force, and compare exactly with torch, strides included."""
    graph, gm = imported(fn, args, mode)
    assert externs or not [n for n in graph.nodes() if n.kind == "extern"], graph.refusals
    want = fn(*args)
    want = list(want) if isinstance(want, (list, tuple)) else [want]
    brute = Brute(graph, args, gm)
    outputs = iter(brute.outputs())
    assert len(graph.returns) == len(want)
    for w, r in zip(want, graph.returns, strict=True):
        if r[0] == "input":
            assert args[r[1]] is w or torch.equal(args[r[1]], w)
            continue
        o = graph.outputs[r[1]]
        got = next(outputs)
        assert list(got.shape) == list(w.shape), (got.shape, w.shape)
        assert np.array_equal(got, w.numpy(), equal_nan=got.dtype.kind == "f"), (got, w)
        if 0 not in w.shape and not w._is_view():
            have = [s for s, n in zip(brute.sizes(o.strides), w.shape, strict=True) if n != 1]
            assert have == [s for s, n in zip(w.stride(), w.shape, strict=True) if n != 1]
    return graph
