"""``python -m rlkernel.bench``: parity, memory and speed of every op on every backend, beside its peers.

Everything is found by name: the ops by ``rlkernel.dispatch.ops()``, their cases and peers in
``benchmarks/<op>.py``, the backends in ``rlkernel.dispatch.BACKENDS``.
"""
