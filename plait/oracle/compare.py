"""The one comparison policy: when is a result right? There is no tolerance anywhere else in the project.

A float result is judged by its distance from the same program run in float64, next to the distance eager has:

    e_p = RMSE(got, fp64)    e_e = RMSE(eager, fp64)    u = unit round-off of the dtype x RMS(fp64)
    PASS   e_p <= max(1.5 e_e, 2 u), and each element's error <= max(4 x eager's largest error, 8 ulp)
    WARN   e_p <= m x max(e_e, noise), m = 2 … 10 (narrow types and small tensors get more, since one lucky element decides
           e_e there); where the noise was not measured, also what is within a share of RMS(fp64) fixed for each dtype
    FAIL   beyond, or when dtype, shape, strides, or the places of NaN and infinities differ from eager

*Noise* is how far the float64 result moves when the inputs move by half an ulp of their own type: no algorithm can be
expected to do better. Integers and bools are equal or wrong. The single excuse is a *step*: an element whose float64
pre-image lies within 4 ulp of a jump (floor, compare, cast to an integer) is "explained", and only if the caller says
where the jumps are. A finite value that float64 agrees with, where eager overflowed, is a WARN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.errors import Mismatch
from plait.oracle.reference import noise_of, perturbed, reference

__all__ = [
    "Step",
    "Verdict",
    "check",
    "check_call",
    "compare",
    "compare_many",
    "noise_of",
    "perturbed",
    "reference",
    "sharing",
    "why_shared_otherwise",
]

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
_RANK = {PASS: 0, WARN: 1, FAIL: 2}

# share of RMS(fp64) that is a WARN when the noise is unknown
_SHARE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Step:
    """Where an output jumps: `pre_image` (float64) is what was compared or rounded, `at` the place of the jump nearest to
    it; both broadcast to the output. `dtype` is the type the program held the pre-image in."""

    pre_image: Tensor
    at: Tensor
    dtype: torch.dtype

    def near(self) -> Tensor:
        """Elements within 4 ulp of the jump."""
        scale = torch.maximum(self.pre_image.abs(), self.at.abs())
        return (self.pre_image - self.at).abs() <= 4 * _ulp(scale.double(), self.dtype)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one output. `worst` is the index of the largest error (None when nothing differs)."""

    status: str
    message: str = ""
    name: str = ""
    e_plait: float = 0.0
    e_eager: float = 0.0
    max_error: float = 0.0
    worst: tuple[int, ...] | None = None
    explained: int = 0

    def __str__(self) -> str:
        figures = f" e_plait={self.e_plait:.3g} e_eager={self.e_eager:.3g} max={self.max_error:.3g} at {self.worst}"
        text = f"{self.status} {self.name}".rstrip() + (f": {self.message}" if self.message else "")
        return text + (figures if self.worst is not None else "")


def compare(
    got: Any,
    eager: Any,
    reference64: Any,
    *,
    strides: bool = False,
    steps: Sequence[Step] = (),
    noise: float | None = None,
    name: str = "",
) -> Verdict:
    """Judge one output. `strides=True` also wants eager's strides (of dimensions longer than 1)."""
    if not isinstance(got, Tensor) or not isinstance(eager, Tensor):
        return replace(_compare_plain(got, eager), name=name)
    form = _why_form_differs(got, eager, strides)
    if form is not None:
        return Verdict(FAIL, form, name)
    got, eager = got.detach().cpu(), eager.detach().cpu()
    if eager.is_complex():
        got, eager = torch.view_as_real(got.resolve_conj()), torch.view_as_real(eager.resolve_conj())
        if isinstance(reference64, Tensor) and reference64.is_complex():
            reference64 = torch.view_as_real(reference64.resolve_conj())
    excused = torch.zeros(eager.shape, dtype=torch.bool)
    for s in steps:
        excused = excused | s.near().cpu().expand(eager.shape)
    if not eager.dtype.is_floating_point:
        return replace(_compare_exact(got, eager, excused), name=name)
    if not isinstance(reference64, Tensor) or reference64.shape != eager.shape:
        return Verdict(FAIL, f"the float64 reference has another form: {reference64!r:.80}", name)
    return replace(_compare_floats(got, eager, reference64.detach().cpu().double(), excused, noise), name=name)


def _why_form_differs(got: Tensor, eager: Tensor, strides: bool) -> str | None:
    if got.dtype is not eager.dtype:
        return f"dtype {got.dtype}, eager has {eager.dtype}"
    if got.shape != eager.shape:
        return f"shape {tuple(got.shape)}, eager has {tuple(eager.shape)}"
    if got.device.type != eager.device.type:
        return f"device {got.device}, eager has {eager.device}"
    if strides and eager.numel():
        pairs = zip(got.stride(), eager.stride(), eager.shape, strict=True)
        if any(a != b for a, b, n in pairs if n > 1):
            return f"strides {got.stride()}, eager has {eager.stride()} (shape {tuple(eager.shape)})"
    return None


def _compare_plain(got: Any, eager: Any) -> Verdict:
    if isinstance(eager, float) and isinstance(got, float):
        x, y = torch.tensor(got, dtype=torch.float64), torch.tensor(eager, dtype=torch.float64)
        same = got == eager or (got != got and eager != eager)
        close = bool((x - y).abs() <= 8 * _ulp(y.abs(), torch.float64))
        return Verdict(PASS if same or close else FAIL, "" if same else f"value {got!r}, eager has {eager!r}")
    same = type(got) is type(eager) and bool(got == eager)
    return Verdict(PASS if same else FAIL, "" if same else f"value {got!r:.60}, eager has {eager!r:.60}")


def _compare_exact(got: Tensor, eager: Tensor, excused: Tensor) -> Verdict:
    wrong = got != eager
    explained = int((wrong & excused).sum())
    wrong = wrong & ~excused
    count = int(wrong.sum())
    if not count:
        return Verdict(PASS, explained=explained)
    worst = tuple(int(i) for i in wrong.nonzero()[0])
    text = f"{count} of {got.numel()} elements differ, first {got[worst].item()!r}, eager has {eager[worst].item()!r}"
    return Verdict(FAIL, text, max_error=float(count), worst=worst, explained=explained)


def _compare_floats(got: Tensor, eager: Tensor, exact: Tensor, excused: Tensor, noise: float | None) -> Verdict:
    dtype = eager.dtype
    p, e = got.double(), eager.double()
    # what this type holds finitely need not be finite in double and the other way round: then eager is the reference
    exact = torch.where(exact.isfinite() | ~e.isfinite(), exact, e)
    pattern = _pattern_verdict(p, e, exact, excused)
    if pattern is not None and pattern.status == FAIL:
        return pattern
    usable = p.isfinite() & e.isfinite() & exact.isfinite()
    off_p = torch.where(usable, (p - exact).abs(), 0.0)
    off_e = torch.where(usable, (e - exact).abs(), 0.0)
    explained = int((excused & (off_p > off_e) & (p != e)).sum())
    off_p = torch.where(excused, torch.minimum(off_p, off_e), off_p)
    count = max(int(usable.sum()), 1)
    rms = _root_mean(torch.where(usable, exact, 0.0), count)
    e_p, e_e = _root_mean(off_p, count), _root_mean(off_e, count)
    info = torch.finfo(dtype)
    u = max(info.eps / 2 * rms, info.tiny * info.eps)
    floor = 8 * _ulp(torch.where(usable, exact.abs(), 0.0).clamp(min=rms), dtype)
    beyond = off_p > floor.clamp(min=4 * float(off_e.max()) if off_e.numel() else 0.0)
    worst_flat = int(off_p.argmax()) if off_p.numel() else 0
    worst = _unravel(worst_flat, off_p.shape) if float(e_p) > 0 else None
    max_error = float(off_p.max()) if off_p.numel() else 0.0
    base = Verdict(PASS, "", "", e_p, e_e, max_error, worst, explained)
    if e_p <= max(1.5 * e_e, 2 * u) and not bool(beyond.any()):
        return replace(pattern, e_plait=e_p, e_eager=e_e) if pattern is not None else base
    # the bound without which an unlucky element of a small tensor would fail a correct program
    bound = max(_leniency(dtype, eager.numel()) * max(e_e, noise or 0.0), 2 * u)
    within = e_p <= bound and (max_error <= 10 * max(float(off_e.max()), noise or 0.0) or not bool(beyond.any()))
    share = _SHARE.get(dtype, 0.13)
    if within or (noise is None and max_error <= share * rms):
        return replace(base, status=WARN, message="error above eager's, within the wider bound")
    text = f"got {p.flatten()[worst_flat].item()!r}, eager {e.flatten()[worst_flat].item()!r}, "
    text += f"float64 {exact.flatten()[worst_flat].item()!r}; {int(beyond.sum())} of {p.numel()} elements beyond bound"
    return replace(base, status=FAIL, message=text)


def _pattern_verdict(p: Tensor, e: Tensor, exact: Tensor, excused: Tensor) -> Verdict | None:
    """FAIL or WARN where NaN and infinities are in other places than eager's; None when they agree."""
    same = (p.isnan() & e.isnan()) | (p == e) | (p.isfinite() & e.isfinite())
    differs = ~same & ~excused
    if not bool(differs.any()):
        return None
    better = differs & p.isfinite() & exact.isfinite() & ((p - exact).abs() <= 0.02 * exact.abs())
    if bool((differs == better).all()):
        return Verdict(WARN, f"{int(better.sum())} elements are finite, as in float64, where eager is not")
    worst = tuple(int(i) for i in (differs & ~better).nonzero()[0])
    text = f"{int(differs.sum())} NaN or infinities misplaced: got {p[worst].item()!r}, eager {e[worst].item()!r}"
    return Verdict(FAIL, text + f", float64 {exact[worst].item()!r}", worst=worst)


def _leniency(dtype: torch.dtype, numel: int) -> float:
    if numel <= 10:
        return 10.0
    if numel <= 500:
        return 8.0
    return 2.0 if dtype in (torch.float32, torch.float64) and numel > 1000 else 3.0


def _root_mean(x: Tensor, count: int) -> float:
    top = float(x.abs().max()) if x.numel() else 0.0
    # scaled, so that squares of the largest doubles do not overflow
    return top * float(((x / top) ** 2).sum() / count) ** 0.5 if top > 0 else 0.0


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The gap between neighbouring numbers of `dtype` at a (float64) magnitude."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.double().clamp(min=info.tiny))
    return torch.ldexp(torch.full(exponent.shape, info.eps, dtype=torch.float64), exponent - 1)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    out: list[int] = []
    for n in reversed(shape):
        flat, r = divmod(flat, n)
        out.append(r)
    return tuple(reversed(out))


# ------------------------------------------------------------------------------------------------ structures of outputs
def compare_many(
    got: Any,
    eager: Any,
    reference64: Any,
    *,
    strides: bool = False,
    noise: Sequence[float] | None = None,
    name: str = "",
) -> list[Verdict]:
    """Judge nested structures of outputs, leaf by leaf."""
    got_leaves, got_form = pytree.tree_flatten(got)
    leaves, form = pytree.tree_flatten(eager)
    exact_leaves, _ = pytree.tree_flatten(reference64)
    if got_form != form:
        return [Verdict(FAIL, f"structure {got_form}, eager has {form}"[:400], name)]
    if len(exact_leaves) != len(leaves):
        return [Verdict(FAIL, f"the float64 run has {len(exact_leaves)} results, eager {len(leaves)}", name)]
    return [
        compare(g, e, x, strides=strides, noise=noise[k] if noise is not None else None, name=f"{name or 'out'}{k}")
        for k, (g, e, x) in enumerate(zip(got_leaves, leaves, exact_leaves, strict=True))
    ]


def worst_of(verdicts: Sequence[Verdict]) -> str:
    """The gravest status of several."""
    return max((v.status for v in verdicts), key=_RANK.__getitem__, default=PASS)


def check(
    got: Any,
    eager: Any,
    reference64: Any,
    *,
    strides: bool = False,
    noise: Sequence[float] | None = None,
    strict: bool = False,
    name: str = "",
) -> list[Verdict]:
    """Like `compare_many`, but raises errors.Mismatch for a FAIL (`strict`: for a WARN too)."""
    return raise_if_wrong(compare_many(got, eager, reference64, strides=strides, noise=noise, name=name), strict)


def raise_if_wrong(verdicts: list[Verdict], strict: bool = False) -> list[Verdict]:
    """Raise errors.Mismatch naming what failed, else hand the verdicts back."""
    bad = [v for v in verdicts if v.status == FAIL or (strict and v.status == WARN)]
    if bad:
        raise Mismatch("\n".join(str(v) for v in bad))
    return verdicts


def check_call(
    compiled: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    strides: bool = True,
    strict: bool = False,
) -> list[Verdict]:
    """Run `compiled`, eager `fn` and the float64 reference on copies of `args`; judge the results, the arguments after
    the call, and which results share memory with which arguments. Raises errors.Mismatch."""
    eager_args, got_args = _copies(args), _copies(args)
    eager = fn(*eager_args)
    got = compiled(*got_args)
    exact, exact_args = reference(fn, args, with_args=True)
    noise = noise_of(fn, args, exact)
    verdicts = compare_many(got, eager, exact, strides=strides, noise=noise)
    verdicts += compare_many(got_args, eager_args, exact_args, strides=strides, name="arg")
    other = why_shared_otherwise(sharing(got, got_args), sharing(eager, eager_args))
    if other is not None:
        verdicts.append(Verdict(FAIL, other, "aliasing"))
    return raise_if_wrong(verdicts, strict)


def _copies(args: Sequence[Any]) -> list[Any]:
    return list(pytree.tree_map(lambda x: copy_of(x) if isinstance(x, Tensor) else x, list(args)))


def copy_of(x: Tensor) -> Tensor:
    """A copy with the same strides, storage offset and requires_grad."""
    span = (
        x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    )
    with torch.no_grad():
        if x.layout is not torch.strided:
            out = x.detach().clone()
        else:
            flat = x.detach().as_strided((span,), (1,), 0).clone()
            out = flat.as_strided(x.shape, x.stride(), x.storage_offset() if x.numel() else 0)
    return out.requires_grad_(x.requires_grad)


Shares = tuple[tuple[tuple[int, ...], int], ...]


def sharing(outputs: Any, args: Any) -> Shares:
    """For each output: the positions of the arguments whose memory it shares, and that of the first output with this memory
    (its own, where there is none before it)."""

    def place(t: Any) -> int:
        plain = isinstance(t, Tensor) and t.layout is torch.strided and t.numel() > 0
        return t.untyped_storage().data_ptr() if plain else 0

    places = [place(a) for a in pytree.tree_leaves(args)]
    outs = [place(o) for o in pytree.tree_leaves(outputs)]
    return tuple(
        (tuple(k for k, p in enumerate(places) if p and p == o), outs.index(o) if o else n) for n, o in enumerate(outs)
    )


def why_shared_otherwise(ours: Shares, theirs: Shares) -> str | None:
    """What is said of results that share other memory than eager's do."""
    mine, its = ([a for a, _ in s] for s in (ours, theirs))
    if mine != its:
        return f"memory shared with arguments: {mine}, in eager {its}"
    together, apart = ([first for _, first in s] for s in (ours, theirs))
    return None if together == apart else f"results in one memory: {together}, in eager {apart}"
