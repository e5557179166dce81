"""The operator database through the whole compiler: a sample of it in every run, all of it in `make test-all`.

The totals stand at the end of pytest's output (`tests/conftest.py` prints the property "totals").
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.runtime.build import workers
from tests.campaigns.opinfo_build import Totals, campaign

MODES = pytest.mark.parametrize(("dtype", "train"), [("float32", False), ("float32", True), ("int64", False)])
LIMIT = 25  # samples of an operator
LEAST_NATIVE = 350  # operators that run through a kernel in every sample, in float32


def _clean(totals: Totals) -> None:
    assert not totals.complaints(), "\n".join([*totals.complaints(), totals.text()])
    assert not totals.count("wrong") and not totals.count("broke")


@MODES
def test_a_sample_of_the_operators(dtype: str, train: bool) -> None:
    totals = campaign(dtype, train=train, every=50, limit=2)
    _clean(totals)
    assert totals.count("native") >= 3


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@MODES
def test_every_operator(dtype: str, train: bool, record_property: Callable[[str, object], None]) -> None:
    totals = campaign(dtype, train=train, limit=LIMIT, jobs=max(1, workers() // 2))
    record_property("totals", totals.text())
    _clean(totals)
    if dtype == "float32" and not train:
        assert totals.count("native") >= LEAST_NATIVE
