"""The reference meaning of a Cascade, in double precision: in one pass by tiles of any size, in split parts merged in any
tree, and in as many passes as there are reductions, which is what the online forms are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plait.plan.cascade import Cascade, Slot
from plait.plan.formula import Evaluator, Formula, Leaf
from plait.plan.monoids import MONOIDS

Point = tuple[int, ...]
Accumulators = list[tuple[Any, ...]]


class Stream:
    """One row: a cascade at one parallel point. `value(leaf, point)` gives a leaf at a point of all axes; `elements` are the
    stream coordinates in order."""

    def __init__(
        self, cascade: Cascade, value: Callable[[Leaf, Point], Any], row: Point, elements: Sequence[Point]
    ) -> None:
        self.cascade, self._value, self.row, self.elements = cascade, value, row, elements

    # ---------------------------------------------------------------- one pass
    def start(self) -> Accumulators:
        """Every slot's identity."""
        return [MONOIDS[s.monoid].start() for s in self.cascade.slots]

    def absorb(self, before: Accumulators, tile: Sequence[Point]) -> Accumulators:
        """The accumulators after one more tile: step by step, as a later slot's lift needs the earlier running results."""
        after = list(before)
        then = _States(self, before)
        now = _States(self, after)
        for k, s in enumerate(self.cascade.slots):
            monoid = MONOIDS[s.monoid]
            out = self._corrected(s, before[k], then, now)
            for element in tile:
                evaluate = Evaluator(lambda f, e=element: self._leaf(f, e, now, then))  # type: ignore[misc]
                out = monoid.merged(out, tuple(evaluate(f) for f in s.lift))
            after[k] = out
        return after

    def merge(self, a: Accumulators, b: Accumulators) -> Accumulators:
        """Two partial results of disjoint parts, each carried over to the merged running results."""
        out = list(a)
        merged, of_a, of_b = _States(self, out), _States(self, a), _States(self, b)
        for k, s in enumerate(self.cascade.slots):
            mine, theirs = self._corrected(s, a[k], of_a, merged), self._corrected(s, b[k], of_b, merged)
            out[k] = MONOIDS[s.monoid].merged(mine, theirs)
        return out

    def results(self, final: Accumulators) -> list[Any]:
        """Every reduction's value."""
        states = _States(self, final)
        return [states(i) for i in range(len(self.cascade.steps))]

    def online(self, tile: int) -> list[Any]:
        """All values by one pass over tiles of that size."""
        acc = self.start()
        for at in range(0, len(self.elements), tile):
            acc = self.absorb(acc, self.elements[at : at + tile])
        return self.results(acc)

    def _corrected(self, s: Slot, a: tuple[Any, ...], then: _States, now: _States) -> tuple[Any, ...]:
        if s.correction is None:
            return a
        factor = Evaluator(lambda f: self._leaf(f, None, now, then))(s.correction)
        return tuple(x * factor for x in a)

    # ---------------------------------------------------------------- as many passes as reductions
    def repeated(self) -> list[Any]:
        """All values, each by its own pass with the final values of the earlier ones."""
        done: list[Any] = []
        for step in self.cascade.steps:
            body = step.body

            def at(f: Formula, element: Point | None) -> Any:
                return done[f.value] if f.op == "state" else self._leaf(f, element, None, None)

            values = []
            for element in self.elements:
                evaluate = Evaluator(lambda f, e=element: at(f, e))  # type: ignore[misc]
                if body.chosen is None or evaluate(body.chosen):
                    values.append(evaluate(body.expr))
            if body.chosen is not None:
                (out,) = values
            else:
                monoid = MONOIDS[body.monoid]
                total = monoid.start()
                for v in values:
                    total = monoid.merged(total, (v,))
                out = total[0]
            if body.finish is not None:
                reduced = out
                out = Evaluator(lambda f, v=reduced: v if f.op == "slot" else at(f, None))(body.finish)  # type: ignore[misc]
            done.append(out)
        return done

    # ---------------------------------------------------------------- leaves
    def _leaf(self, f: Formula, element: Point | None, now: _States | None, then: _States | None) -> Any:
        if f.op in ("stream", "row"):
            assert element is not None or f.op == "row"
            rest = element if element is not None else (0,) * len(self.cascade.space.stream)
            return self._value(f.value, (*self.row, *rest))
        if f.op == "count":
            return len(self.elements)
        if f.op == "slot":
            assert now is not None
            return now.slots[f.value[0]][f.value[1]]
        found = now if f.op == "state" else then
        assert found is not None
        return found(f.value)


class _States:
    """Running results by number, over a list of accumulators that may still be filling up."""

    def __init__(self, stream: Stream, slots: Accumulators) -> None:
        self._stream, self.slots = stream, slots

    def __call__(self, i: int) -> Any:
        lower = self._stream.cascade.steps[i].lower
        return Evaluator(lambda f: self._stream._leaf(f, None, self, None))(lower)
