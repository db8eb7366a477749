"""The bars of the probe, in one place: what is equal, what is noise, and what cannot be told apart."""

from __future__ import annotations

import math

import torch

from hsnb.checks import Check

FP32_BAR = 1e-5  # relative L2, median over tokens; SGLang against transformers gives 2e-6 at the worst row
LOGPROB_BARS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.5), "float16": (0.02, 0.2)}  # nats: mean, largest
"""float32 on SmolLM2 gives 2e-5 at most, B_{L-1} in place of B_L 3.2 and 15.6, yet its best token errs by 9e-4 only: hence
both bars. In half precision the server's own head rounds as well."""
TEACHER_BARS = {"float32": 0.99, "bfloat16": 0.9, "float16": 0.95}  # share of greedy tokens; in half precision ties break otherwise
ROUNDING = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # a floor for the noise, relative


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |a - b| / |b| of each token [S] in float64, for [S, H]."""
    a, b = a.double(), b.double()
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)


def middle(values: torch.Tensor) -> float:
    """Return the median over tokens without the first: its norm can be 174 times the others' and hides everything."""
    return (values[1:] if len(values) > 1 else values).median().item()


def compare(name: str, error: float, distance: float, noise: float, dtype: str, *, says: str = "", blind_to: str = "") -> Check:
    """Judge `error` against the noise and against the `distance` to the nearest wrong answer (all relative L2, medians).

    float32: at most 1e-5 passes. Otherwise the unit is this server's own noise (the same prompt in different batches): PASS
    under three times the noise and half the distance, NOT PROVED when the noise exceeds a third of the distance, else FAIL.
    """
    noise = max(noise, ROUNDING[dtype])
    if dtype == "float32":
        bar, source, blurred = FP32_BAR, "float32: SGLang against transformers, measured 2e-6", False
    else:
        bar, source = min(3 * noise, distance / 2), "three times this server's noise and half the distance to the nearest neighbour"
        blurred = noise > distance / 3
    ok = error <= bar and not blurred  # NaN is not below anything
    value = f"{error:.2g}{says}; nearest wrong one {distance:.2g}" if math.isfinite(distance) else f"{error:.2g}{says}"
    return Check(name, value, f"at most {bar:.2g} relative L2", ok, blind_to, source, not_proved=not ok and blurred)
