"""How far a trainer's log-probabilities are from those of the engine that sampled, to the bit, and why.

``compare`` measures two sets of log-probabilities, ``trace`` finds the module at which two runs of a model
part, ``assert_invariant`` shows that a function gives a row the same bits in any batch.
"""

from rlkernel.consistency.comparison import compare
from rlkernel.consistency.findings import Difference, Trace
from rlkernel.consistency.invariance import assert_invariant
from rlkernel.consistency.report import Report, WorstToken
from rlkernel.consistency.tracing import packed_rows, padded_rows, trace

__all__ = [
    "Difference",
    "Report",
    "Trace",
    "WorstToken",
    "assert_invariant",
    "compare",
    "packed_rows",
    "padded_rows",
    "trace",
]
