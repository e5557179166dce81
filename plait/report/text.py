"""The report as a page for a terminal: what it came to, what was not fused and why, then every graph's steps.

Everything fits `width` columns; colours only where the output is a terminal. Long lists are cut, and say what was left out.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plait.ir.names import place, places
from plait.report.facts import Facts, GraphFacts, Kernel, Resources
from plait.report.summary import Entry, Row, entries, rows, saved
from plait.report.words import bytes_text, count, figure, intensity_text, listed, modules, us_text

WIDTH = 100
_FEW = 2  # kernels of a program that is shown in detail unless asked otherwise


def render(facts: Facts, *, top: int = 5, detail: bool | None = None, width: int = WIDTH, color: bool = False) -> str:
    """The page. `top`: refusals, and steps of each graph, to list (0: all); `detail`: every operator and value of every kernel
    (None: of small programs)."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=None if color else True, highlight=False, soft_wrap=False
    )
    if detail is None:
        detail = facts.totals.launches <= _FEW
    for part in (_head(facts), _refusals(facts, top), *(_graph(facts, g, top, detail) for g in facts.graphs)):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _bare(*columns: tuple[str, str]) -> Table:
    """A table without lines; columns are (head, justify)."""
    table = Table(
        box=None, padding=(0, 1, 0, 0), show_header=any(h for h, _ in columns), header_style="bold", pad_edge=False
    )
    for head, justify in columns:
        wraps = justify == "wrap"
        table.add_column(
            head,
            justify="left" if wraps or justify == "left" else "right",
            no_wrap=not wraps,
            ratio=1 if wraps else None,
            overflow="fold",
        )
    return table


# --------------------------------------------------------------------------------------------------------------- head
def _head(facts: Facts) -> RenderableType:
    t = facts.totals
    how = "predicted, nothing ran there" if facts.predicted else "compiled and run once"
    title = Text.assemble(
        (facts.program, "bold"), f" on {facts.target} ({how})" + (", training" if facts.train else "")
    )
    before = f"eager  {count(t.operators, 'operator')}, {bytes_text(t.before.total)}"
    after = f"plait  {count(t.kernels, 'kernel')} + {count(t.calls, 'ATen call')}, {bytes_text(t.after.total)}"
    times = saved(facts)
    if times is not None and abs(times - 1) >= 0.005:
        after += f" ({figure(times)}x less)" if times > 1 else f" ({figure(1 / times)}x more)" if times else ""
    if t.predicted_us is not None:
        after += f", {us_text(t.predicted_us)} us predicted"
    lines: list[RenderableType] = [title, Text(before), Text(after)]
    lines.append(Text(f"memory {bytes_text(t.peak_bytes)} at most beside inputs of {bytes_text(t.input_bytes)}"))
    for failure, n in _failures(facts).items():
        lines.append(Text(f"{count(n, 'kernel')} {failure}", style="red"))
    for reason in facts.breaks:
        lines.append(Text(f"cut by Dynamo: {reason}", style="yellow"))
    for g in facts.graphs:
        if g.left_out:
            lines.append(Text(f"the budget was used up in {g.name}, left out: {', '.join(g.left_out)}", style="yellow"))
    for f in dict.fromkeys((f.scope, f.op, f.reason) for g in facts.graphs for f in g.fallbacks):
        lines.append(Text(f"in eager: {f[0]} {f[1]}: {f[2]}".replace(" :", ":"), style="red"))
    return Group(*lines)


def _failures(facts: Facts) -> dict[str, int]:
    """What is wrong with kernels, and with how many: "does not run" of one, "do not run" of several."""
    found: dict[str, int] = {}
    for _, k in facts.steps():
        if k.failure:
            what = k.failure.partition(":")[0]
            found[what] = found.get(what, 0) + 1
    return {what if n == 1 else what.replace("does", "do", 1): n for what, n in found.items()}


# ----------------------------------------------------------------------------------------------------------- refusals
def _refusals(facts: Facts, top: int) -> RenderableType:
    found = entries(facts.graphs)
    if not facts.graphs:
        return Text("\nNothing was compiled: the program calls no operators")
    if not found:
        return Text("\nNot fused: nothing")
    shown = found[: top or None]
    body: list[RenderableType] = []
    table = _bare(("", "right"), ("", "right"), ("", "wrap"))
    for k, e in enumerate(shown, 1):
        table.add_row(f"{k}.", bytes_text(e.nbytes), _entry(e))
    of = f"{len(shown)} of {count(len(found), 'kind')}" if len(shown) < len(found) else count(len(found), "kind")
    body.append(Text.assemble(("\nNot fused", "bold"), f", most bytes first ({of})"))
    body.append(table)
    return Group(*body)


def _entry(e: Entry) -> Text:
    """Which operators, then why; what would change it where anything would."""
    r = e.first
    text = Text(e.title, style="bold")
    text.append(f"\n{r.sentence}", style="not bold")
    if not r.unlock.startswith("nothing"):
        text.append(f"\nto change it: {r.unlock}", style="dim not bold")
    return text


# -------------------------------------------------------------------------------------------------------------- graphs
def _graph(facts: Facts, g: GraphFacts, top: int, detail: bool) -> RenderableType:
    head = Text.assemble((f"\n{g.name}", "bold"), f" ({g.kind})" + (f" from {place(g.line)}" if g.line else ""))
    if g.status != "compiled":
        return Group(head, Text(f"  {g.status}: nothing of it is plait's"))
    found = rows(g)
    shown = found if detail or not top else found[:top]
    table = _bare(
        ("#", "right"),
        ("", "right"),
        ("step, by time", "wrap"),
        ("us", "right"),
        ("bound", "left"),
        ("bytes alone", "right"),
        ("fused", "right"),
        ("flop/B", "right"),
        ("fused", "right"),
    )
    for row in shown:
        _add_row(table, row)
    parts: list[RenderableType] = [head, table]
    rest = found[len(shown) :]
    if rest:
        parts.append(
            Text(f"   and {count(sum(len(r.steps) for r in rest), 'more step')}, {us_text(sum(r.us for r in rest))} us")
        )
    if detail:
        parts += [_details(r.first) for r in shown if r.first.kind == "kernel"]
    return Group(*parts)


def _add_row(table: Table, row: Row) -> None:
    k, times = row.first, len(row.steps)
    table.add_row(
        str(k.number),
        f"{times}x" if times > 1 else "",
        _step(row),
        us_text(row.us),
        k.bound or "-",
        bytes_text(row.before.total) if any(m.counted for s in row.steps for m in s.members) else "-",
        bytes_text(row.after.total),
        intensity_text(_per(row.flops.counted, row.before.total)),
        intensity_text(_per(row.flops.counted, row.after.total)),
    )


def _per(flops: float, nbytes: float) -> float | None:
    return flops / nbytes if nbytes else None


def _step(row: Row) -> Text:
    """What a step does, where the user wrote it, and how it runs."""
    k = row.first
    text = Text(row.title)
    notes = [places(k.lines)] if k.lines else []
    if k.kind == "call":
        notes += [f"in {m}" for m in [modules(m.module for s in row.steps for m in s.members)] if m]
    else:
        notes.append(f"{'+'.join(k.directions) or 'alone'}, {k.mapping}")
    if k.kind == "kernel" and k.why:
        notes.append(k.why)
    if k.resources is not None:
        notes.append(_taken(k.resources))
    if k.measured_us is not None:
        before = " before" if any(v.remembered for v in k.variants) else ""
        notes.append(f"measured{before}, {100 * (k.roofline_share or 0):.0f} % of roofline")
    if notes:
        text.append(f"\n{'; '.join(notes)}", style="dim")
    if k.failure:
        text.append(f"\n{k.failure}", style="red")
    return text


def _taken(r: Resources) -> str:
    spills = f"{r.spills} B spilled" if r.spills else "no spills"
    return f"{r.registers} registers, {spills}, {bytes_text(r.shared)} shared, {100 * r.occupancy:.0f} % occupancy"


def _details(k: Kernel) -> RenderableType:
    """Every operator of a kernel, as it would be alone, and where its values live."""
    lives = {v.name: v.lives for v in k.intermediates}
    table = _bare(
        ("operator", "left"),
        ("the user's line", "wrap"),
        ("flops", "right"),
        ("special", "right"),
        ("bytes alone", "right"),
        ("flop/B", "right"),
    )
    for m in k.members:
        flops, special = m.flops.counted, m.flops.special
        alone = bytes_text(m.before.total) if m.counted else "elsewhere"
        table.add_row(
            m.name, m.line or "-", _amount(flops), _amount(special), alone, intensity_text(m.intensity_before)
        )
    work = [f"{_amount(n)} {what}" for n, what in _by_unit(k) if n]
    sums = Text(f"{k.name}: {', '.join(work) or 'no floating-point work'}; roofline {us_text(k.roofline_us)} us")
    living = [f"{lived} {listed(names, 8)}" for lived, names in _by_life(lives).items()]
    return Padding(Group(Text(""), sums, table, Text("values: " + "; ".join(living), style="dim")), (0, 0, 0, 2))


def _by_life(lives: dict[str, str]) -> dict[str, Sequence[str]]:
    out: dict[str, list[str]] = {}
    for name, lived in lives.items():
        out.setdefault(f"in {lived}s" if lived != "memory" else "in memory", []).append(name)
    return dict(out)


def _by_unit(k: Kernel) -> list[tuple[float, str]]:
    return [
        (k.flops.arithmetic, "arithmetic"),
        (k.flops.special, "special functions"),
        (k.flops.tensor_core, "on tensor cores"),
    ]


def _amount(n: float) -> str:
    """Operations: 3.15 M."""
    for unit in ("", " k", " M", " G", " T"):
        if n < 1000 or unit == " T":
            return f"{n:.0f}" if not unit else f"{figure(n)}{unit}"
        n /= 1000
    raise AssertionError
