"""One call of an operator through AOT autograd as plait sets it up, in eager, with every graph and its values kept.

`trace` runs a sample the way a compiled program would run, but for the graphs' own code: plait compiles each graph as far as
tile programs, and the graph itself runs in eager while its inputs and results are copied. What AOT autograd cannot trace
goes through `torch.compile` instead (`through_dynamo`), where TorchDynamo breaks the graph or leaves the call to eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plait import api
from plait.compiler import Compiled, plan_and_lower, simplify
from plait.errors import BuildFailed, CompileError
from plait.frontend.capture import partition
from plait.frontend.externs import decompositions
from plait.frontend.fx_import import import_fx
from plait.options import Options
from plait.oracle.compare import copy_of
from plait.plan.device import spec_for
from plait.runtime import report

OPTIONS = Options.make(None, {"cache_dir": "0"})


@dataclass
class Traced:
    """One graph that AOT autograd handed over: what plait made of it, and the values of its first run in eager."""

    gm: Any
    kind: str
    compiled: Compiled | None = None
    fallback: str = ""  # plait's reason to leave the graph to eager
    broke: str = ""
    inputs: list[Any] = field(default_factory=list)
    inputs_after: list[Any] = field(default_factory=list)
    outputs: list[Any] | None = None


@dataclass
class Sample:
    """One sample as a function of its tensors."""

    fn: Callable[..., Any]
    tensors: list[torch.Tensor]
    train: bool

    def run(self, fn: Callable[..., Any]) -> tuple[Any, list[Any]]:
        """(results and gradients, arguments afterwards) of `fn`, the sample's function or a compiled form of it."""
        args = [copy_of(t) for t in self.tensors]
        torch.manual_seed(0)
        results = fn(*args)
        if not self.train:
            return results, args
        outs = [o for o in pytree.tree_leaves(results) if isinstance(o, torch.Tensor) and o.requires_grad]
        wanted = [a for a in args if a.requires_grad and a.is_leaf]
        grads = torch.autograd.grad(outs, wanted, [_weights(o) for o in outs], allow_unused=True)
        return (pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results), grads), args

    def is_plain(self) -> bool:
        """Whether all tensors are dense: TorchDynamo leaves calls with others to eager."""
        return all(t.layout is torch.strided and not t.is_quantized for t in self.tensors)


def _weights(o: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].view(o.shape)


def sample_of(op: Any, sample: Any, train: bool) -> Sample:
    """An operator's sample; under `train` those of its tensors that the database says need gradients have them."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    tensors = [leaves[i].detach().requires_grad_(train and leaves[i].requires_grad) for i in places]
    call = op.get_op()

    def fn(*given: torch.Tensor) -> Any:
        mine = list(leaves)
        for i, t in zip(places, given, strict=True):
            mine[i] = t
        x, args, kwargs = pytree.tree_unflatten(mine, spec)
        return call(x, *args, **kwargs)

    return Sample(fn, tensors, train)


class Recorder:
    """The compile function given to AOT autograd."""

    def __init__(self) -> None:
        self.graphs: list[Traced] = []

    def compile_as(self, kind: str) -> Callable[[Any, Sequence[Any]], Callable[[list[Any]], Any]]:
        """Compile and record graphs of a kind."""

        def compile_one(gm: Any, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            graph = Traced(gm, kind)
            self.graphs.append(graph)
            try:
                made = simplify(import_fx(gm, inputs), spec_for("cpu"), OPTIONS)
                graph.compiled = plan_and_lower(made, spec_for("cpu"), OPTIONS)
            except CompileError as error:
                graph.fallback = error.message
            except Exception as error:
                graph.broke = f"{type(error).__name__}: {error}"
            return _recording(graph)

        return compile_one


def _recording(graph: Traced) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        inputs = copies(taken)
        outputs = graph.gm(*taken)
        if graph.outputs is None:
            graph.inputs, graph.inputs_after, graph.outputs = inputs, copies(taken), copies(outputs)
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def copies(values: Sequence[Any]) -> list[Any]:
    """Values with tensors copied, strides kept."""
    return [copy_of(v) if isinstance(v, torch.Tensor) else v for v in values]


def trace(sample: Sample) -> tuple[list[Traced], Any, list[Any]]:
    """The graphs of a sample, and its results and arguments after they ran. Raises what AOT autograd raises."""
    from torch._functorch.aot_autograd import aot_function

    recorder = Recorder()
    traced = aot_function(
        sample.fn,
        fw_compiler=recorder.compile_as("forward"),
        bw_compiler=recorder.compile_as("backward"),
        inference_compiler=recorder.compile_as("inference"),
        partition_fn=partition,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    results, args = sample.run(traced)
    return recorder.graphs, results, args


@dataclass
class Whole:
    """What became of a sample under torch.compile."""

    results: Any = None
    args: list[Any] = field(default_factory=list)
    kernels: int = 0
    reasons: list[str] = field(default_factory=list)
    broke: str = ""
    refused: str = ""  # torch's own reason, which a backend without plait meets too


def through_dynamo(sample: Sample) -> Whole:
    """A sample under torch.compile with plait as the backend; plain AOT autograd says whose fault an exception is."""
    whole = Whole()
    torch._dynamo.reset()
    report.reset()
    try:
        compiled = torch.compile(sample.fn, backend=api.backend, options={"cache_dir": "0"})
        whole.results, whole.args = sample.run(compiled)
    except Exception as error:
        whole.refused = _raises_without_plait(sample)
        if not whole.refused:
            whole.broke = f"{type(error).__name__}: {error}"
    for record in report.all():
        whole.kernels += record.kernels if record.status == "compiled" else 0
    for f in report.fallbacks():
        bad = f.reason.startswith("plait broke") or f.scope == "group"
        whole.broke, whole.reasons = (f.reason if bad else whole.broke), [*whole.reasons, f.reason]
    return whole


def _raises_without_plait(sample: Sample) -> str:
    torch._dynamo.reset()
    try:
        sample.run(torch.compile(sample.fn, backend="aot_eager_decomp_partition"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


__all__ = ["OPTIONS", "BuildFailed", "Sample", "Traced", "copies", "sample_of", "through_dynamo", "trace"]
