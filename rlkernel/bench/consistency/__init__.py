"""``python -m rlkernel.bench consistency``: what batch-invariant bits cost, and what they give.

``operators`` looks at one operation after the other, ``models`` at whole models of transformers, ``engines``
at vLLM beside a trainer, and ``tables`` writes what ``command`` found.
"""
