"""How many bytes states take, and how bytes are written down: GB and GiB side by side, because they differ by 7 % and TB by 10 %."""

from __future__ import annotations

SPOOL_FLOOR, OUTPUT_FLOOR, FLOOR_SHARE = 1 << 30, 10 << 30, 0.05  # bytes, bytes, part of the file system

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_per_token(columns: int, hidden_size: int, itemsize: int = 2) -> int:
    """Return columns x H x itemsize: what one token's states take. `columns` counts the boundaries and the final state."""
    return columns * hidden_size * itemsize


def floor(given: int | None, most: int, total: int) -> int:
    """Return the bytes that are to stay free of a file system of `total` bytes: `given`, or 5 % of it and at most `most`."""
    return given if given is not None else min(most, int(FLOOR_SHARE * total))


def decimal(size: float) -> str:
    """Return bytes in powers of 1000, three digits: 992 GB, 5.03 TB."""
    step, unit = _scaled(size, 1000, _DECIMAL)
    return f"{step:.{0 if unit == 'B' or step >= 99.95 else 1 if step >= 9.995 else 2}f} {unit}"


def binary(size: float) -> str:
    """Return bytes in powers of 1024: 923.9 GiB, 4.58 TiB."""
    step, unit = _scaled(size, 1024, _BINARY)
    return f"{step:.{0 if unit == 'B' else 2 if unit in ('TiB', 'PiB') else 1}f} {unit}"


def both(size: float) -> str:
    """Return bytes both ways: 992 GB (923.9 GiB)."""
    return f"{decimal(size)} ({binary(size)})"


def _scaled(size: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    power = 0
    while size >= base * 0.9995 and power < len(units) - 1:  # 999.7 MB would be rounded to "1000 MB"
        size /= base
        power += 1
    return size, units[power]
