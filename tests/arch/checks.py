"""The house rules as functions: each takes source text and gives the list of its breaches, empty when it is clean."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_METHODS = 500, 60, 20

# Lower numbers know nothing of higher ones. Longest matching prefix wins.
LAYERS = {
    "plait.errors": 0,
    "plait.options": 0,
    "plait.levels": 0,
    "plait.ir": 0,
    "plait.regions": 0,
    "plait.rewrite": 1,
    "plait.rewrite.passes": 2,
    "plait.plan": 2,
    "plait.tile": 2,
    "plait.emit": 3,
    "plait.frontend": 3,
    "plait.oracle": 3,
    "plait.compiler": 4,
    "plait.runtime": 4,
    "plait.api": 5,
    "plait.report": 5,
    "plait.diagnose": 5,
    "plait": 5,
    "plait.workloads": 6,
    "plait.tools": 6,
    "plait.__main__": 6,
}
# "does any schedule fit?" is handed to the planner as a function, so that it needs no tile program
FORBIDDEN = (("plait.plan", "plait.tile"), ("plait.ir", "plait.options"))
TORCH_USERS = (
    "plait.frontend",
    "plait.oracle",
    "plait.runtime",
    "plait.compiler",
    "plait.api",
    "plait.regions",
    "plait.report.run",
    "plait.diagnose",
    "plait.tools",
    "plait.workloads",
)
TRITON_USERS = ("plait.runtime.build", "plait.runtime.binary")
# The bench hands its child processes an environment of their own.
ENVIRONMENT_READERS = ("plait.options",)
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}


def _under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> int | None:
    """The layer of a plait module; None for one that no layer names."""
    if module == "plait":
        return LAYERS["plait"]
    named = [p for p in LAYERS if p != "plait" and _under(module, p)]
    return LAYERS[max(named, key=len)] if named else None


def imports_of(module: str, source: str, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that `module` imports, wherever in the file, with the line. `from a import b` gives `a.b`."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            parts = base[: len(base) - node.level + 1] if node.level else []
            stem = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno


def check_layers(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports run downward only, and some not at all."""
    own = layer_of(module)
    if own is None:
        return [f"{module}: no layer names this module"]
    bad = []
    for target, line in imports_of(module, source, is_package):
        if not _under(target, "plait"):
            continue
        # `from plait import x` names the package or a module under it; the layer of the longest match decides
        theirs = layer_of(target)
        theirs = LAYERS["plait"] if theirs is None else theirs
        if theirs > own:
            bad.append(f"{module}:{line} imports {target} from a higher layer")
        if any(_under(module, a) and _under(target, b) for a, b in FORBIDDEN):
            bad.append(f"{module}:{line} may not import {target}")
    return bad


def check_outsiders(module: str, source: str, is_package: bool = False) -> list[str]:
    """torch and triton only where they belong."""
    bad = []
    for target, line in imports_of(module, source, is_package):
        for name, users in (("torch", TORCH_USERS), ("triton", TRITON_USERS)):
            if _under(target, name) and not any(_under(module, u) for u in users):
                bad.append(f"{module}:{line} imports {name}")
    return bad


def find_cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (or one that imports itself), by Tarjan's method."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1 or name in graph.get(name, ()):
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def import_graph(modules: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Module to modules, from name -> (source, is it a package); `from a import b` is an edge to a.b where that exists."""
    graph: dict[str, set[str]] = {}
    for name, (source, is_package) in modules.items():
        edges = set()
        for target, _ in imports_of(name, source, is_package):
            if target in modules:
                edges.add(target)
            elif target.rpartition(".")[0] in modules:
                edges.add(target.rpartition(".")[0])
        graph[name] = edges
    return graph


def check_sizes(name: str, source: str) -> list[str]:
    """Files, functions and classes stay small."""
    lines = source.count("\n") + (not source.endswith("\n"))
    bad = [f"{name}: {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                bad.append(f"{name}:{node.lineno} function {node.name} has {length} lines")
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) for m in node.body)
            if methods > MAX_CLASS_METHODS:
                bad.append(f"{name}:{node.lineno} class {node.name} has {methods} methods")
    return bad


def check_docstring(name: str, source: str) -> list[str]:
    """A module with anything in it says what it is for."""
    tree = ast.parse(source)
    return [f"{name}: no module docstring"] if tree.body and not ast.get_docstring(tree) else []


def check_environment(module: str, source: str, is_package: bool = False) -> list[str]:
    """Only options.py reads the environment."""
    if any(_under(module, r) for r in ENVIRONMENT_READERS):
        return []
    bad = [
        f"{module}:{node.lineno} touches os.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
    ]
    named = ("os.environ", "os.getenv", "os.putenv", "os.environb")
    return bad + [f"{module}:{line} imports {t}" for t, line in imports_of(module, source, is_package) if t in named]


def check_unsafe(module: str, source: str, is_package: bool = False) -> list[str]:
    """Nothing that turns data into code."""
    bad = []
    for target, line in imports_of(module, source, is_package):
        if target.split(".")[0] in UNSAFE_MODULES or target == "torch.load":
            bad.append(f"{module}:{line} imports {target}")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        f = node.func
        if isinstance(f, ast.Name) and f.id in UNSAFE_CALLS:
            bad.append(f"{module}:{node.lineno} calls {f.id}")
        if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and (f.value.id, f.attr) == ("torch", "load"):
            bad.append(f"{module}:{node.lineno} calls torch.load")
    return bad


def check_broad_except(module: str, source: str) -> list[str]:
    """`except Exception` needs a reason on its line; a bare `except` or BaseException that does not re-raise has none."""
    bad = []
    rows = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"BaseException"}
        if "BaseException" in names and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
            bad.append(f"{module}:{node.lineno} swallows BaseException")
        elif "Exception" in names and "#" not in rows[node.lineno - 1]:
            bad.append(f"{module}:{node.lineno} catches Exception without saying why on that line")
    return bad


def _words(*pieces: str) -> str:
    return "".join(pieces)


# Spelled in pieces so that this file does not hold what it looks for.
TEXT_RULES: tuple[tuple[str, str], ...] = (
    ("an unfinished note", _words(r"\b(TO", r"DO|FIX", r"ME|XX", r"X)\b")),
    (
        "a path of one machine",
        _words(r"(?<![\w.])/(wo", r"rk|ro", r"ot|ho", r"me/\w+|opt/py", r"pi|opt/whe", r"els)(/|\b)"),
    ),
    (
        "a registry's host",
        _words(
            r"\b(py",
            r"pi\.org|pythonho",
            r"sted\.org|download\.py",
            r"torch\.org|registry\.np",
            r"mjs|deb\.deb",
            r"ian)",
        ),
    ),
    ("a tracker's number", _words(r"\w#\d{2,}\b|\b(iss", r"ue|pull request|PR) #?\d+")),
    (
        "talk about who wrote it",
        _words(r"(?i)\b(this|previous|next) ses", r"sion\b|\bsub-?ag", r"ent|\bCl", r"aude\b|\bAI-gen"),
    ),
)


def check_text(name: str, text: str) -> list[str]:
    """Nothing in the tree speaks of the place or the way it was written."""
    bad = []
    for number, row in enumerate(text.splitlines(), 1):
        bad += [f"{name}:{number} has {what}: {row.strip()[:80]}" for what, rule in TEXT_RULES if re.search(rule, row)]
    return bad
