"""The options forbid and force: fusions that are forbidden or forced from outside the program, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import BadOption, FusionRefused
from plait.ir.names import module_under
from plait.options import Options
from plait.report.report import Report


def explained(fn: Any, *args: Any, train: bool = False, **options: Any) -> Report:
    torch._dynamo.reset()
    return plait.explain(fn, *args, train=train, options=options)


def kernels(r: Report) -> list[tuple[str, ...]]:
    return [tuple(m.name for m in k.members) for g in r.graphs for k in g.kernels]


class Mlp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.exp()).sin()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return x


X = torch.randn(256, 256)


def chain(x: torch.Tensor) -> torch.Tensor:
    with plait.no_fuse("nothing"):
        pass
    return torch.softmax(x.exp() * 2, -1).sin()


def test_a_name_is_kept_apart_from_all_else() -> None:
    assert kernels(explained(chain, X)) == [("exp", "mul", "softmax", "sin")]
    assert kernels(explained(chain, X, forbid=["softmax"])) == [("exp", "mul"), ("softmax",), ("sin",)]


def test_a_pair_shares_no_kernel() -> None:
    r = explained(chain, X, forbid=[("softmax", "exp")])
    assert [k for k in kernels(r) if {"softmax", "exp"} <= set(k)] == [] and len(kernels(r)) == 2
    assert "option forbid: softmax, exp" in str(r)
    r.assert_not_fused("softmax", "exp")


def test_modules_by_path_and_glob_are_apart_each() -> None:
    inner = ("exp", "gelu", "sin")
    assert len(kernels(explained(Net(), X))) == 1
    assert kernels(explained(Net(), X, forbid=["layers.0"])) == [inner, ("mul", *inner, "mul")]
    assert kernels(explained(Net(), X, forbid=["layers.*"])) == [inner, ("mul",), inner, ("mul",)]


def test_names_of_other_graphs_and_of_nothing() -> None:
    with pytest.warns(UserWarning, match="options name 'sotfmax', and nothing in graph"):
        explained(chain, X, forbid=["sotfmax"])
    x = X.clone().requires_grad_()
    r = explained(chain, x, train=True, forbid=["backward/softmax"])
    assert [len(g.kernels) for g in r.graphs] == [1, 2 if len(r.graphs[1].kernels) == 2 else 3]


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(0), x.mean(1)


def test_force_puts_what_does_not_pay_into_one_kernel() -> None:
    x = torch.randn(512, 512)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y.sum(0), y.mean(1)

    (graph,) = explained(fn, x, force=[("exp", "sum", "mean")]).graphs
    assert len(graph.kernels) == 1 and not graph.refusals
    (free,) = explained(fn, x).graphs
    assert free.refusals


def test_force_of_modules_is_one_kernel_each() -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(self.proj(x))

    net = torch.nn.Sequential(Linear(), Linear())
    x = torch.randn(512, 1024)
    assert any(k.kind == "call" for k in explained(net, x).graphs[0].kernels)
    found = kernels(explained(net, x, force=["*"]))
    assert found and all(k.count("linear") == k.count("relu") > 0 for k in found)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="plait", options={"force": ["*"]})
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


def test_force_is_refused_by_the_law() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x.exp()).sin()

    with pytest.raises(FusionRefused, match=r"option force: exp, linalg_inv.*opaque operator"):
        explained(fn, torch.eye(8), force=[("exp", "linalg_inv")])


def test_no_plan_no_force() -> None:
    """plan="none" gives every operator its own kernel, for bisection: nothing is forced then."""
    assert len(explained(chain, X, plan="none", force=[("exp", "mul")]).graphs[0].kernels) > 1


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("layers.0.mlp.up", "layers.0.mlp", "layers.0.mlp"),
        ("layers[0].mlp", "layers.0", "layers.0"),
        ("layers.10.mlp", "layers.1", None),
        ("layers.1.mlp.up", "layers.*.mlp", "layers.1.mlp"),
        ("layers.1.mlp", "layers[1]", "layers.1"),
        ("mlp", "", None),
        ("", "mlp", None),
        ("h.3.attn", "h.*.at*", "h.3.attn"),
    ],
)
def test_module_paths(module: str, name: str, found: str | None) -> None:
    assert module_under(module, name) == found


def test_values_are_validated() -> None:
    made = Options.make(None, {"forbid": "softmax, mul; layers.*.mlp", "force": [["a", "b"], "c"]})
    assert made.forbid == (("softmax", "mul"), ("layers.*.mlp",)) and made.force == (("a", "b"), ("c",))
    assert Options.make(None, {"pin": {"k0_exp": "form=flat"}}).pin == (("k0_exp", "form=flat"),)
    assert Options.make(None, {"pin": "k0_exp=form=flat tile=p0:4; k1 = form=swept"}).pin == (
        ("k0_exp", "form=flat tile=p0:4"),
        ("k1", "form=swept"),
    )
    for bad in ({"forbid": 3}, {"force": [3]}, {"forbid": [("a", "a")]}, {"pin": {"a": 3}}, {"pin": 4}):
        with pytest.raises(BadOption):
            Options.make(None, bad)


def test_they_are_part_of_the_key_of_generated_code() -> None:
    keys = {
        Options.make(None, o).codegen_key()
        for o in ({}, {"forbid": ["a"]}, {"force": ["a"]}, {"pin": {"k": "form=flat"}}, {"forbid": [("a", "b")]})
    }
    assert len(keys) == 5
