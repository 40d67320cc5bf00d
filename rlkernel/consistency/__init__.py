"""How far a trainer's log-probabilities are from those of the engine that sampled, to the bit, and why.

``compare`` measures two sets of log-probabilities.
"""

from rlkernel.consistency.comparison import compare
from rlkernel.consistency.report import Report, WorstToken

__all__ = ["Report", "WorstToken", "compare"]
