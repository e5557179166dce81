"""Tests here run the torch-free core, and prove that it is: importing torch or triton while one of them runs fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import without_torch


@pytest.fixture(autouse=True)
def no_torch() -> Iterator[None]:
    """Hide torch and triton, whether another test imported them or not."""
    with without_torch.no_torch():
        yield
