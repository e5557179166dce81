"""What is rewritten in a joint graph of forward and backward before it is split, by the options."""

from __future__ import annotations

import functools

from plait.frontend.capture import Rewrite
from plait.frontend.draws import draw_by_seed
from plait.frontend.picked import choose_picked
from plait.frontend.recompute import recompute_products
from plait.options import Options


def rewrites_for(options: Options) -> tuple[Rewrite, ...]:
    """Picks' gradients as choices. Draws by seed unless the numbers must be eager's; products are formed again where
    kernels may take them in, or memory is worth more than time, unless the bits must be."""
    drawn = (draw_by_seed,) if options.rng == "plait" else ()
    again = (
        (functools.partial(recompute_products, deep=options.memory is not None),)
        if options.numerics == "fused" and options.opens_products
        else ()
    )
    return (*drawn, choose_picked, *again)
