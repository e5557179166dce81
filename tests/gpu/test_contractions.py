"""Attention, losses and products on a card, in Triton and in Gluon, forward and backward, judged by float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.oracle.compare import check
from tests import attention_rows, attention_variants, loss_variants
from tests.attention_variants import widened

pytestmark = pytest.mark.gpu

# odd sizes: every loop has a rest; several tiles each way
SIZES = attention_variants.Sizes(b=2, h=4, m=333, n=477, d=64)
SQUARE = attention_variants.Sizes(b=2, h=4, m=300, n=300, d=64)
RANDOM = ("dropped",)
SAME_LENGTHS = ("sliced_projection", "documents", "bias_of_windows", "rotated", "learned_position_bias")


def on_card(args: Any) -> list[Any]:
    return [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]


def judged(fn: Any, args: list[torch.Tensor], **options: Any) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True, **options})(*args)
        check([got], [fn(*args)], [fn(*widened(args))])


@pytest.mark.parametrize("gluon", ["off", "all"])
@pytest.mark.parametrize("name", [n for n in attention_variants.VARIANTS if n not in RANDOM])
def test_attention(name: str, gluon: str) -> None:
    fn, _ = attention_variants.VARIANTS[name]
    torch.manual_seed(0)
    sizes = SQUARE if name in SAME_LENGTHS else SIZES
    judged(fn, on_card(attention_variants.arguments(name, sizes)), gluon=gluon)


@pytest.mark.parametrize("gluon", ["off", "all"])
@pytest.mark.parametrize("name", list(attention_rows.ROWS))
def test_attention_under_numbers_of_the_rows(name: str, gluon: str) -> None:
    fn, _ = attention_rows.ROWS[name]
    torch.manual_seed(0)
    judged(fn, on_card(attention_rows.arguments(name, SIZES)), gluon=gluon)


@pytest.mark.parametrize("gluon", ["off", "all"])
@pytest.mark.parametrize("name", list(attention_rows.RANGES))
def test_attention_under_ranges(name: str, gluon: str) -> None:
    fn, _ = attention_rows.RANGES[name]
    torch.manual_seed(0)
    judged(fn, on_card(attention_rows.arguments(name, attention_variants.Sizes(h=2, m=333, n=700, d=64))), gluon=gluon)


@pytest.mark.parametrize("gluon", ["off", "all"])
def test_caps_far_beyond_which_some_scores_lie(gluon: str) -> None:
    torch.manual_seed(0)
    judged(attention_rows.capped_causal, on_card(attention_rows.saturated(SQUARE)), gluon=gluon)


@pytest.mark.parametrize("gluon", ["off", "all"])
@pytest.mark.parametrize("name", ["window", "causal_by_length"])
def test_slower_warps_see_what_they_wait_for(name: str, gluon: str) -> None:
    """Many blocks of one tile and more, many times: warps part at every chance."""
    fn, _ = {**attention_variants.VARIANTS, **attention_rows.ROWS}[name]
    torch.manual_seed(0)
    made = attention_rows if name in attention_rows.ROWS else attention_variants
    args = on_card(made.arguments(name, attention_variants.Sizes(b=4, h=32, m=1100, n=1100, d=64)))
    judged(fn, args, gluon=gluon)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True, "gluon": gluon})
    with torch.no_grad():
        first = compiled(*args)
        for _ in range(200):
            assert torch.equal(torch.nan_to_num(compiled(*args)), torch.nan_to_num(first))


@pytest.mark.parametrize("gluon", ["off", "measured"])
@pytest.mark.parametrize("name", ["full", "causal", "softcap", "window", "grouped_query", "sigmoid", "padding"])
def test_attention_training(name: str, gluon: str) -> None:
    fn, _ = attention_variants.VARIANTS[name]
    torch.manual_seed(0)
    args = [a.requires_grad_(a.is_floating_point()) for a in on_card(attention_variants.arguments(name, SQUARE))]
    grad = torch.randn_like(fn(*args))
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True, "gluon": gluon})
    step = attention_variants.training_step
    check(step(compiled, args, grad), step(fn, args, grad), step(fn, widened(args), grad.double()))


@pytest.mark.parametrize(
    "name", ["plain", "ignored", "each_row", "biased", "capped", "smooth", "with_z_loss", "soft_targets"]
)
def test_losses(name: str) -> None:
    x, w, *others = on_card(loss_variants.arguments(name, loss_variants.Sizes(rows=150, depth=64, words=1300)))
    fn = getattr(loss_variants, name)

    def step(f: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [a.detach().to(dtype).requires_grad_() for a in (x, w)]
        rest = [o.to(dtype) if o.is_floating_point() else o for o in others]
        f(*given, *rest).sum().backward()
        return [g.grad for g in given if g.grad is not None]

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True})
    check(step(compiled, x.dtype), step(fn, x.dtype), step(fn, torch.float64))


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    """A backward may write a gradient over what the forward saved only where nobody can ask again."""
    torch.manual_seed(0)
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, 4096, (256,), device="cuda")
    torch._dynamo.reset()
    fn = torch.compile(lambda x, w: torch.nn.functional.cross_entropy((x @ w.t()).float(), y), backend="plait")
    loss = fn(x, w)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["tanh", "expm1", "log1p", "tan", "asin", "atan", "sinh", "asinh", "atanh", "sin", "erf"]
)
def test_subnormal_numbers_pass_through_what_is_linear_near_zero(name: str) -> None:
    x = torch.linspace(-2e-38, 2e-38, 4099, device="cuda")
    judged(getattr(torch, name), [x])
