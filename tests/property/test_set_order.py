"""Plans and kernels do not depend on the order of sets of nodes, which in another process is another one: nodes are compared by identity."""

from __future__ import annotations

from graph_make import graph_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from middle import middle

from plait.ir.parse import parse_graph
from plait.tile.text import print_program
from tests.campaigns.determinism import other_order


def texts(text: str, device: str) -> str:
    m = middle(parse_graph(text), device)
    return "\n".join([str(m.plan), *(print_program(m.lower(g).program) for g in m.plan.kernels())])


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(graph_texts(14), st.sampled_from(("cpu", "h200")))
def test_plans_do_not_depend_on_the_order_of_sets(text: str, device: str) -> None:
    found = set()
    for seed in range(6):
        with other_order(seed):
            found.add(texts(text, device))
    assert len(found) == 1, "\n\n".join(sorted(found))
