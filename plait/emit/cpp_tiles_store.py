"""Where values of a tiled part live: C++ scalars, arrays over tile dims in a thread's arena, and accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.emit.cpp_ops import CTYPE
from plait.emit.cpp_scope import Scope
from plait.emit.cpp_tiles_plan import Tiles
from plait.emit.writer import Writer
from plait.ir.dtype import DType
from plait.tile.program import Dot, Reduce

_BOOL_RULES = {"sum": "Any", "max": "Any", "any": "Any", "prod": "All", "min": "All", "all": "All"}
_RULES = {"sum": "Sum", "dot": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "All"}
_ARGS = {"argmax": "ArgMax", "argmin": "ArgMin"}


@dataclass(frozen=True)
class Place:
    """One array, or one scalar variable when it has no dims. `dims` are in the order of the layout, the last one dense."""

    name: str
    ctype: str
    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    def stride(self, d: int) -> str:
        """Elements between neighbours along a dim; "0" when there is one value for all."""
        if d not in self.dims:
            return "0"
        at = self.dims.index(d)
        if at == len(self.dims) - 1:
            return "1"
        factors = [str(n) for n in self.sizes[at + 1 : -1]]
        return " * ".join([*factors, f"{self.name}_ld"])

    def at(self, names: Sequence[str], without: Sequence[int] = ()) -> str:
        """The element of the current point; loops over the dims `without` start at 0."""
        terms = []
        for d in self.dims:
            if d not in without:
                stride = self.stride(d)
                terms.append(f"{names[d]}_at" + (f" * {stride}" if stride != "1" else ""))
        return " + ".join(terms) or "0"

    def element(self, names: Sequence[str]) -> str:
        """The C++ lvalue of the current point."""
        return f"{self.name}[{self.at(names)}]" if self.dims else self.name

    def elems(self) -> str:
        """How many elements the array has, padding included."""
        return " * ".join([*(str(n) for n in self.sizes[:-1]), f"{self.name}_ld"])

    def pointer(self, names: Sequence[str], without: Sequence[int]) -> str:
        """The address of the first element of loops over `without`."""
        if not self.dims:
            return f"&{self.name}"
        at = self.at(names, without)
        return self.name if at == "0" else f"{self.name} + {at}"


class Store:
    """Hands out places. Arrays are cut from one arena, whose declaration is written when all are known."""

    def __init__(self, scope: Scope, tiles: Tiles) -> None:
        self.scope, self.tiles = scope, tiles
        self.arrays: list[Place] = []
        self.places: dict[int, Place] = {}
        self.orders: dict[int, tuple[int, ...]] = {}  # layouts that Dots want of their results
        self.rooms: dict[str, list[str]] = {}  # element type -> working memory wanted

    def array(self, name: str, ctype: str, dims: tuple[int, ...]) -> Place:
        """A new place, in the arena when it has dims."""
        place = Place(name, ctype, dims, tuple(self.tiles.sizes[d] for d in dims))
        if dims:
            self.arrays.append(place)
        return place

    def keep(self, k: int, span: Sequence[int]) -> Place:
        """The array of a Let or Load that is used beyond its run."""
        if k not in self.places:
            # beside numbers of four bytes, bytes would make the compiler's vectors four times as many
            ctype = "int32_t" if self.scope.types[k] is DType.b1 else CTYPE[self.scope.types[k]]
            self.places[k] = self.array(f"{self.scope.locals[k]}_t", ctype, self.tiles.of(frozenset(span)))
        return self.places[k]

    def accumulator(self, s: Reduce) -> Place:
        """Where a Reduce adds up."""
        if s.out not in self.places:
            dims = self.orders.get(s.out, self.tiles.of(s.span))
            self.places[s.out] = self.array(f"{self.scope.locals[s.out]}_acc", self._type(s), dims)
        return self.places[s.out]

    def _type(self, s: Reduce) -> str:
        element = self.scope.types[s.arg]
        if s.monoid in _ARGS:
            return f"plait::{_ARGS[s.monoid]}<{'uint8_t' if element is DType.b1 else CTYPE[element]}, 1>"
        if element is DType.b1:
            return "uint8_t"
        # a sum of few lanes is added up in double; of a product, each element is one of many
        return "double" if s.monoid == "sum" and element is DType.f32 else CTYPE[element]

    def rule(self, s: Reduce) -> tuple[str, str]:
        """The combining rule of plait_reduce.h and the type it is used in."""
        rules = _BOOL_RULES if self.scope.types[s.arg] is DType.b1 else _RULES
        return f"plait::{rules[s.monoid]}Rule", self._type(s)

    def result(self, s: Reduce) -> str:
        """The value of an accumulator at the current point, as a C++ expression of the result's type."""
        text = self.accumulator(s).element(self.scope.dims)
        if s.monoid in _ARGS:
            return f"{text}.result()"
        return text if isinstance(s, Dot) else f"{CTYPE[s.dtype]}({text})"

    def identity(self, s: Reduce) -> str:
        """What an accumulator holds at first."""
        return f"{self._type(s)}()" if s.monoid in _ARGS else "{}<{}>::identity()".format(*self.rule(s))

    def room(self, ctype: str, elems: str) -> str:
        """Working memory of at least so many elements, shared by all that ask."""
        wanted = self.rooms.setdefault(ctype, [])
        if elems not in wanted:
            wanted.append(elems)
        return f"room_{ctype}"

    def declare(self, out: Writer) -> None:
        """Write the arena and the pointers into it."""
        at = "0"
        lines: list[str] = []
        sized: list[tuple[str, str, str]] = []
        for p in self.arrays:
            out.line(f"constexpr int64_t {p.name}_ld = plait::padded<{p.ctype}>({p.sizes[-1]});")
            sized.append((p.name, p.ctype, p.elems()))
        for ctype, wanted in self.rooms.items():
            most = wanted[0]
            for w in wanted[1:]:
                most = f"plait::most_of({most}, {w})"
            sized.append((f"room_{ctype}", ctype, most))
        for name, ctype, elems in sized:
            out.line(f"constexpr int64_t {name}_at = {at};")
            at = f"plait::behind<{ctype}>({name}_at, {elems})"
            pointer = f"reinterpret_cast<{ctype}*>(arena.data() + {name}_at)"
            lines.append(f"{ctype}* const __restrict {name} = {pointer};")
        if sized:
            out.line(f"plait::Scratch<unsigned char> arena({at});")
            out.lines(*lines)
