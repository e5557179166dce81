"""Reports that the tests of the page draw: a small training step with repeated layers, one with hostile text, a long one."""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

import plait
from plait.report.facts import GraphFacts, sum_totals
from plait.report.report import Report

HOSTILE = 'x.py:1 y = "</script><script>alert(1)</script><!--" + \'<img src=x onerror=alert(1)>\' & "\u2028"'


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        z: torch.Tensor = x + self.down(torch.tanh(y) * torch.sigmoid(y))  # both are formed again backward
        return z


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * x).sum()


@functools.cache
def layers() -> Report:
    """A training step of six equal layers, on the CPU."""
    torch.manual_seed(0)
    return plait.explain(_Model(), torch.randn(48, 32), train=True, target="cpu")


def hostile(report: Report) -> Report:
    """Every piece of text that a program can bring is an attempt to leave it."""

    def spoiled(value: Any, name: str = "") -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: spoiled(getattr(value, f.name), f.name) for f in fields(value)})
        if isinstance(value, tuple):
            return tuple(spoiled(v, name) for v in value)
        if isinstance(value, str) and name in (
            "line",
            "lines",
            "module",
            "sentence",
            "unlock",
            "program",
            "why",
            "source",
            "breaks",
        ):
            return HOSTILE
        return value

    made: Report = spoiled(report)
    return replace(made, breaks=(HOSTILE,))


def long_report(report: Report, times: int) -> Report:
    """Its first graph over and over, each time fed by the last: a program of hundreds of steps."""
    g = report.graphs[0]
    steps, operators = len(g.kernels), len(g.operators)
    kernels = tuple(_later_kernel(k, t * steps, t * operators) for t in range(times) for k in g.kernels)
    eager = tuple(
        replace(
            o,
            number=o.number + t * operators,
            step=o.step + t * steps if o.step >= 0 else -1,
            feeds=tuple(n + t * operators for n in o.feeds) or ((t + 1) * operators,) * (t + 1 < times),
        )
        for t in range(times)
        for o in g.operators
    )
    totals = sum_totals([g.totals] * times)
    made: GraphFacts = replace(g, kernels=kernels, operators=eager, totals=totals)
    return replace(report, graphs=(made,), totals=totals)


def _later_kernel(k: Any, steps: int, operators: int) -> Any:
    members = tuple(replace(m, operator=m.operator + operators) for m in k.members)
    needs = tuple(n + steps for n in k.needs) or ((steps - 1,) if steps else ())
    return replace(k, number=k.number + steps, needs=needs, members=members)
