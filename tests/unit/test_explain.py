"""plait.explain: published intensities, the page and the JSON, refusals with the user's lines, and assertions' messages."""

from __future__ import annotations

import json
import re
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

import plait
from plait.errors import UserError
from plait.ir.dtype import DType
from plait.ir.graph import Builder
from plait.options import Options
from plait.plan.plan import Decision
from plait.plan.reasons import Reason, Why
from plait.report import facts as F
from plait.report import refusals
from plait.report.checks import nbytes
from plait.report.json_form import SCHEMA_FILE
from plait.report.report import Report
from plait.runtime.tune import Tuned
from plait.tools.cli import main


def _l2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x * x
    b = y * y
    c = a + b
    return torch.sqrt(c)


def _turned(x: torch.Tensor) -> torch.Tensor:
    rows = x.sum(1)
    return x - rows  # read along the columns


def _norm_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(x, (64,))
    y = torch.cumsum(y @ w, 1)
    return torch.special.bessel_j0(torch.tanh(y) + 1.0)


def _two(n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, n), torch.randn(n, n)


@pytest.fixture(scope="module")
def l2() -> Report:
    return plait.explain(_l2, *_two(), target="cpu")


@pytest.fixture(scope="module")
def turned() -> Report:
    return plait.explain(_turned, torch.randn(64, 64), target="cpu")


@pytest.fixture(scope="module")
def mixed() -> Report:
    return plait.explain(_norm_linear, torch.randn(128, 64), torch.randn(64, 64), target="cpu")


@pytest.fixture(scope="module")
def trained() -> Report:
    return plait.explain(_norm_linear_grad, torch.randn(128, 64), torch.randn(64, 64), train=True)


def _norm_linear_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.layer_norm(x, (64,)) @ w, -1).pow(2).sum()


# ------------------------------------------------------------------------------------------------------- intensities
def test_four_kernel_l2_norm_has_its_published_intensities(l2: Report) -> None:
    (kernel,) = l2.graphs[0].kernels
    add = next(m for m in kernel.members if m.name == "add")
    n = 1000 * 1000
    assert (add.flops.counted, add.before.read, add.before.written) == (n, 8 * n, 4 * n)
    assert add.intensity_before == pytest.approx(1 / 12)  # 0.083: one flop, twelve bytes
    assert kernel.flops == F.Flops(arithmetic=3 * n, special=n)  # the root is counted apart
    assert (kernel.after.read, kernel.after.written) == (8 * n, 4 * n)
    assert kernel.intensity_after == pytest.approx(3 / 12)
    assert kernel.before.total == (8 + 8 + 12 + 8) * n
    assert [m.name for m in kernel.members] == ["mul", "mul", "add", "sqrt"]
    assert {v.lives for v in kernel.intermediates} == {"register", "memory"}
    assert (kernel.directions, kernel.mapping, l2.totals.launches, l2.totals.operators) == (
        ("vertical",),
        "thread",
        1,
        4,
    )


def test_tensor_cores_special_functions_and_sums_are_counted_apart() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.exp(x).sum(-1, keepdim=True) * (x @ w)

    x, w = torch.randn(256, 512, dtype=torch.bfloat16), torch.randn(512, 128, dtype=torch.bfloat16)
    t = plait.explain(fn, x, w, target="h100").totals.flops
    assert t.tensor_core == 2 * 256 * 512 * 128
    assert t.special == 256 * 512
    assert 256 * 512 <= t.arithmetic <= 256 * 512 + 2 * 256 * 128
    on_cpu = plait.explain(fn, x, w, target="cpu").totals.flops
    assert on_cpu.tensor_core == 0


# -------------------------------------------------------------------------------------------------------------- pages
_PAGE = """\
_l2 on cpu (predicted, nothing ran there)
eager  4 operators, 36.0 MB
plait  1 kernel + 0 ATen calls, 12.0 MB (3.00x less), 926 us predicted
memory 4.00 MB at most beside inputs of 8.00 MB

Not fused: nothing

graph0 (inference) from test_explain.py:35
#  step, by time                            us bound  bytes alone   fused flop/B fused
0  mul x2, add, sqrt                       926 memory     36.0 MB 12.0 MB  0.083 0.250
   test_explain.py:35-38; vertical, thread

  k0_add_sqrt: 3.00 M arithmetic, 1.00 M special functions; roofline 923 us
  operator the user's line                          flops special bytes alone flop/B
  mul      test_explain.py:35 a = x * x            1.00 M       0     8.00 MB  0.125
  mul      test_explain.py:36 b = y * y            1.00 M       0     8.00 MB  0.125
  add      test_explain.py:37 c = a + b            1.00 M       0     12.0 MB  0.083
  sqrt     test_explain.py:38 return torch.sqrt(c)      0  1.00 M     8.00 MB  0.000
  values: in registers mul_2, mul_3, add_4; in memory sqrt_5
"""


def _page(report: Report, **how: Any) -> str:
    return re.sub(r"graph\d+", "graph0", report.text(**how))


def test_page_of_a_small_program(l2: Report) -> None:
    assert _page(l2) == _PAGE


@pytest.mark.parametrize("name", ["l2", "turned", "mixed", "trained"])
def test_pages_fit_a_hundred_columns(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    for detail in (True, False, None):
        assert max(map(len, report.text(detail=detail, top=0).splitlines())) <= 100
    assert "\x1b" not in str(report)
    assert "\x1b" in report.text(color=True)


def test_refusals_come_first_and_name_the_users_lines(turned: Report) -> None:
    page = str(turned)
    assert page.index("Not fused") < page.index("(inference)")
    line = _turned.__code__.co_firstlineno
    (r,) = turned.graphs[0].refusals
    assert r.reason == "axes do not align"
    assert r.producer.line.startswith(f"test_explain.py:{line + 1} rows = x.sum(1)")
    assert r.consumer.line.startswith(f"test_explain.py:{line + 2} return x - rows")
    assert f"sum at test_explain.py:{line + 1} and sub at test_explain.py:{line + 2}" in " ".join(page.split())
    assert "to change it: index both operators by the same axes" in " ".join(page.split())


def test_refusals_give_both_times_where_they_say_something() -> None:
    n = 512
    report = plait.explain(lambda x: (x.sum(0), x.sum(1)), torch.randn(n, n), target="cpu")
    refused = [r for g in report.graphs for r in g.refusals]
    (r,) = [r for r in refused if r.reason == "does not pay"]
    assert r.direction == "input" and r.unlock.startswith("nothing")
    assert r.together_us is not None and r.apart_us is not None and r.together_us > r.apart_us
    assert f"{r.together_us:.1f} us in one kernel, {r.apart_us:.1f} us in two" in r.sentence
    assert r.sentence.endswith("parts of one launch") and r.producer.step == r.consumer.step


def test_a_law_that_forbids_a_gain_says_how_much() -> None:
    def said(why: Why, together: float) -> str:
        node = Builder().node("const", (), dtype=DType.f32, value=1.0)
        return refusals._gain(Decision(node, node, Reason(why), 5000.0, together))

    assert said(Why.MISALIGNED, 3000.0) == " (3.0 us in one kernel, 5.0 us in two, were it possible)"
    assert said(Why.MISALIGNED, 6000.0) == said(Why.CYCLE, 0.0) == said(Why.NO_GAIN, 3000.0) == ""


def test_calls_say_why_they_are_calls(mixed: Report) -> None:
    calls = {k.name: k.why for k in mixed.graphs[0].kernels if k.kind == "call"}
    assert set(calls) == {"aten.mm.default", "aten.special_bessel_j0.default"}
    assert "stays the library's product" in calls["aten.mm.default"]
    assert "runs in ATen" in calls["aten.special_bessel_j0.default"]


def test_graphs_are_sections_of_their_own(trained: Report) -> None:
    assert [g.kind for g in trained.graphs] == ["forward", "backward"]
    members = {m.name for k in trained.graphs[1].kernels for m in k.members if m.backward}
    assert {"softmax", "layer_norm"} <= members
    assert trained.totals.peak_bytes == max(g.totals.peak_bytes for g in trained.graphs) > 0


def test_what_the_backward_forms_again_is_not_eagers_work(trained: Report) -> None:
    again = [m for g in trained.graphs for k in g.kernels for m in k.members if m.recomputed]
    assert all(m.before.total == 0 for m in again)
    forward, backward = (g.totals.operators for g in trained.graphs)
    # norm, product, softmax, power, sum; of the power's gradient three, of the product's two
    assert (forward, backward) == (5, 7)


# --------------------------------------------------------------------------------------------------------------- JSON
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
    return found


@pytest.mark.parametrize("name", ["l2", "turned", "mixed", "trained"])
def test_json_keeps_its_schema(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    jsonschema.validate(json.loads(report.to_json()), _schema(), cls=jsonschema.Draft202012Validator)


def test_schema_has_every_field_and_refuses_others(l2: Report) -> None:
    schema = _schema()
    derived = {"Traffic": {"total"}, "Flops": {"counted"}, "Totals": {"launches"}}
    for name, defn in schema["$defs"].items():
        assert set(defn["properties"]) == {f.name for f in fields(getattr(F, name))} | derived.get(name, set()), name
    assert set(schema["properties"]) == {"schema", *(f.name for f in fields(F.Facts))}
    wrong = json.loads(l2.to_json())
    wrong["graphs"][0]["kernels"][0]["bound"] = "luck"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


# --------------------------------------------------------------------------------------------------------- assertions
def test_assertions_that_hold(l2: Report, turned: Report) -> None:
    l2.assert_fused("mul", "sqrt")
    l2.assert_fused("aten.add", f"test_explain.py:{_l2.__code__.co_firstlineno + 4}")
    l2.assert_kernels(at_most=1)
    l2.assert_no_fallback()
    l2.assert_traffic(at_most="12 MB")
    turned.assert_not_fused("sum", "sub")


def test_assertions_that_fail_say_why(l2: Report, turned: Report, mixed: Report) -> None:
    line = _turned.__code__.co_firstlineno
    with pytest.raises(AssertionError) as e:
        turned.assert_fused("sum", "sub")
    for words in (
        "not fused: sum, sub",
        "axes do not align",
        f"test_explain.py:{line + 2} return x - rows",
        "to change",
    ):
        assert words in str(e.value)
    with pytest.raises(AssertionError, match=r"not fused: layer_norm, matmul(.|\n)*stays the library's product"):
        mixed.assert_fused("layer_norm", "matmul")
    with pytest.raises(AssertionError, match=r"fused: mul, sqrt\n.*step 0 k0_add_sqrt at test_explain.py"):
        l2.assert_not_fused("mul", "sqrt")
    with pytest.raises(AssertionError, match=r"2 launches .*at most 1 expected(.|\n)*not fused: sum at test_explain"):
        turned.assert_kernels(at_most=1)
    with pytest.raises(AssertionError, match=r"12.0 MB of traffic, at most 1.00 MB expected"):
        l2.assert_traffic(at_most="1 MB")
    with pytest.raises(AssertionError, match=r"nothing here is called 'sqrd'; there is sqrt"):
        l2.assert_fused("sqrd", "mul")
    with pytest.raises(TypeError):
        l2.assert_fused("mul")


def test_neighbours_of_neighbours_are_told_apart(mixed: Report) -> None:
    with pytest.raises(AssertionError, match=r"they are no neighbours"):
        mixed.assert_fused("layer_norm", "tanh")


def test_a_fallback_is_seen() -> None:
    report = plait.explain(_l2, *_two(8), options={"backend": "eval"})
    assert report.totals.fallbacks
    with pytest.raises(AssertionError, match=r"reference evaluation"):
        report.assert_no_fallback()
    assert "in eager" in str(report)


def test_module_paths_are_names() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Sequential(torch.nn.GELU(), torch.nn.Softmax(-1)))
    report = plait.explain(model, torch.randn(64, 32), target="cpu")
    report.assert_fused("0", "1.0")
    report.assert_fused("layer_norm", "1")


@pytest.mark.parametrize("given, expected", [(12, 12), ("64 MB", 64e6), ("1.5KiB", 1536), ("7", 7)])
def test_bytes_as_text(given: float | str, expected: float) -> None:
    assert nbytes(given) == expected


def test_nonsense_is_no_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="12 parsecs"):
        nbytes("12 parsecs")


# ------------------------------------------------------------------------------------------------------------ records
def test_fusions_are_kept_with_what_decided_them(mixed: Report, l2: Report) -> None:
    names = {(f.producer.name, f.consumer.name) for f in l2.graphs[0].fusions}
    assert ("add", "sqrt") in names
    every = [f for g in mixed.graphs for f in g.fusions]
    assert every and all(f.together_us is None or f.apart_us is None or f.together_us < f.apart_us for f in every)
    assert {f.direction for f in every} <= {"vertical", "input"}


def test_steps_know_what_they_read_and_their_text(mixed: Report) -> None:
    kernels = mixed.graphs[0].kernels
    product = next(k for k in kernels if k.name == "aten.mm.default")
    (before,) = product.needs
    assert [m.name for m in kernels[before].members] == ["layer_norm"]
    assert all(("plait" in k.source) is (k.kind == "kernel") for k in kernels)
    assert any("for" in k.source for k in kernels)


def test_operators_of_which_no_node_is_left_are_where_their_readers_are() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.t().contiguous() @ w) + 1

    x = torch.randn(64, 32)
    report = plait.explain(fn, x, torch.randn(64, 8), target="cpu")
    found = [(m.name, k.name) for _, k in report.steps() for m in k.members if m.name == "contiguous"]
    assert found and report.totals.before.total == sum(k.before.total for _, k in report.steps())


def test_peak_memory_is_of_values_alive_at_once() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.special.bessel_j0(x)  # a call each: one result lives while the next is made
        return x

    t = plait.explain(fn, torch.rand(1000), target="cpu").totals
    assert (t.peak_bytes, t.input_bytes, t.calls) == (8000, 4000, 4)


def test_measured_times_and_binaries_of_built_kernels() -> None:
    """What a card records: schedules that were timed, and the driver's word on the chosen one."""
    from plait.report import run, text

    watch = run._Watch(Options.make(), "h200")
    watch.compiled(_l2)(*_two())
    (seen,) = watch.seen
    compiled = seen.record.details["compiled"]
    binary = SimpleNamespace(n_regs=40, n_spills=2, metadata=SimpleNamespace(shared=1024, num_warps=8))
    kernels: list[Any] = [SimpleNamespace(binary=None), SimpleNamespace(binary=binary)]
    tuned = Tuned(kernels, ["default", "wide"])
    tuned.times_ms, tuned.choice = {"default": 0.02, "wide": 0.01}, 1
    seen.record.details["executable"] = lambda: SimpleNamespace(kernels=[tuned])
    seen.measured = run._measured(compiled, seen.record)
    (kernel,) = watch.facts(seen).kernels
    assert kernel.resources == F.Resources(40, 8, 1024, 0.75)
    assert kernel.measured_us == pytest.approx(10.0)
    assert kernel.roofline_us is not None and kernel.roofline_share == pytest.approx(kernel.roofline_us / 10.0)
    assert [(v.name, v.chosen, v.remembered) for v in kernel.variants] == [
        ("default", False, False),
        ("wide", True, False),
    ]
    tuned.remembered = True
    seen.measured = run._measured(compiled, seen.record)
    facts = watch.facts(seen)
    assert [(v.measured_us, v.remembered) for v in facts.kernels[0].variants] == [(20.0, True), (10.0, True)]
    assert "measured before, " in text._step(SimpleNamespace(first=facts.kernels[0], title="", steps=())).plain  # type: ignore[arg-type]


def test_a_compiled_function_is_explained_as_what_it_is() -> None:
    report = plait.explain(plait.compile(_l2), *_two(8), target="cpu")
    assert [m.name for m in report.graphs[0].kernels[0].members] == ["mul", "mul", "add", "sqrt"]


# ----------------------------------------------------------------------------------------------------------- programs
def test_repeated_explanations_do_not_run_into_a_limit() -> None:
    for _ in range(12):
        assert len(plait.explain(_l2, *_two(8), target="cpu").graphs) == 1


def test_a_target_leaves_results_alone() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        seen.append(y)
        return y + 1

    x = torch.ones(4)
    report = plait.explain(fn, x, target="cpu")
    assert len(report.graphs) == 2 and report.breaks
    assert torch.equal(seen[0], x * 2)


def test_unknown_target() -> None:
    with pytest.raises(UserError, match="tpu"):
        plait.explain(_l2, *_two(8), target="tpu")


def _explain(path: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["explain", str(path), *words])


_FILE = """
import torch
def make():
    def fn(x):
        return torch.softmax(x, -1) * 2
    return fn, [(torch.randn(8, 16),), (torch.randn(8, 32),)]
"""


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "there is no file"),
        ("x = 1", "defines no make()"),
        ("def make(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("def make(): return 1", "does not return (fn, args)"),
        ("def make():\n    raise KeyError('a')", "raises KeyError: 'a' (line 2)"),
        (
            "import torch\ndef make(): return torch.mm, [torch.ones(2, 3), torch.ones(2, 3)]",
            "raises in eager: RuntimeError",
        ),
        (
            "import torch\ndef make():\n def f(x):\n  return x[9]\n return f, [torch.ones(2)]",
            "program.py:4 return x[9]",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    if text is not None:
        path.write_text(text)
    done = _explain(path)
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output and len(done.output.strip().splitlines()) <= 2
    assert isinstance(_explain(path, "--debug").exception, UserError)


def test_what_only_torch_compile_raises_is_no_fault_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.report import run

    def broken(*args: Any) -> None:
        raise AssertionError("incorrect out shape\nand more")

    monkeypatch.setattr(run._Watch, "compiled", lambda watch, fn: broken)
    path = tmp_path / "program.py"
    path.write_text(_FILE)
    done = _explain(path)
    assert done.exit_code == 1
    assert "eager runs the program, torch.compile does not: AssertionError: incorrect out shape\n" in done.output


def test_what_a_program_prints_is_no_part_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("print('loaded')\n" + _FILE.replace("return torch", "print('running'); return torch"))
    done = _explain(path, "--target", "cpu", "--json", "-")
    assert json.loads(done.stdout)["schema"] == "plait.report/1"
    assert "loaded" in done.stderr


def test_explaining_costs_little_beside_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a tenth of a model's compile time, with everything but planning taken from the cache."""
    from plait.report import run

    spent = 0.0

    def timed(fn: Any) -> Any:
        def inner(*args: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            out = fn(*args)
            spent += time.perf_counter() - start
            return out

        return inner

    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)]
    model, x = torch.nn.Sequential(*layers).train(), torch.randn(2, 32, 64)
    plait.explain(model, x, train=True)
    monkeypatch.setattr(run, "operators", timed(run.operators))
    monkeypatch.setattr(run._Watch, "facts", timed(run._Watch.facts))
    report = plait.explain(model, x, train=True)
    assert report.totals.kernels > 4
    assert spent < 0.1 * sum(g.compile_seconds for g in report.graphs)


def test_the_command_prints_a_page_or_json(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(_FILE)
    told = json.loads(_explain(path, "--json", "-").stdout)
    jsonschema.validate(told, _schema())
    assert len(told["graphs"]) == 2  # a call of another shape is compiled anew
    out = tmp_path / "report.json"
    done = _explain(path, "--target", "cpu", "--json", str(out))
    assert done.exit_code == 0 and "program.py on cpu" in done.output, done.output
    assert json.loads(out.read_text())["program"] == "program.py"
