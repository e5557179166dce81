"""What an FX graph says beside its operators: arguments, sizes, constants, writes, results, and calls that stay calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from plait.errors import ImportFailed
from plait.frontend.capture import capture
from plait.frontend.context import Context
from plait.frontend.externs import Item, call, decompositions, extern_maker, instantiate, resolve, role_of
from plait.frontend.fx_import import import_fx
from plait.frontend.layout import elementwise_strides, overlaps
from plait.frontend.sizes import Sizes
from plait.ir import index as ix
from plait.ir.bindings import bind_symbols, evaluate_formula, sym_values
from plait.ir.dtype import DType
from plait.ir.graph import Arg, Builder, Graph, Node
from plait.oracle.eval_graph import evaluation
from tests.frontend_eval import imported


class _Attributes(dict[str, Any]):
    """Module attributes by name, for the evaluator."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__({name: getattr(gm, name) for name in [*dict(gm.named_buffers()), *dict(gm.named_children())]})
        self.update({n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"})


def through_dynamo(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> tuple[Any, list[Graph]]:
    """fn's result through Dynamo, AOTAutograd, import and the evaluator, and the graphs."""
    graphs: list[Graph] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def one(module: fx.GraphModule, examples: Sequence[Any], kind: str) -> Any:
            graph = import_fx(module, examples)
            graphs.append(graph)

            def run(arguments: list[Any]) -> Any:
                return evaluation(graph, arguments, constants=_Attributes(module)).returned()

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return capture(gm, inputs, one, decompositions())

    torch._dynamo.reset()
    result = torch.compile(fn, backend=backend, fullgraph=True, **options)(*args)
    return result, graphs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def externs(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.kind == "extern"]


def agree(fn: Callable[..., Any], args: list[Any], **options: Any) -> list[Graph]:
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    want = fn(*args)
    got, graphs = through_dynamo(fn, copies, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(copies, args)
    return graphs


# ---------------------------------------------------------------------------------------------- arguments and sizes
def test_sizes_are_bound_to_arguments() -> None:
    (graph,) = agree(
        lambda x, y: torch.cat([x, y], 0).view(-1, 2) * x.shape[0], [torch.ones(6, 4), torch.ones(3, 4)], dynamic=True
    )
    values = bind_symbols(graph.bindings, [6, 4, torch.ones(6, 4), 3, torch.ones(3, 4)])
    assert sorted(v for v in values.values() if isinstance(v, int)) == [3, 4, 6]
    assert graph.hints == values
    assert all(low >= 0 and high is None for low, high in graph.symbols.values())


def test_sizes_an_expression_cannot_say_are_derived() -> None:
    (graph,) = agree(
        lambda x, y: (x.sum() * max(x.shape[0], y.shape[0]), y + 1), [torch.ones(6), torch.ones(3)], dynamic=True
    )
    derived = [how for how in graph.bindings.values() if how[0] == "derived"]
    assert len(derived) == 1
    assert derived[0][1][0] == "max"


def test_a_float_argument_is_a_0_dim_input() -> None:
    (graph,) = agree(lambda x, s: x * s + s, [torch.ones(4), 2.5], dynamic=True)
    scalars = [i for i in graph.inputs if i.node.axes == () and i.node.dtype is DType.f64]
    assert scalars or not graph.constants


def test_formulas() -> None:
    assert evaluate_formula(("max", ix.sym("s") * 2, 5, ("floordiv", "z", 2)), {"s": 2, "z": 13}) == 6
    assert evaluate_formula(("where", ("le", ix.sym("s"), 3), 1.5, 2), {"s": 3}) == 1.5
    with pytest.raises(KeyError):
        evaluate_formula(("system", 1), {})
    with pytest.raises(KeyError):
        evaluate_formula(ix.sym("s"), {})
    assert sym_values({"s": 2, "f": 1.5}).keys() == sym_values({"s": 3}).keys()


# ---------------------------------------------------------------------------------------------- results and writes
def test_a_write_to_an_argument_is_an_output() -> None:
    def fn(cache: Tensor, row: Tensor) -> Tensor:
        cache[1:3] = row
        return cache.sum()

    (graph,) = agree(fn, [torch.zeros(4, 3), torch.ones(3)])
    written = [o for o in graph.outputs if o.writes_to is not None]
    assert [o.writes_to for o in written] == [0]
    assert written[0].read.source.op == "pieces"
    assert graph.returns == (("tensor", 1),)


def test_every_kind_of_result() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (x, None, 3, x + 1))
    gm.graph.output_node().args = ((*gm.graph.output_node().args[0],),)
    for n in gm.graph.nodes:
        if n.op == "call_function":
            n.target = torch.ops.aten.add.Tensor
            n.meta["val"] = torch.empty(2)
    graph = import_fx(gm, [torch.empty(2)])
    assert graph.returns == (("input", 0), ("none",), ("value", 3), ("tensor", 0))


def test_memory_of_results_follows_eager() -> None:
    (graph,) = agree(lambda x: (x + 1, x + 1, (x * 2).view(-1)), [torch.ones(2, 3)])
    numbers = [graph.outputs[k].memory for _, k in graph.returns]
    assert len(set(numbers)) == 3
    graph, _ = imported(lambda x: (x.t(), x.view(-1)), [torch.ones(2, 3)])
    assert [o.memory for o in graph.outputs] == [-1, -1]


def test_constants_of_the_module() -> None:
    (graph,) = agree(lambda x: x * torch.tensor(3.5) + torch.tensor([1.0, 2.0]), [torch.ones(3, 2)])
    assert [n.attr("value") for n in graph.nodes() if n.op == "const"] == [3.5]
    assert list(graph.constants) == [graph.arity]


def test_origins_name_the_users_line() -> None:
    (graph,) = agree(lambda x: torch.relu(x) + 1, [torch.ones(3)])
    lines = {o.line for origins in graph.origins.values() for o in origins}
    assert any(line.startswith("test_frontend_import.py:") for line in lines)
    assert all(graph.origins[n] for n in graph.nodes())


def test_mutation_inside_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.clone()
        y.add_(1)
        return y

    with pytest.raises(ImportFailed, match="not functionalised"):
        imported(fn, [torch.ones(3)])


def test_made_up_sizes_are_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch._unique(x)[0] + 1

    example = torch.tensor([1, 1, 2])
    gm = make_fx(fn, tracing_mode="symbolic")(example)
    for n in gm.graph.nodes:  # as torch 2.11 has it, where the operator is not marked
        n.meta["val"] = (torch.empty(1, dtype=torch.int64),) * 2 if "unique" in str(n.target) else torch.empty(1)
    with pytest.raises(ImportFailed, match="depends on data"):
        import_fx(gm, [example])


# ----------------------------------------------------------------------------------------------------------- externs
def test_contractions_keep_their_operands_strides() -> None:
    graph, _ = imported(lambda x, w: x @ w.t(), [torch.ones(3, 4), torch.ones(5, 4)])
    (mm,) = externs(graph)
    assert (mm.attr("target"), mm.attr("role")) == ("aten.mm.default", "contract")
    assert [[s.const for s in r.strides or ()] for r in mm.reads] == [[4, 1], [1, 4]]
    assert mm.attr("template") == ("call", ("tuple", (Arg(0), Arg(1))), ("dict", ()))


def test_roles() -> None:
    aten = torch.ops.aten
    assert role_of(aten.convolution.default) == "contract"
    assert role_of(aten._scaled_dot_product_flash_attention_for_cpu.default) == "contract"
    assert role_of(aten.index_put.default) == "scatter"
    assert role_of(aten.sort.stable) == "opaque"


def test_templates_come_back_as_they_were() -> None:
    ctx = Context(Builder(), make_extern=extern_maker(Sizes()))
    kwargs = {"dtype": torch.float16, "device": torch.device("cpu"), "layout": torch.strided}
    meta = torch.empty_permuted([2, 3], [1, 0], dtype=torch.float16)
    made = ctx.extern(torch.ops.aten.empty_permuted.default, ([2, 3], [1, 0]), kwargs, meta).source
    assert made.attr("outs") == (((ix.const(2), ix.const(3)), DType.f16, (ix.const(1), ix.const(2))),)
    args, again = instantiate(made.attr("template"), [])
    assert (args, again) == (([2, 3], [1, 0]), kwargs)
    out = call(made, [])
    assert (out.dtype, out.stride()) == (torch.float16, (1, 2))
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    with pytest.raises(ImportFailed):
        resolve("aten.no_such_operator.default")


def test_numbers_held_by_tensors_are_taken_out_for_a_call() -> None:
    template = ("call", ("tuple", (("item", Arg(0)), ix.sym("s") + 1)), ("dict", ()))
    assert instantiate(template, [torch.tensor(2.5)], {"s": 4})[0] == (2.5, 5)
    assert instantiate(template, [Arg(0)], {"s": 4})[0] == (Item(Arg(0)), 5)


def test_types_plait_does_not_have_pass_between_calls() -> None:
    def fn(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(torch.ones(3), torch.arange(3.0))
        return torch.view_as_real(z.transpose(0, 1)).flatten(1) + 1

    (graph,) = agree(fn, [torch.arange(24.0).view(4, 6)])
    assert any(n.dtype is DType.other for n in graph.nodes())
    # no call shares memory with its operand
    assert {n.attr("target") for n in externs(graph)} >= {
        "aten.view_as_complex_copy.default",
        "aten.transpose_copy.int",
    }
    assert any("complex64" in why for why in graph.refusals.values())


def test_random_calls_are_never_one() -> None:
    def fn(x: Tensor) -> Any:
        return torch.ops.aten.multinomial(x, 1), torch.ops.aten.multinomial(x, 1)

    graph, _ = imported(fn, [torch.ones(3)])
    assert len({n.attr("serial") for n in externs(graph)}) == 2


def test_data_dependent_sizes_are_bound_to_the_call() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        (graph,) = agree(lambda x: (x[x > 0] * 2, torch.nonzero(x).sum(0)), [torch.tensor([1.0, -2.0, 3.0])])
        (other,) = agree(lambda x: torch.arange(x[0].item() + 3) * 2, [torch.tensor([5, 2])])
    bound = [how for how in graph.bindings.values() if how[0] == "extern"]
    assert len(bound) == 2
    assert all(how[1] in graph.nodes() for how in bound)
    assert all(how[1] in other.nodes() for how in other.bindings.values() if how[0] == "extern")


def test_a_float_taken_out_of_a_tensor_stays_a_value() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (graph,) = agree(lambda x, y: y * x.max().item() + 1, [torch.ones(4), torch.ones(3)])
    assert "aten._local_scalar_dense.default" not in {n.attr("target") for n in externs(graph)}


def test_higher_order_operators_are_calls() -> None:
    (graph,) = agree(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)), [torch.ones(4)])
    (cond,) = [n for n in externs(graph) if n.attr("target") == "higher_order.cond"]
    assert cond in graph.effects
    assert cond.attr("serial") is not None


def test_unknown_operators_that_write_run_even_unread() -> None:
    with torch.library._scoped_library("plait_test", "FRAGMENT") as lib:
        lib.define("bump_(Tensor(a!) x) -> ()")
        lib.impl("bump_", lambda x: (x.add_(1), None)[1], "CompositeExplicitAutograd")
        torch.library.register_fake("plait_test::bump_", lambda x: None, lib=lib)

        def fn(x: Tensor) -> Tensor:
            y = x * 2
            torch.ops.plait_test.bump_(y)
            torch.ops.plait_test.bump_(x)
            return y * x

        (graph,) = agree(fn, [torch.ones(3)])
    assert len(graph.effects) == 2


def test_foreach_is_its_single_operators() -> None:
    def fn(a: Tensor, b: Tensor) -> Any:
        scaled = torch._foreach_mul([a, b], 2.0)
        return torch._foreach_addcdiv(torch._foreach_add(scaled, [b, a], alpha=3), [a, b], [b, a], [0.5, 2.0])

    (graph,) = agree(fn, [torch.rand(3) + 1, torch.rand(3) + 1])
    assert not externs(graph)


# ----------------------------------------------------------------------------------------------------------- layouts
_LAYOUTS = [
    torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.rand(2, 3, 4, 5),
    torch.rand(1, 3, 1, 1),
    torch.rand(2, 4, 3, 5).transpose(1, 2),
    torch.rand(5, 4, 3, 2).permute(3, 2, 1, 0),
    torch.rand(4, 5),
    torch.rand(5, 4).t(),
]


@pytest.mark.parametrize("a", range(len(_LAYOUTS)))
@pytest.mark.parametrize("b", range(len(_LAYOUTS)))
def test_elementwise_layout_is_eagers(a: int, b: int) -> None:
    x, y = _LAYOUTS[a], _LAYOUTS[b]
    want = torch.copysign(x, y)

    def exprs(values: Sequence[int]) -> tuple[ix.Expr, ...]:
        return tuple(ix.const(v) for v in values)

    got = elementwise_strides([(exprs(t.shape), exprs(t.stride())) for t in (x, y)], exprs(want.shape))
    assert got is not None
    assert [s.const for s in got] == list(want.stride())


def test_new_values_note_eagers_strides() -> None:
    graph, _ = imported(lambda x: x * 2, [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)])
    (strides,) = graph.layouts.values()
    assert [s.const for s in strides] == [60, 1, 15, 3]


def test_as_strided_of_an_argument_is_a_call_on_the_argument() -> None:
    graph, _ = imported(lambda x: x[1:].as_strided((2, 2), (1, 3), 2) + 1, [torch.ones(3, 3)])
    (made,) = externs(graph)
    assert made.attr("target") == "aten.as_strided_copy.default"
    assert made.reads[0].index == (ix.axis(0), ix.axis(1))


def test_results_that_would_overlap_own_their_elements() -> None:
    graph, _ = imported(lambda x: ((x + 1).unfold(0, 2, 1), (x + 2).expand(3, 4)), [torch.ones(4)])
    assert [[s.const for s in o.strides] for o in graph.outputs] == [[2, 1], [0, 1]]


def test_overlap_of_strides() -> None:
    def exprs(*values: int) -> tuple[ix.Expr, ...]:
        return tuple(ix.const(v) for v in values)

    assert overlaps(exprs(5, 10), exprs(4, 1))
    assert not overlaps(exprs(5, 10), exprs(10, 1))
    assert not overlaps(exprs(5, 10), exprs(1, 8))
    assert not overlaps(exprs(5, 10, 1), exprs(0, 1, 3))
