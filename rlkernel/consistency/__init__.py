"""How far a trainer's log-probabilities are from those of the engine that sampled, to the bit, and why.

``compare`` measures two sets of log-probabilities, ``assert_invariant`` shows that a function gives a row the
same bits in any batch.
"""

from rlkernel.consistency.comparison import compare
from rlkernel.consistency.invariance import assert_invariant
from rlkernel.consistency.report import Report, WorstToken

__all__ = ["Report", "WorstToken", "assert_invariant", "compare"]
