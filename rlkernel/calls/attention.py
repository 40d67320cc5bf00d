"""What a backend is asked for ``attention``, and what it answers: the records of ``prefix_shared_attention``.

The op differs in its bits alone: a row has those of ``paged_prefix_attention`` at its position.
"""

from rlkernel.calls.prefix_shared_attention import AttentionCall as AttentionCall
from rlkernel.calls.prefix_shared_attention import AttentionGrads as AttentionGrads
from rlkernel.calls.prefix_shared_attention import AttentionResults as AttentionResults
from rlkernel.calls.prefix_shared_attention import AttentionRule as AttentionRule
from rlkernel.calls.prefix_shared_attention import OutGrads as OutGrads
