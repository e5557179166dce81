"""Graph as text: one node a line, to be read, diffed, pasted in an issue, edited by hand, and parsed back (ir/parse.py).

    graph 1
    device "cpu"
    arity 2
    symbol s0 [2, inf] hint 16
    %input_0: f32[s0, 64] = input() {dtype=f32, name="x"}
        argument 0 strides (64, 1) offset 0 on "cpu"
    %exp_1: f32[s0, 64] = exp(%input_0[i0, i1])
        from "exp" in "net.0" at "model.py:12 y = x.exp()" within fuse 0 "norm"
    %sum_2: f32[s0 | 64] = sum(%exp_1[i0, i1])
    bind s0 = ("size", 0, 0)
    output "out" %sum_2[i0] over (s0) strides (1) on "cpu"
    return ("tensor", 0)

Axes are i0, i1, …; those after `|` are reduced. `v2` is the value of the node's own read number 2. A guarded read is
`%x_0[i0 - 1] ? (i0 - 1; fill=0.0)`. In attributes an Expr is written <s0*64>, and $0 is operand 0 of an extern's template.
G4: parse(print(g)) equals g, and print(parse(s)) is s for every s that was printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from plait.ir.dtype import DType
from plait.ir.graph import Arg, Graph, Input, Node, Output, Read, Region, Shape
from plait.ir.index import Atom, Expr

_AMBIGUOUS = re.compile(r"[iv]\d+")


def print_graph(graph: Graph, origins: bool = True) -> str:
    """The whole graph, ending in a newline."""
    lines = ["graph 1", f"device {_string(graph.device)}", f"arity {graph.arity}"]
    for name, (low, high) in sorted(graph.symbols.items()):
        hint = f" hint {graph.hints[name]}" if name in graph.hints else ""
        lines.append(f"symbol {_symbol(name)} [{low}, {'inf' if high is None else high}]{hint}")
    # a hint may be there for a symbol without bounds
    lines += [f"hint {_symbol(n)} {h}" for n, h in sorted(graph.hints.items()) if n not in graph.symbols]
    inputs = {i.node: i for i in graph.inputs}
    for node in printed_nodes(graph):
        lines.append(print_node(node))
        if node in inputs:
            lines.append("    " + _input(inputs[node]))
        if node in graph.layouts:
            lines.append(f"    layout {_shape(graph.layouts[node])}")
        if node in graph.padded:
            lines.append(f"    layout padded {_shape(graph.padded[node])}")
        if node in graph.partials:
            lines.append("    partial")
        if node in graph.refusals:
            lines.append(f"    refused {_string(graph.refusals[node])}")
        if origins:
            for o in graph.origins.get(node, ()):
                within = f" within {', '.join(map(_region, o.regions))}" if o.regions else ""
                lines.append(f"    from {_string(o.fx)} in {_string(o.module)} at {_string(o.line)}{within}")
    for position, name in sorted(graph.constants.items()):
        lines.append(f"constant {position} {_string(name)}")
    lines += [f"bind {_symbol(name)} = {print_value(how)}" for name, how in graph.bindings.items()]
    lines += [_output(o) for o in graph.outputs]
    lines += [f"return {print_value(r)}" for r in graph.returns]
    lines += [f"effect {n!r}" for n in graph.effects]
    return "\n".join(lines) + "\n"


def _region(r: Region) -> str:
    return f"{r.kind} {r.number} {_string(r.label)}" + (f" side {r.side}" if r.side else "")


def printed_nodes(graph: Graph) -> list[Node]:
    """The graph's nodes and its unused inputs, in the order of their serials."""
    return sorted({*graph.nodes(), *(i.node for i in graph.inputs)}, key=lambda n: n.serial)


def print_node(node: Node) -> str:
    """One node on one line, without its origins."""
    axes = [print_expr(n) for n in node.axes]
    kept = len(axes) - node.reduce
    extents = ", ".join(axes[:kept])
    if node.reduce:
        extents = f"{extents} | {', '.join(axes[kept:])}".lstrip()
    attrs = ", ".join(f"{k}={print_value(v)}" for k, v in node.attrs)
    reads = ", ".join(print_read(r) for r in node.reads)
    return f"{node!r}: {node.dtype.value}[{extents}] = {node.op}({reads})" + (f" {{{attrs}}}" if attrs else "")


def print_read(r: Read) -> str:
    """One operand."""
    text = f"{r.source!r}[{_list(r.index)}]"
    if r.guard:
        text += f" ? ({_list(r.guard)}; fill={print_value(r.fill)})"
    elif repr(r.fill) != "0":
        text += f" ? (; fill={print_value(r.fill)})"
    if r.domain is not None:
        text += f" over {_shape(r.domain)}"
    if r.strides is not None:
        text += f" strides {_shape(r.strides)}"
    return text


def _input(i: Input) -> str:
    where = f"argument {i.position}"
    if i.layout is not None:
        where += f" strides {_shape(i.layout.strides)} offset {print_expr(i.layout.offset)}"
    if i.private:
        where += " private"
    return f"{where} on {_string(i.device)}"


def _output(o: Output) -> str:
    text = f"output {_string(o.name)} {print_read(o.read)} as {_shape(o.strides)}"
    if o.writes_to is not None:
        text += f" writes {o.writes_to}"
    if o.at is not None:
        text += f" at {_shape(o.at)}"
    if o.private:
        text += " private"
    return f"{text} on {_string(o.device)}"


# ------------------------------------------------------------------------------------------------ values
def print_value(v: Any) -> str:
    """An attribute: None, bool, int, float, str, DType, Expr, Arg, Node, or a tuple of those."""
    if v is None or isinstance(v, (bool, int)):
        return str(v)
    if isinstance(v, float):
        return repr(v)
    if isinstance(v, str):
        return _string(v)
    if isinstance(v, DType):
        return v.value
    if isinstance(v, Expr):
        return f"<{print_expr(v)}>"
    if isinstance(v, Arg):
        return f"${v.k}"
    if isinstance(v, Node):
        return repr(v)
    if isinstance(v, tuple):
        inner = ", ".join(print_value(x) for x in v)
        return f"({inner},)" if len(v) == 1 else f"({inner})"
    raise TypeError(f"an attribute cannot be {v!r} ({type(v).__name__})")


def _string(s: str) -> str:
    # json escapes whatever is not printable ASCII, so that one value stays on one line
    return json.dumps(s)


def _symbol(name: str) -> str:
    if not name.isidentifier() or not name.isascii():
        raise ValueError(f"not a symbol's name: {name!r}")
    return f"@{name}" if _AMBIGUOUS.fullmatch(name) else name


# ------------------------------------------------------------------------------------------------ expressions
def leaf_name(a: Atom) -> str:
    """How a Graph's text writes an axis, a value or a symbol."""
    if a.kind == "axis":
        return f"i{a.args[0]}"
    if a.kind == "value":
        return f"v{a.args[0]}"
    return _symbol(str(a.args[0]))


def print_expr(e: Expr, leaf: Callable[[Atom], str] = leaf_name) -> str:
    """Sums of products in usual precedence: 64*i0 + i1 - 1, (i0 // 4), ((i0 + 1) % s0). `leaf` names the leaves."""
    if not e.terms:
        return "0"
    out = ""
    # a positive term first, so that it reads 5 - i0 and not -i0 + 5
    for monomial, c in sorted(e.terms, key=lambda t: t[1] < 0):
        sign = "-" if c < 0 else "+"
        factors = [_atom(a, leaf) for a in monomial]
        if abs(c) != 1 or not factors:
            factors.insert(0, str(abs(c)))
        product = "*".join(factors)
        out += (f"-{product}" if sign == "-" else product) if not out else f" {sign} {product}"
    return out


def _atom(a: Atom, leaf: Callable[[Atom], str]) -> str:
    if a.kind not in ("div", "mod"):
        return leaf(a)
    x, y = a.args
    assert isinstance(x, Expr) and isinstance(y, Expr)
    return f"({_operand(x, leaf)}{' // ' if a.kind == 'div' else ' % '}{_operand(y, leaf)})"


def _operand(e: Expr, leaf: Callable[[Atom], str]) -> str:
    """A side of a division, in parentheses unless it is a single leaf or a plain number."""
    text = print_expr(e, leaf)
    simple = (e.const is not None and e.const >= 0) or (
        len(e.terms) == 1 and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1
    )
    return text if simple else f"({text})"


def _list(exprs: Iterable[Expr]) -> str:
    return ", ".join(print_expr(e) for e in exprs)


def _shape(shape: Shape) -> str:
    return f"({_list(shape)})"
