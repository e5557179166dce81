"""Give every output and every ATen operand a tensor in memory with the strides it is owed.

    extern(mm, %x^T as f32[8, 4] strides [1, 8])         x lies row-major: passed as a view of x
    extern(mm, pad(%x) as f32[9, 4])                     no view of x: reads %copy, a new node with that layout
    two operands that read it so, with other strides     each reads a copy with its own
    extern(f, pad(%x) as f32[4, 8] strides [8, 0])       %copy has one column, which is read eight times
    extern(f, pad(%x) as f32[4, 9] strides [12, 1])      %copy has gaps behind its rows: some calls ask for aligned ones
    outputs %y, %y                                       the second is a copy, unless eager's shares the first one's memory

    output %x[1:], a view of an argument                 stays one: it is a view in eager, too

Requires canonical graphs; establishes: every Output and extern operand is a strided view of its source's buffer, and an
Output's source is an argument that eager returns a view of, or a computed node that no other Output has but one that eager
returns in the same memory.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir import index as ix
from plait.ir.graph import Builder, Graph, Node, Output, Read, Shape, contiguous_strides, identity
from plait.plan.layout import Layouts, has_aligned_rows, is_dense, is_matrix, is_product, same_strides
from plait.rewrite.engine import rebuilt, transform


def materialise(graph: Graph) -> Graph:
    """Insert the copies that outputs and ATen calls need; prefer to lay a value out as its reader wants it."""
    graph = _prefer(graph)
    layouts = Layouts(graph)
    wanted: dict[Node, Shape] = {}
    # copies that are in the graph already: an inserted one that is the same node has that one's layout
    copies = {(n.axes, n.reads[0]): layouts.strides(n) for n in graph.nodes() if n.op == "copy"}

    def laid_out(builder: Builder, old: Read, new: Read) -> Node:
        """A copy of an operand with the strides it is owed; operands that want other strides get other copies."""
        copy = _copy(builder, new)
        has = wanted.get(copy, copies.get((copy.axes, replace(old, domain=None, strides=None))))
        while has is not None and old.strides is not None and not same_strides(copy.shape, has, old.strides):
            copy = _copy(builder, _whole(copy, new))
            has = wanted.get(copy)
        if old.strides is not None:
            wanted[copy] = old.strides
        return copy

    def visit(builder: Builder, n: Node, reads: tuple[Read, ...]) -> Node | None:
        if n.kind != "extern":
            return None
        fixed = []
        for old, new in zip(n.reads, reads, strict=True):
            if _is_view(old, layouts) or _is_taken(n, old, layouts):
                fixed.append(new)
                continue
            repeated = _repeated(old)
            copy = laid_out(builder, _once(old, repeated), _once(new, repeated))
            index = tuple(ix.ZERO if d in repeated else e for d, e in enumerate(identity(copy.shape)))
            fixed.append(replace(new, source=copy, index=index, guard=(), fill=0))
        return rebuilt(builder, n, tuple(fixed))

    out = transform(graph, visit)
    for copy, strides in wanted.items():
        (out.padded if has_aligned_rows(out, copy.shape, strides) else out.layouts)[copy] = strides
    return _own_outputs(out)


def _prefer(graph: Graph) -> Graph:
    """A computed node that is delivered whole takes the strides of its first delivery."""
    layouts = dict(graph.layouts)
    taken: set[Node] = set()
    reads = [(o.read, o.strides) for o in graph.outputs if o.writes_to is None]
    reads += [(r, r.strides) for n in graph.nodes() if n.kind == "extern" for r in n.reads if r.strides is not None]
    for r, strides in reads:
        n = r.source
        if (
            (
                n.kind in ("map", "reduce", "contract", "scan", "random")
                and n not in taken
                and r.index == identity(n.shape)
                and r.domain == n.shape
            )
            and strides is not None
            and not r.guard
            and is_dense(graph, n.shape, strides)
        ):
            layouts[n] = strides
            taken.add(n)
    return replace(graph, layouts=layouts)


def _is_view(read: Read, layouts: Layouts) -> bool:
    if read.source.kind == "source" and not read.source.shape and read.domain == ():
        return True
    if read.source.kind == "extern" and read.source.attr("outs")[0][1] is None:
        return True  # a type plait only hands on
    view = layouts.view(read)
    return view is not None and (read.strides is None or same_strides(view.shape, view.strides, read.strides))


def _is_taken(n: Node, read: Read, layouts: Layouts) -> bool:
    """Whether a call takes an operand as a forward of ours left it, with its rows apart."""
    view = layouts.view(read) if layouts.is_padded(read.source) and is_product(n) else None
    return view is not None and is_matrix(view)


def _repeated(read: Read) -> frozenset[int]:
    """Dimensions along which an operand is the same, and is owed with a stride of 0."""
    if read.strides is None or read.domain is None:
        return frozenset()
    used = {a for e in (*read.index, *read.guard) for a in e.axes()}
    still = (d for d, s in enumerate(read.strides) if s is ix.ZERO and d not in used)
    return frozenset(d for d in still if read.domain[d] is not ix.ONE)


def _once(read: Read, repeated: frozenset[int]) -> Read:
    """The read with dimensions that repeat it cut to one."""
    assert read.domain is not None
    return replace(read, domain=tuple(ix.ONE if d in repeated else e for d, e in enumerate(read.domain)))


def _own_outputs(graph: Graph) -> Graph:
    """Outputs get memory of their own, but for views of arguments."""
    layouts = Layouts(graph)
    builder = _continue(graph)
    owned: dict[Node, int | None] = {}
    positions = {o.writes_to for o in graph.outputs}
    written = {i.node for i in graph.inputs if i.position in positions}
    arguments: dict[int | None, Node] = {-1 - i.position: i.node for i in graph.inputs}
    outputs: list[Output] = []
    for o in graph.outputs:
        read = o.read
        fits = _is_view(replace(read, strides=o.strides if o.writes_to is None else None), layouts)
        if fits and o.writes_to is None and read.source not in written and arguments.get(o.memory) is read.source:
            outputs.append(o)
            continue
        # a view of an earlier result shares its memory where eager's does
        together = o.memory is not None and o.memory >= 0 and owned.get(read.source) == o.memory
        # what is copied out needs no memory of its own, unless the copying itself may change it
        shares = read.source.kind == "source" or (read.source in owned and not together)
        unsafe = read.source in written if o.writes_to is not None else shares
        if unsafe or not fits:
            copied = _copied_out(graph, builder, o, layouts if fits else None, owned)
            graph.origins.setdefault(copied.read.source, graph.origins.get(read.source, ()))
            o, read = copied, copied.read
        if o.writes_to is None:
            owned.setdefault(read.source, o.memory)
        outputs.append(replace(o, read=read))
    return replace(graph, outputs=tuple(outputs))


def _copied_out(
    graph: Graph, builder: Builder, o: Output, layouts: Layouts | None, owned: dict[Node, int | None]
) -> Output:
    """The output from a copy with the strides it is owed. Elements with gaps between them, or seen twice, are a view of a copy
    of the source (`layouts` are given if they can be), or else lie next to each other."""
    read, source = o.read, o.read.source
    assert read.domain is not None
    gaps = o.writes_to is None and not is_dense(graph, read.domain, o.strides)
    behind = gaps and layouts is not None and is_dense(graph, source.shape, layouts.strides(source))
    copy = _copy(builder, Read(source, identity(source.shape), domain=source.shape) if behind else read)
    while copy in owned:
        copy = _copy(builder, _whole(copy, read))
    if behind:
        assert layouts is not None
        graph.layouts[copy] = layouts.strides(source)
        return replace(o, read=replace(read, source=copy))
    if gaps:
        plain = contiguous_strides(copy.shape)
        return replace(o, read=replace(_whole(copy, read), strides=plain), strides=plain)
    if is_dense(graph, copy.shape, o.strides):
        graph.layouts[copy] = o.strides
    return replace(o, read=_whole(copy, read))


def _continue(graph: Graph) -> Builder:
    """A builder whose new nodes come after all of the graph's."""
    builder = Builder(graph.facts())
    all_nodes = (*graph.nodes(), *(i.node for i in graph.inputs))
    builder.start_at(max((n.serial for n in all_nodes), default=-1) + 1)
    return builder


def _copy(builder: Builder, read: Read) -> Node:
    assert read.domain is not None
    return builder.node("copy", read.domain, [replace(read, domain=None, strides=None)])


def _whole(n: Node, like: Read) -> Read:
    return Read(n, identity(n.shape), domain=n.shape, strides=like.strides)
