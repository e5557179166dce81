"""Run-time sizes: which symbols the arguments of a call decide, which wait for a step, and the values of Exprs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.ir.bindings import bind_symbols, evaluate_formula, names_of, sym_values
from plait.ir.index import Atom, Expr
from plait.runtime.steps import Binding

Number = int | float


class Sizes:
    """The values of a run's symbols. Asking for one that is not bound yet raises KeyError."""

    def __init__(self, symbols: Mapping[str, Number]) -> None:
        self.symbols = symbols
        self._atoms: dict[Atom, int] = sym_values(symbols)

    def one(self, e: Expr) -> int:
        """The value of an Expr over symbols."""
        known = e.const
        return e.evaluate(self._atoms) if known is None else known

    def all(self, es: Iterable[Expr]) -> tuple[int, ...]:
        """The values of several."""
        return tuple(map(self.one, es))

    def formula(self, f: Any) -> Any:
        """The value of a formula of ir/bindings.py."""
        return evaluate_formula(f, self.symbols)


class Binder:
    """Splits bindings into `early` ones, which the arguments decide, and late ones, which a step's result decides."""

    def __init__(self, bindings: Mapping[str, Binding]) -> None:
        self.early: dict[str, Binding] = {}
        self.late: dict[str, Binding] = {}
        for name, how in bindings.items():
            waits = how[0] == "slot" or (how[0] == "derived" and not names_of(how[1]).isdisjoint(self.late))
            (self.late if waits else self.early)[name] = how
        read = {n: how for n, how in self.early.items() if how[0] != "derived"}
        # what tells one set of sizes from another: the values read off the arguments
        self.key: Callable[[Sequence[Any]], tuple[Number, ...]] = _reader(list(read.values()))

    def bind(self, arguments: Sequence[Any]) -> dict[str, Number]:
        """The early symbols."""
        return bind_symbols(self.early, arguments)

    def waiting_slots(self) -> set[int]:
        """Slots whose contents decide symbols."""
        return {how[1] for how in self.late.values() if how[0] == "slot"}

    def bind_slot(self, slot: int, value: Any, known: Mapping[str, Number]) -> dict[str, Number]:
        """`known` and the late symbols that can be bound once `slot` holds `value`."""
        out = dict(known)
        for name, how in self.late.items():
            if how[0] == "slot" and how[1] == slot:
                out[name] = value if how[2] is None else value.shape[how[2]]
            elif how[0] == "derived" and names_of(how[1]) <= out.keys():
                out[name] = evaluate_formula(how[1], out)
        return out


def _reader(how: list[Binding]) -> Callable[[Sequence[Any]], tuple[Number, ...]]:
    if not how:
        return lambda arguments: ()
    if all(h[0] == "size" for h in how):
        places = [(h[1], h[2]) for h in how]
        return lambda arguments: tuple([arguments[p].shape[d] for p, d in places])
    named = {str(k): h for k, h in enumerate(how)}
    return lambda arguments: tuple(bind_symbols(named, arguments).values())


def names_in(tree: Any) -> set[str]:
    """Symbols anywhere in a tree of tuples, Exprs and steps; graphs and nodes are not entered."""
    if isinstance(tree, Expr):
        return set(tree.symbols())
    if isinstance(tree, (tuple, list)):
        return set().union(*map(names_in, tree))
    return set()
