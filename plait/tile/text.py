"""TileProgram as text: one statement a line, every field of the program in it.

    program "k0_softmax"
    schedule form=flat tile=p0:4,r0:all warps=4 stages=1 vector=r0
    symbols s0
    dim p0: s0 grid
    dim r0: 64 row
    buffer b0 "b0": f32 in, 64*s0 elements
    v0: f32<p0,r0> = load b0[64*p0 + r0]
    v1: f32<p0> = max v0 over r0
    sweep r0
        v2: f32<p0,r0> = exp(v0)
    store b1[64*p0 + r0] = v2 over <p0,r0>

Equal programs print equal and different ones differ, so caches may hash it. The header's comment lines are left out on
demand, because they carry the user's source lines and not meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from plait.ir.index import Atom, Expr
from plait.ir.text import leaf_name, print_expr, print_value
from plait.tile.program import Check, Dot, Let, Load, Reduce, Scan, Span, Stmt, Store, Sweep, TileProgram


def print_program(program: TileProgram, header: bool = True) -> str:
    """The whole program, ending in a newline."""
    lines = [f"# {' '.join(h.splitlines())}".rstrip() for h in program.header] if header else []
    lines += [f"program {json.dumps(program.name)}", f"schedule {program.schedule}"]
    lines.append(f"symbols {', '.join(program.symbols)}".rstrip())
    leaf = _leaf(program)
    for d in program.dims:
        lines.append(f"dim {d.name}: {print_expr(d.extent, leaf)} {d.role}")
    for k, b in enumerate(program.buffers):
        lines.append(
            f"buffer b{k} {json.dumps(b.name)}: {b.dtype.value} {b.role}, {print_expr(b.elems, leaf)} elements"
            + (f", rows of {b.rows[0]} every {b.rows[1]}" if b.rows else "")
        )
    lines += [f"message {k} {json.dumps(m)}" for k, m in enumerate(program.messages, 1)]
    lines += [text for _, text in statement_lines(program)]
    return "\n".join(lines) + "\n"


def statement_lines(program: TileProgram) -> list[tuple[Stmt, str]]:
    """Every statement with its indented line, sweeps before their bodies."""
    return list(_walk(program.body, program, _leaf(program), ""))


def _walk(
    body: tuple[Stmt, ...], program: TileProgram, leaf: Callable[[Atom], str], indent: str
) -> Iterator[tuple[Stmt, str]]:
    for s in body:
        yield s, indent + print_statement(s, program, leaf)
        if isinstance(s, Sweep):
            yield from _walk(s.body, program, leaf, indent + "    ")


def print_statement(s: Stmt, program: TileProgram, leaf: Callable[[Atom], str] | None = None) -> str:
    """One statement on one line (of a sweep only its head)."""
    name = leaf or _leaf(program)

    def over(span: Span) -> str:
        return f"<{','.join(_dim(program, d) for d in span)}>"

    def typed(x: Let | Load | Reduce | Scan) -> str:
        return f"v{x.out}: {x.dtype.value}{over(x.span)}"

    if isinstance(s, Sweep):
        return f"sweep {_dim(program, s.dim)}"
    if isinstance(s, Let):
        attrs = ", ".join(f"{k}={_attr(v, name)}" for k, v in s.attrs)
        args = ", ".join(f"v{a}" for a in s.args)
        return f"{typed(s)} = {s.op}({args})" + (f" {{{attrs}}}" if attrs else "")
    if isinstance(s, Load):
        fill = f"fill={print_value(s.fill)}" if s.guard or repr(s.fill) != "0" else ""
        return f"{typed(s)} = load b{s.buffer}[{print_expr(s.address, name)}]{_guard(s.guard, name, fill)}"
    if isinstance(s, Store):
        where = f"b{s.buffer}[{print_expr(s.address, name)}]"
        return f"store {where} = v{s.value} over {over(s.span)}{_guard(s.guard, name)}"
    if isinstance(s, Check):
        range_ = f"0 <= {print_expr(s.index, name)} < {print_expr(s.extent, name)}"
        return f"check {range_} else {s.code} over {over(s.span)}{_guard(s.guard, name)}"
    if isinstance(s, Reduce):
        scale = f" scale v{s.scale}" if s.scale is not None else ""
        dims = ",".join(_dim(program, d) for d in s.dims)
        if isinstance(s, Dot):
            return f"{typed(s)} = dot v{s.arg}, v{s.other} as {s.operand.value} over {dims}{scale}"
        linear = f" linear {print_expr(s.linear, name)}" if s.linear is not None else ""
        return f"{typed(s)} = {s.monoid} v{s.arg} over {dims}{linear}{scale}"
    return f"{typed(s)} = {s.scan} v{s.arg} along {_dim(program, s.dim)}"


def _leaf(program: TileProgram) -> Callable[[Atom], str]:
    def name(a: Atom) -> str:
        place = a.args[0]
        return _dim(program, place) if a.kind == "axis" and isinstance(place, int) else leaf_name(a)

    return name


def _dim(program: TileProgram, d: int) -> str:
    # a broken program must still print: its checker shows it
    return program.dims[d].name if 0 <= d < len(program.dims) else f"?{d}"


def _guard(guard: tuple[Expr, ...], leaf: Callable[[Atom], str], fill: str = "") -> str:
    if not guard and not fill:
        return ""
    text = ", ".join(print_expr(g, leaf) for g in guard)
    return f" ? ({text}{'; ' + fill if fill else ''})"


def _attr(v: object, leaf: Callable[[Atom], str]) -> str:
    if isinstance(v, Expr):
        return f"<{print_expr(v, leaf)}>"
    if isinstance(v, tuple):
        return f"({', '.join(_attr(x, leaf) for x in v)})"
    return print_value(v)
