"""One kernel, or one graph, as a file that runs on its own: the same kernel, rightly judged, with nothing of the user's in its code."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from click.testing import CliRunner
from golden.case import cases, read_case
from reproduced import run, subject

import plait
from plait.diagnose.recipes import MOST_BYTES
from plait.diagnose.reproduce import MARK, graph_text, kernel_text, write_file
from plait.errors import UserError
from plait.report.report import Report
from plait.tools.cli import main

STRICT = {"strict": True, "cache_dir": "0"}
SAMPLE = ("dropout", "materialise", "rows_and_columns")


def only_literals(text: str) -> None:
    """The file imports torch, assigns literals, defines one function of calls of torch's operators, and runs plait's."""
    tree = ast.parse(text)
    for s in tree.body[1:-1]:
        if isinstance(s, ast.Import):
            assert {a.name for a in s.names} <= {"torch", "math", "operator"}
        elif isinstance(s, ast.Assign):
            ast.literal_eval(s.value)
        else:
            assert isinstance(s, ast.FunctionDef) and s.name == "eager"
            _only_operators(s)
    last = tree.body[-1]
    assert isinstance(last, ast.If) and [type(s) for s in last.body] == [ast.ImportFrom, ast.Assign, ast.Raise]
    assert isinstance(last.body[1], ast.Assign) and isinstance(last.body[1].value, ast.Call)
    for k in last.body[1].value.keywords:
        if not isinstance(k.value, ast.Name):
            ast.literal_eval(k.value)


def _only_operators(f: ast.FunctionDef) -> None:
    for s in f.body[1:]:
        assert isinstance(s, ast.Assign | ast.Return)
    for call in (n for n in ast.walk(f) if isinstance(n, ast.Call)):
        assert ast.unparse(call.func).split(".")[0] in (
            "torch",
            "operator",
            "math",
            "float",
            "complex",
            "getattr",
            "slice",
        )


# ------------------------------------------------------------------------------------------------ golden programs
@pytest.mark.parametrize("name", SAMPLE)
def test_golden_programs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _all_of(name, tmp_path, capsys)


@pytest.mark.long
@pytest.mark.parametrize("name", [p.stem for p in cases() if p.stem not in SAMPLE])
def test_all_golden_programs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _all_of(name, tmp_path, capsys)


def _all_of(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kernel and the graph: on the CPU as machine code, for a card as tile programs."""
    case = read_case(next(p for p in cases() if p.stem == name))
    for device in ("cpu", "h200"):
        s = subject(case, device)
        kernels = [k for k, launch in enumerate(s.compiled.launches) if launch.parts]
        assert kernels
        for step in (None, *kernels):
            text = graph_text(s) if step is None else kernel_text(s, step)
            only_literals(text)
            path = write_file(folder / f"{device}_{step}.py", text)
            assert run(path, *(["--evaluate"] if device == "h200" else [])) == 0
            said = capsys.readouterr().out
            assert "the recorded kernel (" in said and "NOT" not in said
            assert "\nPASS: judged against" in said or "\nWARN: judged against" in said


# ------------------------------------------------------------------------------------------------ real programs
def normed(x: torch.Tensor, w: torch.Tensor, keep: torch.Tensor, at: torch.Tensor) -> Any:
    y = torch.nn.functional.layer_norm(x @ w, (64,))
    return torch.softmax(y.masked_fill(keep, -torch.inf), -1), y[at].float().sum(0)


def _normed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    keep = torch.rand(40, 64) < 0.25
    return [torch.randn(40, 32).bfloat16(), torch.randn(64, 32).bfloat16().t(), keep, torch.randperm(40)]


@pytest.fixture(scope="module")
def report() -> Report:
    return plait.explain(normed, *_normed(), options=STRICT)


def _kernels(report: Report, graph: int = 0) -> list[int]:
    return [k.number for k in report.graphs[graph].kernels if k.kind == "kernel"]


def test_a_file_of_its_own(report: Report, tmp_path: Path) -> None:
    """It runs in a process of its own, says which kernel it is, what eager takes, and where."""
    step = _kernels(report)[0]
    path = report.kernel(step).reproduce(tmp_path / "k.py", values=True)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, verdict, *_, times = done.stdout.splitlines()
    assert first.startswith(f"kernel {step} (k") and first.endswith(f"written by plait {plait.__version__}")
    assert "the recorded kernel (cpp, code " in second
    assert verdict.startswith(("PASS", "WARN"))
    assert times.startswith("time on cpu") and times.endswith("(median of 15 interleaved batches)")
    assert len(path.read_text().splitlines()) < 400


def test_a_graph_beside_eager(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report.reproduce(tmp_path / "graph.py")
    only_literals(path.read_text())
    assert run(path) == 0
    said = capsys.readouterr().out
    assert "judged against eager and float64" in said and ", eager " in said
    assert run(path, "--source", "--tile", "--graph") == 0
    texts = capsys.readouterr().out
    assert texts.startswith("graph 1\n") and 'program "k' in texts and "plait.h" in texts


def test_arguments_are_like_those_of_the_call(report: Report, tmp_path: Path) -> None:
    made = _loaded(report.reproduce(tmp_path / "like.py"))
    same = _loaded(report.reproduce(tmp_path / "same.py", values=True))
    for x, drawn, kept in zip(_normed(), made.arguments("cpu"), same.arguments("cpu"), strict=True):
        assert torch.equal(kept, x) and kept.stride() == drawn.stride() == x.stride() and drawn.dtype is x.dtype
        if x.is_floating_point():
            assert float(drawn.double().min()) == float(x.double().min()) and float(drawn.max()) == float(x.max())
            assert abs(float(drawn.double().mean() - x.double().mean())) < 0.1 * float(x.double().std())
    keep, at = made.arguments("cpu")[2:]
    assert 0.15 < float(keep.double().mean()) < 0.35
    assert torch.equal(at.sort().values, torch.arange(40))


def test_training_shared_launches_draws_and_sizes(tmp_path: Path) -> None:
    """Backward graphs, several parts and results, random numbers, sizes that are symbols, arguments that are written."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = torch.nn.functional.dropout(torch.relu(x), 0.25, True)
        return (z * 2).sum(-1), torch.sigmoid(y)

    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y.exp())
        return x.sum(-1)

    torch.manual_seed(0)
    args = torch.randn(33, 20), torch.randn(17)
    sized = torch.randn(13, 20)
    torch._dynamo.mark_dynamic(sized, 0)
    reports = [
        plait.explain(fn, *args, train=True, options=STRICT),
        plait.explain(lambda x: (torch.softmax(x, -1), x.sum(0)), sized, options=STRICT),
        plait.explain(writes, torch.randn(9, 8), torch.randn(9, 8), options=STRICT),
    ]
    assert [g.kind for g in reports[0].graphs] == ["forward", "backward"]
    for report in reports:
        for g in range(len(report.graphs)):
            assert run(report.reproduce(tmp_path / "graph.py", graph=g)) == 0
            for k in _kernels(report, g):
                assert run(report.kernel(k, g).reproduce(tmp_path / "k.py")) == 0
    assert "symbol s" in (tmp_path / "k.py").read_text() or "13" in (tmp_path / "k.py").read_text()


def test_for_a_card_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = plait.explain(normed, *_normed(), target="h200")
    path = report.kernel(_kernels(report)[0]).reproduce(tmp_path / "k.py")
    assert run(path, "--evaluate") == 0
    assert "(triton, code " in capsys.readouterr().out
    assert run(path, "--source") == 0
    assert "@triton.jit" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert run(path) == 2
        assert "it needs a CUDA device" in (said := capsys.readouterr().err) and "--evaluate" in said


# ------------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize("plant", [planted.wrong_code, planted.wrong_tiles], ids=["code", "tiles"])
def test_a_planted_fault(plant: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows while the fault is there. Without it wrong code is not that kernel any more, and is right; a tile program that
    was wrong stays so."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        report = plait.explain(planted.scored, torch.randn(16, 40), options=STRICT)
        step = next(k.number for k in report.graphs[0].kernels if any("tanh" in m.line for m in k.members))
        one = report.kernel(step).reproduce(tmp_path / "k.py")
        whole = report.reproduce(tmp_path / "graph.py")
        for path in (one, whole):
            assert run(path) == 1
            said = capsys.readouterr().out
            assert "\nFAIL: judged" in said and "NOT the recorded" not in said
    if plant is planted.wrong_tiles:
        assert run(one) == 1
        return
    assert run(one) == 0
    assert "NOT the recorded kernel: of the same tile program plait" in capsys.readouterr().out


def test_an_edited_tile_program_is_told(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report.kernel(_kernels(report)[0]).reproduce(tmp_path / "k.py")
    text = path.read_text()
    assert " = exp(" in text.partition("TILES")[2]
    head, _, tiles = text.partition("TILES")
    path.write_text(head + "TILES" + tiles.replace(" = exp(", " = cos(", 1))
    assert run(path) == 1
    assert "its tile program was edited since" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ what is refused
def test_refusals(report: Report, tmp_path: Path) -> None:
    call = next(k.number for k in report.graphs[0].kernels if k.kind == "call")
    with pytest.raises(UserError, match="is an ATen call, and no kernel\n  hint: kernels are the steps"):
        report.kernel(call).reproduce(tmp_path / "k.py")
    with pytest.raises(UserError, match="there is no graph 7"):
        report.reproduce(tmp_path / "k.py", graph=7)
    mine = tmp_path / "mine.py"
    mine.write_text("print('mine')\n")
    with pytest.raises(UserError, match="is no reproducer of plait's\n  hint: name another file, or remove it"):
        report.reproduce(mine)
    assert mine.read_text() == "print('mine')\n"
    assert report.reproduce(tmp_path / "g.py") == report.reproduce(tmp_path / "g.py")  # over its own
    with pytest.raises(UserError, match="cannot write"):
        report.reproduce(tmp_path / "nowhere" / "g.py")
    with pytest.raises(UserError, match="cannot run its program again"):
        replace(report, _inside=None).reproduce(tmp_path / "g.py")


def test_values_have_a_limit(tmp_path: Path) -> None:
    x = torch.randn(MOST_BYTES // 4 + 1)
    report = plait.explain(lambda x: torch.exp(x) + 1, x, options=STRICT)
    with pytest.raises(UserError, match=r"the values are 1\.0 MiB, and a file holds 1 MiB\n  hint: without values"):
        report.kernel(0).reproduce(tmp_path / "k.py", values=True)
    assert report.kernel(0).reproduce(tmp_path / "k.py").stat().st_size < 10_000


def test_a_graph_that_runs_in_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    report = plait.explain(lambda x: torch.exp(x) + 3, torch.randn(8), options={"cache_dir": "0"})
    with pytest.raises(UserError, match="runs in eager"):
        report.reproduce(tmp_path / "g.py")


# ------------------------------------------------------------------------------------------------ hostile names
def test_nothing_of_the_users_is_code(tmp_path: Path) -> None:
    """Quotes, escapes and line ends in names and lines stay text."""
    evil = "'''\"\"\"\\\n\r\u2028\x00); raise SystemExit(3) #'''"
    s = subject(read_case(next(p for p in cases() if p.stem == "softmax")))
    graph = s.compiled.graph
    for n, origins in graph.origins.items():
        graph.origins[n] = tuple(replace(o, line=f"a.py:1 {evil}", module=evil, fx=evil) for o in origins)
    launches = tuple(
        replace(x, parts=tuple(replace(p, program=replace(p.program, header=(evil,))) for p in x.parts))
        for x in s.compiled.launches
    )
    renamed = replace(s, title=evil, compiled=replace(s.compiled, launches=launches))
    for text in (graph_text(renamed), kernel_text(renamed, 0)):
        only_literals(text)
        assert text.isascii() and text.startswith(MARK)
        assert run(write_file(tmp_path / "k.py", text)) == 0


def test_a_program_full_of_quotes(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n\n\ndef make():\n    def fn(x):\n"
        "        y = torch.exp(x)  # '''\"\"\" \\\\ \\N{SNOWMAN} ''') + exit(3) #\n"
        "        return torch.tanh(y) + len('''\"\"\"''')\n\n    return fn, [torch.randn(8, 40)]\n"
    )
    out = tmp_path / "files"
    done = CliRunner().invoke(main, ["explain", str(tmp_path / "odd.py"), "--reproduce", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-2:] == [f"wrote {out}/graph0.py", f"wrote {out}/graph0_kernel0.py"]
    for path in out.iterdir():
        only_literals(path.read_text())
        assert run(path) == 0


# ------------------------------------------------------------------------------------------------ the command line
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(
        "import torch\n\ndef make():\n    return lambda x: torch.softmax(x, -1), [torch.randn(8, 40)]\n"
    )
    file, out = str(tmp_path / "p.py"), str(tmp_path / "k.py")
    ask = ["explain", file, "--reproduce", out, "--kernel"]
    done = CliRunner().invoke(main, [*ask, "0", "--values"])
    assert done.exit_code == 0 and done.output.endswith(f"wrote {out}\n")
    assert "VALUES = [" in Path(out).read_text()
    done = CliRunner().invoke(main, [*ask, "5"])
    assert done.exit_code == 2 and "graph 0 has no step 5" in done.output
    done = CliRunner().invoke(main, ["explain", file, "--kernel", "0"])
    assert done.exit_code == 2 and "name a file with it" in done.output
    done = CliRunner().invoke(main, ["explain", file, "--reproduce", file])
    assert done.exit_code == 2 and "is no reproducer of plait's" in done.output
    (tmp_path / "taken").write_text("")
    done = CliRunner().invoke(main, ["explain", file, "--reproduce", str(tmp_path / "taken")])
    assert done.exit_code == 2 and "ends in .py" in done.output


def _loaded(path: Path) -> Any:
    """The Reproducer of a file."""
    import runpy

    from plait.diagnose.reproducer import Reproducer

    found: list[Reproducer] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reproducer, "main", lambda self: found.append(self) or 0)
        with pytest.raises(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
    return found[0]
