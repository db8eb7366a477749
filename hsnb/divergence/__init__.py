"""Two parties on the same token ids: do their numbers mean the same states, and if not, what does each one mean?"""

from hsnb.divergence.compare import Comparison, compare
from hsnb.divergence.conclusion import Conclusion, conclude
from hsnb.divergence.settings import Setting, against, frame
from hsnb.divergence.study import Study, begin, measure, own_settings, take, witness

__all__ = [
    "Comparison",
    "Conclusion",
    "Setting",
    "Study",
    "against",
    "begin",
    "compare",
    "conclude",
    "frame",
    "measure",
    "own_settings",
    "take",
    "witness",
]
