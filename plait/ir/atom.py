"""The factors of index expressions: axes, symbols, gathered values, floor-divisions and remainders; interned."""

from __future__ import annotations


class Atom:
    """One factor of a monomial; interned. `kind` in axis, sym, value, div, mod."""

    __slots__ = ("args", "key", "kind")
    _table: dict[tuple[object, ...], Atom] = {}
    kind: str
    args: tuple[object, ...]
    key: tuple[object, ...]

    @classmethod
    def make(cls, kind: str, *args: object) -> Atom:
        ident = (kind, *args)
        found = cls._table.get(ident)
        if found is None:
            found = object.__new__(cls)
            found.kind, found.args = kind, args
            # the sort key makes canonical order independent of object identity
            found.key = (
                kind,
                *(a.key if hasattr(a, "key") else (str(type(a).__name__), str(a).zfill(6)) for a in args),
            )
            found = cls._table.setdefault(ident, found)  # atomic under the GIL: every thread gets the same object
        return found

    def __repr__(self) -> str:
        if self.kind == "axis":
            return f"i{self.args[0]}"
        if self.kind == "sym":
            return str(self.args[0])
        if self.kind == "value":
            return f"v{self.args[0]}"
        op = "//" if self.kind == "div" else "%"
        return f"({self.args[0]}{op}{self.args[1]})"
