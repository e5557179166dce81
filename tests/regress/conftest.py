"""The backend under test, and a seed for every test's data."""

from __future__ import annotations

import harness
import pytest
import torch


@pytest.fixture(autouse=True)
def _set_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(harness.BACKEND, 0, request.config.getoption("--backend"))
    torch.manual_seed(1234)
