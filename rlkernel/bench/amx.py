"""Keep oneDNN off a matrix unit that is advertised and does not work.

Some virtual machines show AMX in the processor's flags and kill the process at its first instruction, so that
any bf16 product of torch dies.  rlkernel's own operators never take that path; its tests, benchmarks and
peers do.
"""

import os
import subprocess
import sys
from pathlib import Path

_PROBE = (
    "import torch; torch.ones(64, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)"
)


def avoid_broken_amx() -> bool:
    """Limit oneDNN to AVX-512 when a bf16 product kills a probe process; returns whether it did.

    Must run before this process's first oneDNN call, which reads the setting.
    """
    flags = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not flags.exists() or "amx_bf16" not in flags.read_text():
        return False
    if subprocess.run([sys.executable, "-c", _PROBE], capture_output=True).returncode == 0:
        return False
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return True
