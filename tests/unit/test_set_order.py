"""What is said or tried first does not hang on the order of a set, which is another one in another process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from middle import middle, sketch

from plait.ir.graph import Graph, Region
from plait.plan.legality import why_not_loose
from plait.plan.regions import why_apart
from plait.plan.search import _Search
from tests.campaigns.determinism import other_order


def test_the_first_of_several_regions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    g = sketch("%input_0: f32[8]\n%exp_1: f32[8] = exp(%input_0)\n%sin_2: f32[8] = sin(%exp_1)\nout %sin_2")
    nodes = [n for n in g.nodes() if n.op in ("exp", "sin")]
    origins = {}
    for side, n in enumerate(nodes, 1):
        regions = tuple(Region("forbid", k, f"number {k}", side) for k in (3, 1, 2, 0, 5, 4))
        origins[n] = tuple(replace(o, regions=regions) for o in g.origins.get(n, ())) or (_origin(n.op, regions),)
    g.origins = origins
    for seed in range(10):
        monkeypatch.setattr(Region, "__hash__", lambda r, s=seed: hash((s, r.number, r.side)))
        reason = why_apart(g, nodes)
        assert reason is not None and reason.detail == "number 0"


def _origin(fx: str, regions: tuple[Region, ...]) -> Any:
    from plait.ir.graph import Origin

    return Origin(fx, "", "", regions)


def test_the_first_of_several_loose_reads_is_named() -> None:
    said = set()
    for seed in range(10):
        with other_order(seed):
            g = sketch(
                """
                %input_0: f32[8, 8]
                %cumsum_1: f32[8, 8] = cumsum(%input_0)
                %cumprod_2: f32[8, 8] = cumprod(%input_0)
                %exp_3: f32[8, 8] = exp(%cumsum_1)
                %sin_4: f32[8, 8] = sin(%cumprod_2)
                %tanh_5: f32[8, 8] = tanh(%cumprod_2)
                out %exp_3
                out %sin_4
                out %tanh_5
                """
            )
            nodes = [n for n in g.nodes() if n.op != "input"]
            loose = frozenset((n, 0) for n in nodes if n.kind == "map")
            al: Any = SimpleNamespace(nodes=nodes, loose=loose)
            ctx: Any = SimpleNamespace(model=SimpleNamespace(reading=SimpleNamespace(reads=lambda n: n.reads)))
            said.add(str(why_not_loose(ctx, al)))
    assert len(said) == 1 and "exp reads cumsum" in said.pop()


def test_bytes_at_stake_are_the_same_in_every_order() -> None:
    """Sums of floats hang on their order in the last bits, and bits decide ties."""
    rows = [f"%input_{k}: f32[{2 * k + 3}, 7]" for k in range(12)]
    sums = [f"%sum_{12 + k}: f32[7 | {2 * k + 3}] = sum(%input_{k}[i1, i0])" for k in range(12)]
    outs = [f"out %sum_{12 + k}" for k in range(12)]
    found = set()
    for seed in range(12):
        with other_order(seed):
            found.add(_saving(sketch("\n".join([*rows, *sums, *outs]))))
    assert len(found) == 1


def _saving(g: Graph) -> float:
    m = middle(g, "cpu", fuse=False)
    nodes = [n for n in m.setting.nodes if n.kind == "reduce"]
    search = _Search(m.setting, nodes)
    sizes = itertools.count(1)
    amounts = {n: 0.1 * next(sizes) for n in sorted(nodes, key=lambda n: n.serial)}
    search.nbytes = amounts.__getitem__  # type: ignore[method-assign]
    search.parts[0].sources = search.parts[1].sources = frozenset(nodes)
    return search.saving(0, 1)
