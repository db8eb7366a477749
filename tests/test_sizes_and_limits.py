"""The field's figures to the digit, and the longest prompt that a server takes."""

from __future__ import annotations

import pytest

from hsnb.limits import Limits, limits_of, server_limits
from hsnb.params import Deployment
from hsnb.sizes import OUTPUT_FLOOR, binary, both, bytes_per_token, decimal, floor
from tests.test_plan import KIMI, tiny

KIMI_TOKEN = bytes_per_token(4, 7168)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (KIMI_TOKEN, "57.3 kB (56.0 KiB)"),
        (10 * 7168 * 2, "143 kB (140.0 KiB)"),  # 10 tokens of one vector
        (17_300_000 * KIMI_TOKEN, "992 GB (923.9 GiB)"),
        (87_800_000 * KIMI_TOKEN, "5.03 TB (4.58 TiB)"),
        (87_800_000 * bytes_per_token(3, 7168), "3.78 TB (3.43 TiB)"),
        (15_000 * 2_000 * bytes_per_token(3, 7168), "1.29 TB (1.17 TiB)"),
        (131_072 * KIMI_TOKEN, "7.52 GB (7.0 GiB)"),
    ],
)
def test_sizes_of_the_field_come_out_to_the_digit(size, words):
    assert both(size) == words


def test_the_bytes_behind_them():
    assert KIMI_TOKEN == 57_344 and 10 * 7168 * 2 == 143_360
    assert 17_300_000 * KIMI_TOKEN == 992_051_200_000
    # The 3.5 TB that were once expected for 87.8 M tokens fit neither count, nor the 460 GB that of 15,000 x 2,000 x 3 vectors.
    assert not any(3.45e12 < 87_800_000 * bytes_per_token(columns, 7168) < 3.55e12 for columns in range(1, 6))
    assert 15_000 * 2_000 * bytes_per_token(3, 7168) == 1_290_240_000_000


@pytest.mark.parametrize(
    ("size", "ten", "two"),
    [
        (0, "0 B", "0 B"), (999, "999 B", "999 B"), (999_700, "1.00 MB", "976.3 KiB"), (99_960_000, "100 MB", "95.3 MiB"),
        (1 << 30, "1.07 GB", "1.0 GiB"), ((1 << 30) - 1, "1.07 GB", "1.0 GiB"), (5e15, "5.00 PB", "4.44 PiB"), (5e18, "5000 PB", "4440.89 PiB"),
    ],
)  # fmt: skip
def test_units_change_where_the_digits_do(size, ten, two):
    assert (decimal(size), binary(size)) == (ten, two)


@pytest.mark.parametrize(("given", "total", "stays"), [(None, 100, 5), (None, 1 << 50, 10 << 30), (7, 1 << 50, 7), (0, 100, 0)])
def test_a_floor_stays_free(given, total, stays):
    assert floor(given, OUTPUT_FLOOR, total) == stays


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        (Limits(4096, 8192), 4089),
        (Limits(8192, 4096), 4089),
        (Limits(4096), 4089),
        (Limits(None, None), None),
        (Limits(4096, 8192, max_req_input_len=101), 100),
        (Limits(4096, 4096, page_size=64), 3968),  # a page of its own must be left, or it waits for ever
        (Limits(4096, 8192, page_size=64), 4089),
        (Limits(4, 4), 0),
    ],
)
def test_the_longest_prompt(limits, longest):
    assert limits.longest == longest


def test_limits_come_from_the_params_the_config_and_the_server():
    assert limits_of(tiny()) == Limits(4096, 8192)  # what hsnb sets on a CPU
    assert limits_of(tiny(context_length=1000, max_total_tokens=500)) == Limits(1000, 500)
    assert limits_of(tiny(device="cuda", flags={"page_size": 64})) == Limits(4096, None, 64)
    assert limits_of(Deployment.load(KIMI)).longest == 262_144 - 7
    info = {"context_length": 4096, "max_total_num_tokens": 8192, "max_req_input_len": 4090, "page_size": 1}
    assert server_limits(info) == Limits(4096, 8192, 1, 4090) and server_limits(info).longest == 4089
    assert server_limits({}).longest is None
