"""Alignment: the common atoms of a group's axes.

Every axis of every node is a mixed-radix number whose digits are *atoms*. An edge inside the group equates axes: where a
consumer reads its producer at `i`, the two axes share their atoms; where it reads at `k//64, k%64` or `64*h + d`, the atom
on one side is split first. Reads of one outside tensor by several nodes equate axes too, so that siblings share a sweep.
An edge whose index has no such form (a shift, a gather, a diagonal) stays *loose*: the producer is evaluated again at
that index, which legality prices and may refuse.

An Alignment is immutable; `merge` makes the alignment of two groups together, touching only the edges between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plait.ir import index as ix
from plait.ir.graph import Node, Read
from plait.ir.index import Atom, Expr

AxisKey = tuple[Node, int]
Reads = Callable[[Node], tuple[Read, ...]]
FUSIBLE = frozenset({"map", "reduce", "contract", "scan", "random"})


@dataclass
class Alignment:
    """`parts[(node, axis)]` are atom ids, outermost first (none for an extent of 1); resolve them with `atoms_of`."""

    nodes: tuple[Node, ...]
    parts: dict[AxisKey, tuple[int, ...]]
    extent: dict[int, Expr]
    same: dict[int, int]  # union-find: atom -> the atom it was equated with
    cut: dict[int, tuple[int, int]]  # atom -> (outer, inner) it was split into
    owners: dict[int, frozenset[AxisKey]]  # which axes (of members and outside sources) have a root atom
    loose: frozenset[tuple[Node, int]]  # (consumer, read number) of edges that did not align

    # ---------------------------------------------------------------- reading
    def roots(self, atoms: Iterable[int]) -> list[int]:
        """Atoms after following splits and unions, outermost first."""
        out: list[int] = []
        for a in atoms:
            while a in self.same:
                a = self.same[a]
            if a in self.cut:
                out.extend(self.roots(self.cut[a]))
            else:
                out.append(a)
        return out

    def atoms_of(self, node: Node, axis: int) -> list[int]:
        """Root atoms of one axis, outermost first."""
        return self.roots(self.parts[(node, axis)])

    def span(self, node: Node) -> list[int]:
        """Root atoms of all axes of a node, in axis order."""
        return [a for i in range(len(node.axes)) for a in self.atoms_of(node, i)]

    def reduced(self, node: Node) -> list[int]:
        """Root atoms a reduce combines over, or a scan runs along."""
        first = len(node.axes) - (1 if node.kind == "scan" else node.reduce)
        return [a for i in range(first, len(node.axes)) for a in self.atoms_of(node, i)]

    def kept(self, node: Node) -> list[int]:
        """Root atoms of the axes that a node does not combine over or run along."""
        gone = set(self.reduced(node))
        return [a for a in self.span(node) if a not in gone]

    def place(self, node: Node, dim_of: dict[int, Expr]) -> tuple[Expr, ...]:
        """The node's axes as expressions, given an expression for every root atom."""
        out: list[Expr] = []
        for i in range(len(node.axes)):
            atoms = self.atoms_of(node, i)
            out.append(ix.flatten([dim_of[a] for a in atoms], [self.extent[a] for a in atoms]))
        return tuple(out)

    def floating(self, stored: Iterable[Node], reads: Reads) -> frozenset[Node]:
        """Members that are only evaluated at other indices than their own axes: the group's dims need not have those axes."""
        placed = set(stored)
        members = frozenset(self.nodes)
        for n in reversed(self.nodes):  # readers come after what they read
            if n in placed:
                placed.update(
                    r.source for k, r in enumerate(reads(n)) if r.source in members and (n, k) not in self.loose
                )
        return members - placed

    # ---------------------------------------------------------------- merging
    def copy(self) -> Alignment:
        """An independent copy to try something on."""
        return Alignment(
            self.nodes,
            dict(self.parts),
            dict(self.extent),
            dict(self.same),
            dict(self.cut),
            dict(self.owners),
            self.loose,
        )

    def restore(self, saved: Alignment) -> None:
        """Take back everything since `saved`."""
        self.parts, self.extent, self.same = saved.parts, saved.extent, saved.same
        self.cut, self.owners = saved.cut, saved.owners


class Aligner:
    """Makes alignments; numbers atoms."""

    def __init__(self, reads: Reads, inline: frozenset[Node] = frozenset()) -> None:
        self._next = 0
        self._reads, self._inline = reads, inline

    def single(self, node: Node) -> Alignment:
        """The alignment of a group of one."""
        out = Alignment((node,), {}, {}, {}, {}, {}, frozenset())
        self._add_axes(out, node, node.axes)
        self._join_sources(out, [node], frozenset({node}))
        return out

    def merge(self, a: Alignment, b: Alignment) -> Alignment:
        """The alignment of both groups together."""
        if len(a.nodes) < len(b.nodes):
            a, b = b, a
        out = a.copy()
        for node_axis, atoms in b.parts.items():
            if node_axis not in out.parts:
                out.parts[node_axis] = atoms
        out.extent.update(b.extent)
        out.same.update(b.same)
        out.cut.update(b.cut)
        for atom, who in b.owners.items():
            out.owners[atom] = out.owners.get(atom, frozenset()) | who
        out.loose = a.loose | b.loose
        out.nodes = tuple(sorted((*a.nodes, *b.nodes), key=lambda n: n.serial))
        inside = frozenset(out.nodes)
        mine, theirs = frozenset(a.nodes), frozenset(b.nodes)
        self._join_shared(out, b, mine, theirs)
        crossing = [
            (n, k)
            for n in out.nodes
            for k, r in enumerate(self._reads(n))
            if r.source in inside and ((n in mine) != (r.source in mine) or (n in theirs) != (r.source in theirs))
        ]
        loose = set(out.loose)
        for n, k in crossing:
            if not self._join_edge(out, n, self._reads(n)[k]):
                loose.add((n, k))
        out.loose = frozenset(loose)
        return out

    # ---------------------------------------------------------------- edges
    def _join_shared(self, out: Alignment, b: Alignment, mine: frozenset[Node], theirs: frozenset[Node]) -> None:
        """A tensor that both groups touch has two sets of parts: keep its owner's, and equate the other's where they match."""
        for key, theirs_parts in b.parts.items():
            mine_parts = out.parts[key]
            if mine_parts is theirs_parts:
                continue
            source = key[0]
            if source in theirs and source not in mine:
                out.parts[key] = theirs_parts
            saved = out.copy()
            if _summed_and_kept(out, mine_parts, theirs_parts) or not self._equate(
                out, list(mine_parts), list(theirs_parts)
            ):
                out.restore(saved)

    def _add_axes(self, al: Alignment, node: Node, extents: Iterable[Expr]) -> None:
        for i, e in enumerate(extents):
            if e is ix.ONE:
                al.parts[(node, i)] = ()
            else:
                al.parts[(node, i)] = (self._fresh(al, e, frozenset({(node, i)})),)

    def _fresh(self, al: Alignment, extent: Expr, owners: frozenset[AxisKey]) -> int:
        atom = self._next
        self._next += 1
        al.extent[atom] = extent
        al.owners[atom] = owners
        return atom

    def _join_sources(self, al: Alignment, nodes: Iterable[Node], inside: frozenset[Node]) -> None:
        """Equate axes through tensors from outside; a read that has no aligned form is simply read again."""
        for n in nodes:
            for r in self._reads(n):
                if r.source in inside or not r.source.shape:
                    continue
                if (r.source, 0) not in al.parts:
                    self._add_axes(al, r.source, r.source.shape)
                self._join_edge(al, n, r)
            # readers of one recomputed value walk the same axes, though no tensor may have them (a mask of positions)
            for r in n.reads:
                if r.source in self._inline and r.source.shape:
                    if (r.source, 0) not in al.parts:
                        self._add_axes(al, r.source, r.source.shape)
                    self._join_edge(al, n, r)

    def _join_edge(self, al: Alignment, consumer: Node, read: Read) -> bool:
        """Equate the axes of a read's source with the reader's. False, and nothing changed, when the edge is loose."""
        saved: Alignment | None = None
        for d, e in enumerate(read.index):
            extent = read.source.shape[d]
            if extent is ix.ONE:
                continue
            i = e.as_axis()
            if i is not None and al.parts[(consumer, i)] == al.parts[(read.source, d)]:
                continue
            if saved is None:
                saved = al.copy()
            atoms = self._as_atoms(al, consumer, e)
            if atoms is None or not self._equate(al, atoms, list(al.parts[(read.source, d)])):
                al.restore(saved)
                return False
        return True

    def _as_atoms(self, al: Alignment, node: Node, e: Expr) -> list[int] | None:
        """The atoms, outermost first, of which `e` (over the node's axes) is the mixed-radix number; None when it is not one."""
        coeffs, rest = e.linear()
        if rest is not ix.ZERO:
            return None
        terms: list[tuple[list[int], Expr]] = []
        for atom, c in coeffs.items():
            factor = self._factor(al, node, atom)
            if factor is None:
                return None
            terms.append((factor, c))
        out: list[int] = []
        step = ix.ONE
        while terms:
            found = next((t for t in terms if t[1] is step), None)
            if found is None:
                return None
            terms.remove(found)
            out = found[0] + out
            step = step * ix.product(al.extent[a] for a in al.roots(found[0]))
        return al.roots(out)

    def _factor(self, al: Alignment, node: Node, atom: Atom) -> list[int] | None:
        if atom.kind == "axis":
            i = atom.args[0]
            assert isinstance(i, int)
            return al.atoms_of(node, i)
        if atom.kind not in ("div", "mod"):
            return None
        x, d = atom.args
        assert isinstance(x, Expr) and isinstance(d, Expr)
        inner = self._as_atoms(al, node, x)
        if inner is None:
            return None
        pair = self._split_list(al, inner, d)
        return None if pair is None else (pair[0] if atom.kind == "div" else pair[1])

    def _split_list(self, al: Alignment, atoms: list[int], inner: Expr) -> tuple[list[int], list[int]] | None:
        """Cut a list of atoms into (outer, inner) parts, the inner ones having `inner` points; splits an atom if it must."""
        low: list[int] = []
        left = al.roots(atoms)
        need = inner
        while need is not ix.ONE:
            if not left:
                return None
            a = left.pop()
            e = al.extent[a]
            rest = divide(need, e)
            if rest is not None:
                low.insert(0, a)
                need = rest
                continue
            outer_extent = divide(e, need)
            if outer_extent is None:
                return None
            outer, low_atom = self._cut(al, a, outer_extent, need)
            left.append(outer)
            low.insert(0, low_atom)
            need = ix.ONE
        return left, low

    def _cut(self, al: Alignment, a: int, outer: Expr, inner: Expr) -> tuple[int, int]:
        owners = al.owners[a]
        pair = (self._fresh(al, outer, owners), self._fresh(al, inner, owners))
        al.cut[a] = pair
        return pair

    def _equate(self, al: Alignment, xs: list[int], ys: list[int]) -> bool:
        """Make two mixed-radix numbers the same; False when their atoms cannot match (partial changes remain)."""
        a, b = al.roots(xs), al.roots(ys)
        while a and b:
            x, y = a.pop(), b.pop()
            if x == y:
                continue
            ex, ey = al.extent[x], al.extent[y]
            if ex is not ey:
                more = divide(ex, ey)
                if more is not None:
                    outer, x = self._cut(al, x, more, ey)
                    a.append(outer)
                else:
                    more = divide(ey, ex)
                    if more is None:
                        return False
                    outer, y = self._cut(al, y, more, ex)
                    b.append(outer)
            if _diagonal(al.owners[x], al.owners[y]):
                return False
            al.same[y] = x
            al.owners[x] = al.owners[x] | al.owners[y]
            # lists taken before this union may name y
            a, b = al.roots(a), al.roots(b)
        return not a and not b


def _diagonal(xs: frozenset[AxisKey], ys: frozenset[AxisKey]) -> bool:
    """True when one node would have the same atom in two of its axes."""
    axis_of = dict(xs)
    return any(axis_of.get(n, i) != i for n, i in ys)


def _summed_and_kept(al: Alignment, xs: Iterable[int], ys: Iterable[int]) -> bool:
    """True when a product sums what another one keeps: they share a tensor there (keys, read for the scores and for the
    gradient of the queries), but no sweep."""
    a, b = ([_of_products(al.owners[x]) for x in al.roots(atoms)] for atoms in (xs, ys))
    return any(
        p is not q
        for one, other in ((a, b), (b, a))
        for summed, _ in one
        for _, kept in other
        for p in summed
        for q in kept
    )


def _of_products(owners: frozenset[AxisKey]) -> tuple[set[Node], set[Node]]:
    """Products that sum an atom, and those that keep it."""
    products = [(n, i >= len(n.axes) - n.reduce) for n, i in owners if n.kind == "contract"]
    return {n for n, summed in products if summed}, {n for n, summed in products if not summed}


def divide(n: Expr, d: Expr) -> Expr | None:
    """n / d when it divides exactly as polynomials with one-term divisors, else None."""
    if n is d:
        return ix.ONE
    if len(d.terms) != 1:
        return None
    whole, rest = ix.split_multiples(n, d)
    return whole if not rest.terms and whole.terms else None
