"""GPUs as their makers state them, and what is known to be reached of it: what ``predict`` reckons with."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """Rates are of one multiprocessor in one clock, unless they are of the whole GPU in a second."""

    name: str
    archs: tuple[str, ...]  # what code for it is compiled for: by nvcc or clang, and by Triton
    matches: str  # in the name that a driver gives it
    multiprocessors: int
    clock: float  # Hz, when it is busy
    bandwidth: float  # bytes a second
    peak: float  # operations a second of its tensor cores, of bf16 and dense
    cache: int  # bytes of the L2
    cache_bandwidth: float  # bytes a second that it gives, as those have measured it who have one
    # Shares that a long read, a copy and the vendor's GEMM of thousands reach; of products by mma.sync too.
    reads: float
    copies: float
    gemm: float
    mma_sync: float
    lanes: int  # of a warp
    issue: float  # warps' instructions of any kind; 0: kinds are issued beside each other
    fma: int  # lanes
    alu: int
    special: int
    fp64: int
    lsu: int = 32
    warps: int = 64  # that a multiprocessor holds at most
    registers: int = 65536
    granule: int = 256  # registers that a warp is given at a time
    shared: int = 228 * 1024  # bytes of a multiprocessor
    launch: float = 2e-6  # seconds from the end of a kernel to the start of the next of a stream, and a ramp
    latency: float = 6e-7  # seconds until a load has come
    # Seconds until what the L2 has is read, code that is new has come too, and all threads of a block met;
    # clocks from an instruction of a warp to its next.  Both as an H200 took 40, 118 and 434 us to filter 8,
    # 32 and 256 rows of logits, by code that took 2240 instructions where FILTER_ISSUED is of today's.
    step: float = 9.2e-7
    pace: float = 4.6
    # Seconds more of a cluster: two ways between multiprocessors of some 180 clocks (arXiv 2402.13499).
    meeting: float = 2e-7
    cluster: int = 1  # blocks that share their memories at most, of those that every such GPU runs

    @property
    def label(self) -> str:
        return self.name.upper()

    def clocks(self, per_second: float) -> float:
        """A rate of the whole GPU, of one multiprocessor in a clock."""
        return per_second / self.multiprocessors / self.clock

    def resident(self, registers: int) -> int:
        """Warps of so many registers a lane that a multiprocessor holds."""
        given = -(-max(registers, 1) * self.lanes // self.granule) * self.granule
        return min(self.warps, self.registers // given // 4 * 4)

    def blocks(self, warps: int, registers: int, shared: int) -> int:
        """Blocks of so many warps and bytes of shared memory that a multiprocessor holds."""
        return max(1, min(self.resident(registers) // max(warps, 1), self.shared // max(shared, 1)))


_NVIDIA: dict[str, Any] = {"lanes": 32, "issue": 4.0, "alu": 64, "special": 16}
# The peak of a dense product from the tables of the makers; 4 KiB of bf16 operations a clock on sm_90.
_HOPPER = Device(
    "h100", ("sm_90a", "sm_90"), "H100", 132, 1.83e9, 3.35e12, 989e12, 50 * 2**20, 7.0e12,
    reads=0.90, copies=0.85, gemm=0.735, mma_sync=0.62, fma=128, fp64=64, cluster=8, **_NVIDIA,
)  # fmt: skip
DEVICES = {
    device.name: device
    for device in (
        Device(
            "a100", ("sm_80",), "A100", 108, 1.41e9, 2.04e12, 312e12, 40 * 2**20, 5.0e12,
            reads=0.90, copies=0.85, gemm=0.80, mma_sync=1.0, fma=64, fp64=32, shared=164 * 1024,
            **_NVIDIA,
        ),
        _HOPPER,
        Device(**{**vars(_HOPPER), "name": "h200", "matches": "H200", "bandwidth": 4.8e12, "gemm": 0.758}),
        Device(
            "b200", ("sm_100",), "B200", 148, 1.85e9, 8.0e12, 2250e12, 126 * 2**20, 14e12,
            reads=0.90, copies=0.85, gemm=0.75, mma_sync=0.35, fma=128, fp64=64, cluster=8, **_NVIDIA,
        ),
        Device(
            "mi300x", ("gfx942",), "MI300X", 304, 2.1e9, 5.3e12, 1307e12, 256 * 2**20, 14e12,
            reads=0.81, copies=0.77, gemm=0.55, mma_sync=1.0, lanes=64, issue=0.0, fma=64, alu=64, special=16,
            fp64=64, warps=32, registers=131072, granule=512, launch=5e-6, shared=64 * 1024,
        ),
        Device(
            "mi250x", ("gfx90a",), "MI250X", 110, 1.7e9, 1.6e12, 191e12, 8 * 2**20, 3.5e12,
            reads=0.81, copies=0.77, gemm=0.70, mma_sync=1.0, lanes=64, issue=0.0, fma=64, alu=64, special=16,
            fp64=64, warps=32, registers=131072, granule=512, launch=5e-6, shared=64 * 1024,
        ),
    )
}  # fmt: skip


def of_arch(arch: str) -> Device:
    """The device that a bound of code for ``arch`` is stated for: the first of those that run it."""
    return next(device for device in DEVICES.values() if arch in device.archs)
