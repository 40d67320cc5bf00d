"""What AMD's machine code says, as LLVM prints it."""

import re

from counts import Kind, Machine
from flow import Code, Instruction

_LINE = re.compile(r"^\t(?P<name>[a-z]+_[a-z0-9_]+)(?P<rest>[^;]*)")
_LABEL = re.compile(r"^([.\w$]+):")
_SPECIAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos|rcp_iflag)_f(?:16|32)")
_MEMORY = re.compile(r"(?:global|buffer|flat)_(load|store|atomic)")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)_?(?:\d+b_)?")


def listings(printed: str) -> dict[str, str]:
    """The listing of each kernel, by symbol; what it calls is no part of it."""
    found = {}
    for symbol in re.findall(r"^\s*\.amdhsa_kernel (\S+)$", printed, re.MULTILINE):
        start = re.search(rf"^{re.escape(symbol)}:", printed, re.MULTILINE)
        if start:
            found[symbol] = printed[start.end() : printed.index("\n.Lfunc_end", start.end())]
    return found


def code(listing: str) -> Code:
    """The instructions of a kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := _LINE.match(line):
            instructions.append(_instruction(match["name"], match["rest"]))
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
    return Code(instructions, labels)


def _instruction(name: str, rest: str) -> Instruction:
    text = f"{name}{rest}".rstrip()
    if name == "s_branch" or name.startswith("s_cbranch"):
        return Instruction(name, text, (rest.strip(),), falls=name != "s_branch")
    return Instruction(name, text, falls=name not in ("s_endpgm", "s_setpc_b64"))


def _width(name: str) -> int:
    """Bytes that a load or store moves for each lane."""
    if match := re.search(r"dwordx(\d)", name):
        return 4 * int(match[1])
    if re.search(r"[us]?byte|_[ui]8", name):
        return 1
    if re.search(r"short|_[ubi]16", name):
        return 2
    match = re.search(r"_b(64|96|128)", name)
    width = int(match[1]) // 8 if match else 4
    return 2 * width if re.search(r"read2|write2|load_2addr|store_2addr", name) else width


def kind(x: Instruction) -> Kind:
    """What an instruction occupies. The vector unit issues beside scalar, memory and shared memory."""
    name = x.name
    if "mfma" in name:
        match = _SHAPE.search(name)
        m, n, k = map(int, match.groups()) if match else (0, 0, 0)
        blocks = re.search(r"_(\d+)b_", name)
        flops = 2 * m * n * k * (int(blocks[1]) if blocks else 1)
        return Kind(tensor=True, flops=flops, unit=name.removesuffix("_e64"))
    if match := _MEMORY.match(name):
        direct = "_lds_" in f"{name}_" or re.search(r"\blds\b", x.text) is not None
        unit = re.sub(r"^(global|buffer)_load.*", r"\1_load_lds", name) if direct else ""
        width = _width(name)
        return Kind(
            lsu=max(1, width // 4),
            loaded=width if match[1] == "load" else 0,
            stored=width if match[1] != "load" else 0,
            unit=unit,
        )
    if name.startswith(("scratch_", "ds_")):
        return Kind(lsu=max(1, _width(name) // 4))
    if not name.startswith("v_"):
        return Kind()
    # packed pairs of fp32 keep the unit for two passes where the plain ones take one
    fp64 = "_f64" in name and not _SPECIAL.match(name)
    special = bool(_SPECIAL.match(name)) or name.startswith(("v_rcp_f64", "v_rsq_f64", "v_sqrt_f64"))
    return Kind(special=special, fp64=fp64 and not special, fma=not (fp64 or special))


MACHINE = Machine(code, kind)
