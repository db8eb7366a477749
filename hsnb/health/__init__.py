"""Is a finished data set what a trainer should be given? `examine(DIR)` looks at its states, masks, lengths and text."""

from __future__ import annotations

from hsnb.health.examine import examine
from hsnb.health.result import Finding, Health

__all__ = ["Finding", "Health", "examine"]
