"""Shared set-up: GPU tests are skipped where there is no device; hypothesis is derandomised so that a run can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "plait", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("plait")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="plait", help="backend for tests/regress, to check the tests themselves")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What long campaigns came to, whichever process ran them."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    found = [text for r in reports for name, text in getattr(r, "user_properties", ()) if name == "totals"]
    if found:
        terminalreporter.section("totals")
        terminalreporter.write_line("\n".join(found))
