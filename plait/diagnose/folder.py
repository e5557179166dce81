"""The folder of a bisection: the smallest program that shows the fault, what it takes to run it, and how far the search got.

run.py         runs the program with one decision fewer and with it, and says what differs; exit code 1 while it does
one_file.py    the program with it alone, as `report.reproduce` writes a graph: to be handed on
graph.py       the program, as it was captured      graph.txt  the Graph that plait makes of it
options.json   options of plait, fuel among them    inputs.json, inputs.bin  arguments: types, shapes, strides; bytes
found.json     what was found                       decisions.txt  all decisions, numbered
progress.json  answers so far, for a search that is taken up again
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.diagnose.recipes import dtype_of, elements, form_of, from_bytes, laid_out, plain_number, to_bytes
from plait.diagnose.reproduce import Subject, graph_text
from plait.diagnose.trials import Case, Trial
from plait.errors import UserError
from plait.ir.fuel import Taken
from plait.ir.text import print_graph
from plait.runtime.repro import module_text

_ELSEWHERE = "name a folder of your own with --folder"
_RUN = '''"""The smallest program that shows it: run with one decision fewer, and with it."""

import pathlib
import sys

from plait.diagnose.replay import replay

sys.exit(replay(pathlib.Path(__file__).parent))
'''


class Progress:
    """Answers to "is it wrong with so much fuel?" (or the times), kept in a file as they come. Those of another program, or
    of one whose decisions are others, are dropped."""

    def __init__(self, folder: Path, signature: str) -> None:
        self._path, self.signature = folder / "progress.json", signature
        self.answers: dict[str, Any] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["signature"] == signature:
                self.answers = dict(found["answers"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none yet, or not ours: the search begins anew

    def get(self, question: str) -> Any:
        """The answer, or None."""
        return self.answers.get(question)

    def put(self, question: str, answer: Any) -> None:
        """Keep an answer."""
        self.answers[question] = answer
        text = json.dumps({"signature": self.signature, "answers": self.answers}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}", hint=_ELSEWHERE) from error


def signature(case: Case, decisions: Sequence[Taken], kind: str) -> str:
    """What answers are about: the graph, its decisions, the options."""
    text = "\n".join(
        [kind, str(case.options.as_dict()), case.gm.code, *(f"{t.kind} {t.name} {t.words}" for t in decisions)]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def write_folder(folder: Path, case: Case, trial: Trial, decisions: Sequence[Taken], found: dict[str, Any]) -> None:
    """Everything but progress.json."""
    shown = f'"""The smallest program that shows it."""\n\n{module_text(case.gm)}'
    texts = {
        "run.py": _RUN,
        "graph.py": shown,
        "graph.txt": print_graph(trial.compiled.graph),
        "options.json": json.dumps(case.options.as_dict() | {"fuel": trial.fuel}, indent=1),
        "found.json": json.dumps(found, indent=1),
        "decisions.txt": "".join(f"{k + 1:5d} {t.kind} {t.name}: {t.words}\n" for k, t in enumerate(decisions)),
    }
    alone = _one_file(case, trial)
    texts |= {"one_file.py": alone} if alone is not None else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        _write_inputs(folder, case.inputs)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}", hint=_ELSEWHERE) from error


def _one_file(case: Case, trial: Trial) -> str | None:
    """The compiled program as one file, with its values where they are few; None where it cannot be written down."""
    made = trial.executable
    args = (*case.inputs, *made.constants)
    subject = Subject(
        "the smallest program of a bisection", trial.compiled, made.script, args, made, case.gm, case.examples, case.rng
    )
    for values in (True, False):
        try:
            return graph_text(subject, values)
        except UserError:
            continue
    return None


# --------------------------------------------------------------------------------------------------------------- inputs
def _write_inputs(folder: Path, inputs: Sequence[Any]) -> None:
    facts: list[dict[str, Any]] = []
    with (folder / "inputs.bin").open("wb") as out:
        for x in inputs:
            if not isinstance(x, Tensor):
                facts.append({"value": plain_number(x, "an argument")})
                continue
            data = to_bytes(elements(x))
            facts.append(form_of(x) | {"at": out.tell(), "bytes": len(data)})
            out.write(data)
    (folder / "inputs.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_inputs(folder: Path) -> list[Any]:
    """The arguments that were saved."""
    data = (folder / "inputs.bin").read_bytes()
    out: list[Any] = []
    for facts in json.loads((folder / "inputs.json").read_text(encoding="utf-8")):
        if "value" in facts:
            out.append(facts["value"])
            continue
        part = data[facts["at"] : facts["at"] + facts["bytes"]]
        out.append(laid_out(from_bytes(part, dtype_of(facts)), facts))
    return out
