"""The bars of the probe: float32, and otherwise this server's own noise; three verdicts."""

import math

import pytest

from hsnb.probe.bars import compare
from hsnb.probe.identity import Fit


@pytest.mark.parametrize(
    ("error", "distance", "noise", "dtype", "verdict"),
    [
        (9e-6, 0.3, 0.0, "float32", "pass"),
        (2e-5, 0.3, 0.0, "float32", "FAIL"),
        (math.nan, 0.3, 0.0, "float32", "FAIL"),
        (0.02, 0.3, 0.01, "bfloat16", "pass"),  # under three times the noise
        (0.04, 0.3, 0.01, "bfloat16", "FAIL"),  # over it, and the noise is small
        (0.3, 0.3, 0.01, "bfloat16", "FAIL"),  # one layer off
        (0.01, 0.3, 0.0, "bfloat16", "pass"),  # a noise of zero is floored by the dtype's own rounding
        (0.02, 0.3, 0.0, "bfloat16", "FAIL"),
        (0.02, 0.05, 0.03, "bfloat16", "NOT PROVED"),  # the noise exceeds a third of the distance: right or wrong, nobody can say
        (0.5, 0.05, 0.03, "bfloat16", "NOT PROVED"),
        (0.011, 0.02, 0.005, "bfloat16", "FAIL"),  # over half the distance
    ],
)
def test_three_verdicts(error, distance, noise, dtype, verdict):
    assert compare("x", error, distance, noise, dtype).result == verdict


def test_a_column_that_fits_its_neighbour_is_as_far_from_its_label():
    right, late = Fit(own=2e-3, nearest=0.25, best=15, best_error=2e-3), Fit(own=0.25, nearest=2e-3, best=16, best_error=2e-3)
    assert right.distance == late.distance == 0.25
    assert compare("x", right.own, right.distance, 0.01, "bfloat16").result == "pass"
    assert compare("x", late.own, late.distance, 0.01, "bfloat16").result == "FAIL"
