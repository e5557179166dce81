"""Capture through AOT autograd with a stand-in compiler: what it is given, what may be recomputed, and how failures show."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from plait.errors import BuildFailed, InternalError, UnsupportedProgram
from plait.frontend.capture import _forward_nodes, _keep_reads_of_overwritten_inputs, capture, user_line
from plait.frontend.joint import rewrites_for
from plait.options import Options
from plait.runtime import report
from plait.runtime.guarded import boxed, compile_one


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    report.reset()
    yield
    torch._dynamo.reset()
    report.reset()


class Backend:
    """Runs graphs as they are, and keeps them."""

    def __init__(self, compile_graph: Callable[..., Any] | None = None, **options: Any) -> None:
        self.graphs: list[tuple[str, torch.fx.GraphModule]] = []
        self.options = Options.make(None, options)
        self.compile_graph = compile_graph or (lambda gm, inputs, options, kind: gm.forward)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def one(graph: torch.fx.GraphModule, example: Sequence[Any], kind: str) -> Any:
            self.graphs.append((kind, graph))
            return compile_one(self.compile_graph, graph, example, kind, self.options, user_line(graph.graph))

        return capture(gm, inputs, one, rewrites=rewrites_for(self.options))

    def graph(self, kind: str) -> torch.fx.GraphModule:
        return next(g for k, g in self.graphs if k == kind)


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def adds_one(gm: torch.fx.GraphModule) -> bool:
    return any(str(n.target) == "aten.add.Tensor" and n.args[1] == 1 for n in gm.graph.nodes)


def test_forward_backward_and_inference_are_compiled_apart() -> None:
    backend = Backend()
    fn = torch.compile(lambda x: torch.sin(x) * 2, backend=backend)
    x = torch.randn(4, requires_grad=True)
    fn(x).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach()) * 2)
    with torch.no_grad():
        fn(x)
    assert sorted(k for k, _ in backend.graphs) == ["backward", "forward", "inference"]
    assert [r.kind for r in report.all()] == [k for k, _ in backend.graphs]
    assert report.last().status == "compiled"


def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.relu(x @ w), 0.3)


def noisy_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ w)
    return y * (torch.empty_like(y).bernoulli_(0.7) / 0.7)


@pytest.mark.parametrize("fn", [noisy, noisy_by_hand])
@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_draws_the_mask_again(fn: Callable[..., torch.Tensor], dynamic: bool) -> None:
    """Between the passes there is a seed, not a mask; both see the same numbers, and torch.manual_seed decides them."""
    backend = Backend()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    x, w = (torch.randn(s, requires_grad=True) for s in ((64, 32), (32, 48)))
    torch.manual_seed(1)
    y = compiled(x, w)
    g = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    kept = y != 0
    assert 0.65 < float((kept & (x @ w > 0)).sum() / (x @ w > 0).sum()) < 0.75
    torch.testing.assert_close(y, torch.relu(x @ w) * kept / 0.7)
    torch.testing.assert_close(dx, (g * kept / 0.7) @ w.T)
    torch.testing.assert_close(dw, x.T @ (g * kept / 0.7))
    torch.manual_seed(1)
    assert torch.equal(compiled(x, w), y) and not torch.equal(compiled(x, w), y)
    backward = backend.graph("backward")
    assert "plait.uniform.default" in targets(backend.graph("forward")) and "plait.uniform.default" in targets(backward)
    saved = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
    seeds = [v for v in saved if isinstance(v, torch.Tensor) and v.ndim == 0 and v.dtype is torch.int64]
    assert len(seeds) == 1
    # the product, or what relu leaves of it, and nothing as large beside it and the gradient
    large = [v for v in saved if isinstance(v, torch.Tensor) and v.ndim == 2 and v.shape[1] == 48 and v.shape[0] != 32]
    assert len(large) <= 2


def test_eagers_numbers_leave_dropout_whole() -> None:
    backend = Backend(rng="eager")
    x, w = (torch.randn(s, requires_grad=True) for s in ((64, 32), (32, 48)))
    torch.manual_seed(1)
    y = torch.compile(noisy, backend=backend)(x, w)
    torch.manual_seed(1)
    assert torch.equal(y, noisy(x, w)) and "plait.uniform.default" not in targets(backend.graph("forward"))


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_operand_of_amax_is_saved(reduce: str) -> None:
    backend = Backend()
    fn = torch.compile(lambda x, r: getattr(x * r + 1, reduce)(-1), backend=backend)
    x = torch.randn(4, 50, requires_grad=True)
    fn(x, torch.rand(4, 1)).sum().backward()
    both = targets(backend.graph("forward")) + targets(backend.graph("backward"))
    assert both.count("aten.eq.Tensor") == 1
    assert not adds_one(backend.graph("backward")), "the compared value was computed again"


def test_operand_that_appears_twice_is_saved() -> None:
    def f(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return (x * r + 1).sin().sum() + (x * r + 1).amax(-1).sum()

    backend = Backend()
    x = torch.randn(4, 50, requires_grad=True)
    torch.compile(f, backend=backend)(x, torch.rand(4, 1)).backward()
    assert not adds_one(backend.graph("backward"))


def test_reads_of_an_overwritten_buffer_are_not_recomputed() -> None:
    def f(x: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        running.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x * running.rsqrt()).sin()

    x, running = torch.randn(5, 3, requires_grad=True), torch.rand(3) + 1
    want_x, want_running = x.detach().clone().requires_grad_(), running.clone()
    out = torch.compile(f, backend=Backend())(x, running)
    out.sum().backward()
    want = f(want_x, want_running)
    want.sum().backward()
    torch.testing.assert_close(running, want_running)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(x.grad, want_x.grad)


def test_overwritten_buffer_that_the_backward_reads_is_copied_first() -> None:
    def joint(scale: torch.Tensor, x: torch.Tensor, tangent: torch.Tensor) -> Any:
        y, new = x * scale.view(-1), scale * 3
        scale.copy_(new)
        return y.exp(), tangent * scale.view(-1), None

    graph = torch.fx.symbolic_trace(joint).graph
    names = {
        "view": torch.ops.aten.view.default,
        "copy_": torch.ops.aten.copy_.default,
        "exp": torch.ops.aten.exp.default,
    }
    for node in graph.nodes:
        if node.op == "call_method":
            node.op, node.target = "call_function", names[node.target]
        node.args = tuple([-1] if a == -1 else a for a in node.args)
    forward = _forward_nodes(graph, 1)
    _keep_reads_of_overwritten_inputs(graph, forward)
    graph.lint()
    kept = next(n for n in graph.nodes if str(n.target) == "aten.clone.default")
    assert kept.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert [str(n.target) for n in next(n for n in graph.nodes if n.op == "placeholder").users] == [
        "aten.copy_.default",
        "aten.clone.default",
    ]
    gm = torch.fx.GraphModule({}, graph)
    scale, x, tangent = torch.rand(3) + 1, torch.randn(2, 3), torch.randn(2, 3)
    old = scale.clone()
    out, grad, _ = gm(scale, x, tangent)
    torch.testing.assert_close(out, (x * old).exp())
    torch.testing.assert_close(grad, tangent * old)
    torch.testing.assert_close(scale, old * 3)


def _broken(error: Exception) -> Callable[..., Any]:
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        raise error

    return compile_graph


@pytest.mark.parametrize("error", [BuildFailed("no compiler here"), ValueError("a slip"), InternalError("N1 broken")])
def test_failure_falls_back_with_one_warning(error: Exception) -> None:
    fn = torch.compile(lambda x: x.sin() + 1, backend=Backend(_broken(error)), dynamic=False)
    with pytest.warns(report.PlaitFallbackWarning, match="in eager") as seen:
        out = fn(torch.ones(3))
    assert len(seen) == 1
    assert torch.equal(out, torch.ones(3).sin() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(torch.ones(4))  # the second graph fails for the same reason: counted, not shouted again
    assert len(report.FALLBACKS) == 2
    assert "test_capture.py" in report.FALLBACKS[0].line
    assert report.last().status == "eager"
    assert bool(report.FALLBACKS[0].artifact) == (not isinstance(error, BuildFailed))


def test_strict_raises() -> None:
    fn = torch.compile(lambda x: x.sin(), backend=Backend(_broken(BuildFailed("no compiler here")), strict=True))
    with pytest.raises(Exception, match="no compiler here") as info:
        fn(torch.ones(3))
    chain, seen = info.value, []
    while chain is not None:
        seen.append(type(chain))
        chain = chain.__cause__ or getattr(chain, "inner_exception", None)
    assert UnsupportedProgram in seen
    assert not report.FALLBACKS


def test_repro_folder_compiles_the_graph_again(tmp_path: Any) -> None:
    import importlib.util
    import pathlib

    fn = torch.compile(lambda x: (x.t() @ x).sum(0).to(torch.int32), backend=Backend(_broken(ValueError("slip"))))
    with pytest.warns(report.PlaitFallbackWarning):
        fn(torch.randn(3, 5).t())
    folder = pathlib.Path(report.FALLBACKS[0].artifact)
    assert "slip" in (folder / "error.txt").read_text()
    spec = importlib.util.spec_from_file_location("repro_graph", folder / "graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (x,) = module.inputs()
    assert x.shape == (5, 3)
    assert x.stride() == (1, 5)
    torch.testing.assert_close(module.Repro()(x)[0], (x.t() @ x).sum(0).to(torch.int32))


def test_floats_that_change_are_inputs_not_recompilations() -> None:
    backend = Backend()
    fn = torch.compile(lambda x, s: x * s + s, backend=backend)
    for k in range(6):
        x = torch.randn(3)
        torch.testing.assert_close(fn(x, 0.5 + k), x * (0.5 + k) + (0.5 + k))
    assert len(backend.graphs) <= 2


def test_sizes_that_change_become_symbols() -> None:
    backend = Backend()
    fn = torch.compile(lambda x: x.softmax(-1) * x.shape[0], backend=backend)
    for n in (3, 4, 5, 6):
        x = torch.randn(n, 7)
        torch.testing.assert_close(fn(x), x.softmax(-1) * n)
    assert len(backend.graphs) == 2


def test_boxed_takes_the_arguments_out_of_the_list() -> None:
    def call(args: list[Any]) -> Any:
        return args

    call._boxed_call = True
    assert boxed(call) is call
    args = [torch.ones(2), torch.ones(2)]
    assert len(boxed(lambda *xs: [x * 2 for x in xs])(args)) == 2
    assert not args


def test_mutation_views_autocast_and_threads() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x[0] = 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ w
        return h.float().softmax(-1), x[1:]

    fn = torch.compile(f, backend=Backend())
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            x, w = torch.randn(3 + k % 3, 4), torch.randn(4, 4)
            want_x = x.clone()
            got, want = fn(x, w), f(want_x, w)
            torch.testing.assert_close(got, want)
            assert got[1]._base is x or got[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_a_backward_may_run_again_once_it_ran() -> None:
    """The first compiles it, and says that nobody needs what was saved any more; a later graph is kept."""
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: torch.softmax(torch.tanh(x @ w), -1).square().sum(), backend="plait")
    x, w = torch.randn(8, 6, requires_grad=True), torch.randn(6, 9, requires_grad=True)
    (first,) = torch.autograd.grad(fn(x, w), x)
    loss = fn(x, w)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    (third,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second) and torch.equal(first, third)
