"""One reciprocal for four quotients: exact enough, and no value spoils its neighbours."""

from __future__ import annotations

import numpy as np
import ptx
import pytest

from plait.emit.triton_reciprocals import POINTS, assembly


def reciprocals(x: np.ndarray, points: int = POINTS) -> np.ndarray:
    return ptx.run(*assembly(points), x.astype(np.float32), points)


@pytest.mark.parametrize("points", [4, 8, 16])
@pytest.mark.parametrize("most", [2.0, 1e3, 1e9, 1e20, 3e38])
def test_as_exact_as_a_few_roundings(points: int, most: float) -> None:
    x = -np.exp(np.random.default_rng(0).uniform(0, np.log(most), 8 * points)).astype(np.float32)
    wanted = 1 / x.astype(np.float64)
    # below the normal numbers the hardware flushes to zero
    assert np.all(np.abs(reciprocals(x, points) - wanted) <= 4 * 2**-24 * np.abs(wanted) + 1.2e-38)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, -3e38, -(2.0**126)])
@pytest.mark.parametrize("place", range(5))
def test_neighbours_are_not_spoilt(bad: float, place: int) -> None:
    x = -np.linspace(1, 2, 2 * POINTS).astype(np.float32)
    x[place] = bad
    got, alone = reciprocals(x), 1 / x.astype(np.float64)
    others = np.arange(len(x)) != place
    assert np.all(np.abs(got - alone)[others] <= 4 * 2**-24)
    assert np.isnan(got[place]) if np.isnan(bad) else abs(got[place]) <= 1.2e-38


def test_a_thread_with_fewer_values_than_a_block_takes() -> None:
    x = -np.linspace(1, 9, POINTS + 3).astype(np.float32)
    assert np.all(np.abs(reciprocals(x) - 1 / x.astype(np.float64)) <= 4 * 2**-24)
