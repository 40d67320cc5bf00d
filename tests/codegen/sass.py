"""What NVIDIA's machine code says, as nvdisasm prints it."""

import dataclasses
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping

from counts import Kind, Machine
from flow import Code, Instruction

_LINE = re.compile(
    r"^ +/\*(?P<address>[0-9a-f]{4,})\*/ +(?:@(?P<guard>!?U?P[0-9T]+) +)?(?P<name>[A-Z][\w.]*)(?P<rest>[^;]*)"
)
_TARGET = re.compile(r"\b0x0*([0-9a-f]+)")
_SECTION = ".text."
_WIDE = 16  # bytes of an instruction
_GUARD = re.compile(r"!?U?P[0-6]\b")
_CONSTANT = re.compile(r" UR(\d+), 0x([0-9a-f]+)")
_DESCRIBED = re.compile(r"idesc\[UR(\d+)\]")
# as nvdisasm calls the architectures; code for sm_90 is also code for sm_90a
_ARCHS = {"sm_80": "SM80", "sm_90": "SM90a", "sm_90a": "SM90a", "sm_100": "SM100a"}
# Arithmetic units: names without what follows the first dot.
FMA = {"FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2", "FFMA2", "FADD2", "FMUL2", "FSWZADD"}
SPECIAL = {"MUFU", "F2F", "F2I", "I2F", "FRND", "FLO", "POPC", "BREV"}
FP64 = {"DADD", "DMUL", "DFMA", "DSETP"}
ALU = {
    *("ISETP", "IADD3", "LOP3", "SHF", "LEA", "SEL", "FSETP", "FSEL", "FMNMX", "FMNMX3", "PRMT", "VIADD"),
    *("IABS", "PLOP3", "P2R", "R2P", "MOV", "VIMNMX", "VIMNMX3", "VIADDMNMX", "HMNMX2", "VHMNMX", "HSETP2"),
    *("F2FP", "I2FP", "IADD", "SGXT", "BMSK", "FCHK", "HSET2", "VABSDIFF", "LOP", "SHL", "SHR", "IMNMX"),
}
_TENSOR = re.compile(r"(?:HMMA|HGMMA|IMMA|IGMMA|QMMA|QGMMA|DMMA|OMMA|UTC\w*MMA)$")
# Copies that pass no registers: cp.async, tiles of tensors and bulks by the copy unit.
_COPY = re.compile(r"(?:LDGSTS|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED)$")
_SHAPE = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32), "884": (8, 8, 4)}


def listings(cubins: Iterable[bytes], arch: str, nvdisasm: str) -> list[dict[str, str]]:
    """Of each cubin the listings of its kernels, by symbol.

    All code goes through one run of the disassembler, which takes longer to start than to print a kernel.
    """
    code = [_sections(cubin) for cubin in cubins]
    if not any(code):  # a source without a kernel, which the disassembler refuses
        return [{} for _ in code]
    with tempfile.NamedTemporaryFile() as file:
        for kernels in code:
            for text in kernels.values():
                file.write(text)
        file.flush()
        command = [nvdisasm, "--binary", _ARCHS[arch], file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = iter([line for line in printed.splitlines() if line.startswith("  ")])
    return [
        {name: "\n".join(next(lines) for _ in range(len(text) // _WIDE)) for name, text in kernels.items()}
        for kernels in code
    ]


def _sections(cubin: bytes) -> Mapping[str, bytes]:
    """The code of an ELF file, by the symbol of its kernel."""
    table, (size, count, names) = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<3H", cubin, 58)
    # name, type, flags, address, offset, size, ...
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    found = {}
    for header in headers:
        start = headers[names][4] + header[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(_SECTION):
            found[name.removeprefix(_SECTION)] = cubin[header[4] : header[4] + header[5]]
    return found


def code(listing: str) -> Code:
    """The instructions of a kernel."""
    instructions: list[Instruction] = []
    places: dict[str, int] = {}
    constants: dict[str, int] = {}
    called, switches = set(), []
    for line in listing.splitlines():
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"nvdisasm must print an instruction a line, got {line!r}")
        name, rest = match["name"], match["rest"]
        if name == "UMOV" and (constant := _CONSTANT.match(rest)):
            constants[constant[1]] = int(constant[2], 16)
        elif name.startswith("UTC") and (described := _DESCRIBED.search(rest)):
            name = f"{name}.{_described_tile(constants.get(described[1], 0))}"
        elif name.startswith("CALL"):
            called.update(_TARGET.findall(rest))
        elif name.startswith("BRX"):
            switches.append(len(instructions))
        places[match["address"].lstrip("0") or "0"] = len(instructions)
        instruction = _instruction(match["guard"], name, rest)
        if name.startswith("CALL"):  # over the next instruction: lanes of sm_80 leave a loop so
            here = int(match["address"], 16)
            jumps = tuple(x for x in _TARGET.findall(rest) if here < int(x, 16) <= here + 32)
            instruction = dataclasses.replace(instruction, targets=jumps)
        instructions.append(instruction)
    targets = {target for x in instructions for target in x.targets}
    for i in switches:
        cases = _cases(instructions, places, targets | called, i)
        instructions[i] = dataclasses.replace(instructions[i], targets=cases)
        targets.update(cases)
    return Code(instructions, {target: places[target] for target in targets if target in places})


def _cases(
    instructions: list[Instruction], places: dict[str, int], known: set[str], switch: int
) -> tuple[str, ...]:
    """Where a jump through a table may lead: the listing does not say it, but nothing else leads there."""
    return tuple(
        address
        for address, place in places.items()
        if place > switch and not instructions[place - 1].falls and address not in known
        and instructions[place].name not in ("NOP", "BRA")
    )  # fmt: skip


def _described_tile(descriptor: int) -> str:
    """The rows and columns that the descriptor of a tcgen05 product says, and the K of 16-bit operands."""
    rows, columns = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    return f"{rows}x{columns}x16"


def _instruction(guard: str | None, name: str, rest: str) -> Instruction:
    text = f"{name}{rest}".rstrip()
    root = name.partition(".")[0]
    # a jump of lanes that have parted is there for lanes that do not come together, which they do
    if root in ("BRA", "BRX", "BRXU", "JMP", "JMX") and not name.startswith("BRA.DIV"):
        may_stay = guard not in (None, "PT", "UPT") or bool(_GUARD.search(rest))
        known = () if "X" in root else tuple(_TARGET.findall(rest))[-1:]  # or through a table, see _cases
        return Instruction(name, text, known, may_stay)
    if root in ("EXIT", "RET"):
        return Instruction(name, text, falls=guard not in (None, "PT", "UPT"))
    return Instruction(name, text)


def _width(parts: list[str]) -> int:
    """Bytes that a load or store moves for each thread."""
    for part in parts:
        if part in ("64", "128", "256"):
            return int(part) // 8
        if part in ("U8", "S8"):
            return 1
        if part in ("U16", "S16"):
            return 2
    return 4


def _tensor_flops(parts: list[str]) -> int:
    """Operations of one warp, of tcgen05 of a block; 0 where the listing does not say the shape."""
    for part in parts[1:]:
        if re.fullmatch(r"\d+x\d+x\d+", part):
            m, n, k = map(int, part.split("x"))
            return (
                2 * m * n * k // (1 if parts[0].startswith("UTC") else 4)
            )  # wgmma is of four warps together
        if part in _SHAPE:
            m, n, k = _SHAPE[part]
            return 2 * m * n * k
    return 0


def kind(x: Instruction) -> Kind:
    """What an instruction occupies."""
    parts = x.name.split(".")
    root = parts[0]
    if _TENSOR.match(root):
        shape = [part for part in parts[1:] if part not in ("GSB0", "REUSE")]
        flops = _tensor_flops(parts)
        own, whole = (
            (0, flops) if root.startswith("UTC") else (flops, 0)
        )  # one thread asks for all of a block
        return Kind(tensor=True, flops=own, block_flops=whole, unit=".".join([root, *shape]))
    if root in ("LDG", "LD"):
        return Kind(lsu=max(1, _width(parts) // 4), loaded=_width(parts))
    if root in ("STG", "ST", "RED", "ATOMG", "ATOM", "REDG"):
        return Kind(lsu=max(1, _width(parts) // 4), stored=_width(parts))
    if _COPY.match(root):
        width = _width(parts) if root == "LDGSTS" else 0
        shape = [part for part in parts[1:] if part in ("64", "128", "1D", "2D", "3D", "4D", "5D", "IM2COL")]
        return Kind(lsu=width // 4, loaded=width, unit=".".join([root, *shape]))
    if root in ("LDS", "STS", "ATOMS"):
        return Kind(lsu=max(1, _width(parts) // 4))
    if root in ("LDSM", "STSM"):
        return Kind(lsu=int(parts[-1]) if parts[-1].isdigit() else 1)
    if root in ("SHFL", "REDUX"):
        return Kind(lsu=1)
    if root in ("LDL", "STL"):
        return Kind(lsu=1)
    return Kind(fma=root in FMA, alu=root in ALU, special=root in SPECIAL, fp64=root in FP64)


MACHINE = Machine(code, kind)
