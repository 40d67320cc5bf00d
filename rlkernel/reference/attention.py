"""What ``attention`` means, in plain PyTorch; in fp64 it is the truth for other backends."""

from rlkernel.reference.prefix_shared_attention import backward as backward
from rlkernel.reference.prefix_shared_attention import forward as forward
from rlkernel.reference.prefix_shared_attention import make_inputs as make_inputs
from rlkernel.reference.prefix_shared_attention import unsupported as unsupported
