"""The ledger of the compiled code: how a listing is read, and that what has become worse fails the check."""

import json
import re
import sys
from pathlib import Path

import pytest

from rlkernel.bench import devices, ledger
from rlkernel.bench.ledger import Ledger, Record, bound, worse

sys.path.insert(0, str(Path(__file__).parent / "codegen"))

import amdgcn
import check
import compilers
import sass
from check import Checked
from counts import counted

H100 = devices.DEVICES["h100"]
# A loop of a vector load, a rare case that was put behind the end, and one for lanes that parted.
LOOP = """\
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   FSETP.GT.AND P0, PT, R4, R8, PT ;
        /*0030*/               @P0 BRA 0x00a0 ;
        /*0040*/                   MUFU.EX2 R9, R4 ;
        /*0050*/                   FADD R10, R10, R9 ;
        /*0060*/                   BRA.DIV UR4, 0x00d0 ;
        /*0070*/                   ISETP.NE.AND P1, PT, R2, R3, PT ;
        /*0080*/               @P1 BRA 0x0010 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   FMUL R10, R10, R11 ;
        /*00b0*/                   FMUL R12, R12, R11 ;
        /*00c0*/                   BRA 0x0040 ;
        /*00d0*/                   DADD R14, R14, R16 ;
        /*00e0*/                   BRA 0x0070 ;
        /*00f0*/                   BRA 0x00f0 ;
"""
# One loop over all parts of all tiles: products in each turn, the end of a tile under a condition.
FLAT = """\
        /*0000*/                   UTMALDG.2D [UR4], [UR32] ;
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0020*/              @!P2 BRA 0x0050 ;
        /*0030*/                   STG.E.128 desc[UR14][R10.64], R24 ;
        /*0040*/                   STG.E.128 desc[UR14][R10.64], R28 ;
        /*0050*/               @P3 BRA 0x0010 ;
        /*0060*/                   EXIT ;
"""
TCGEN05 = """\
        /*0000*/                   UMOV UR57, 0x8400490 ;
        /*0010*/                   UTCHMMA gdesc[UR12], gdesc[UR20], tmem[UR37], idesc[UR57], !UPT ;
        /*0020*/               @P0 BRA 0x0010 ;
        /*0030*/                   EXIT ;
"""
# A jump through a table, whose cases nothing else leads to; a function behind the end that is called.
SWITCH = """\
        /*0000*/                   BRX R24 -0x10 ;
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/                   BRA 0x0060 ;
        /*0030*/                   FMUL R1, R1, R2 ;
        /*0040*/                   CALL.REL.NOINC 0x0070 ;
        /*0050*/                   BRA 0x0060 ;
        /*0060*/                   EXIT ;
        /*0070*/                   FFMA R1, R1, R2, R3 ;
        /*0080*/                   RET.REL.NODEC R4 0x0 ;
"""
# How lanes of sm_80 leave a loop: a call over the next instruction, from which nothing returns.
LEFT = """\
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/              @!P5 CALL.REL.NOINC 0x0030 ;
        /*0020*/                   BRA 0x0000 ;
        /*0030*/                   STG.E [R2.64], R4 ;
        /*0040*/                   EXIT ;
"""
AMD = """\
\t.text
forward:                                ; @forward
; %bb.0:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Loop Header: Depth=1
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[0:1], v[2:3], v[0:15]
\tv_exp_f32_e32 v5, v0
\tv_add_f64 v[6:7], v[6:7], v[8:9]
\tds_read_b128 v[8:11], v12
\tbuffer_load_dword v1, off, s[0:3], 0 lds
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel forward
"""


def of(**changes):
    return Record(64, 512, 0, 4, 1000, True, 200, 64, 0, 0, 0, 100, 50, 20, 0, 16, {})._replace(**changes)


def test_a_turn_of_a_loop_is_counted_without_its_rare_cases():
    found = counted(sass.MACHINE, LOOP)
    assert found["looped"] and found["turn"] == 8  # from 0x10 to 0x80
    assert (found["loaded"], found["special"], found["fma"], found["alu"]) == (16, 1, 1, 2)
    assert found["fp64"] == 0  # of lanes that parted
    assert found["size"] == 13  # with the rare case, without the loops behind the end


def test_the_end_of_a_tile_is_no_part_of_a_turn_through_its_products():
    found = counted(sass.MACHINE, FLAT)
    assert (found["turn"], found["stored"], found["tensor"]) == (3, 0, 1)
    assert found["flops"] == 2 * 64 * 256 * 16 // 4  # of one of four warps
    assert found["units"] == {"HGMMA.64x256x16.F32.BF16": 1, "UTMALDG.2D": 1}


def test_a_product_of_tcgen05_has_the_tile_of_its_descriptor():
    found = counted(sass.MACHINE, TCGEN05, warps=4)
    assert found["units"] == {"UTCHMMA.128x256x16": 1}
    assert found["flops"] == 2 * 128 * 256 * 16 // 4


def test_a_jump_through_a_table_reaches_its_cases_and_no_function():
    assert counted(sass.MACHINE, SWITCH)["size"] == 7


def test_a_loop_that_is_left_by_a_call_is_no_end_of_the_code():
    found = counted(sass.MACHINE, LEFT)
    assert (found["size"], found["turn"]) == (5, 3)


def test_code_without_a_loop_that_ends_in_one_of_single_elements():
    wide = "".join(
        f"        /*{16 * i:04x}*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n" for i in range(4)
    )
    tail = """\
        /*0040*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0050*/               @P0 BRA 0x0040 ;
        /*0060*/                   EXIT ;
"""
    found = counted(sass.MACHINE, wide + tail)
    assert not found["looped"] and found["loaded"] == 66
    assert counted(sass.MACHINE, tail.replace("/*004", "/*000").replace("0x0040", "0x0000"))["looped"]


def test_a_listing_of_amd():
    found = counted(amdgcn.MACHINE, amdgcn.listings(AMD)["forward"])
    assert found["turn"] == 7 and found["size"] == 9
    assert found["flops"] == 2 * 32 * 32 * 8
    assert (found["loaded"], found["special"], found["fp64"]) == (20, 1, 1)
    assert found["units"] == {"buffer_load_lds": 1, "v_mfma_f32_32x32x8_bf16_1k": 1}


def test_a_line_that_is_no_instruction_is_no_listing():
    with pytest.raises(ValueError, match="must print an instruction a line"):
        sass.code("nonsense")


def test_nvcc_and_its_disassembler_agree_with_ptxas():
    if compilers.disassembler() is None:
        pytest.fail("nvdisasm was not found, and Triton brings it")
    try:
        compiler = compilers.find("cuda")
    except compilers.Missing:
        pytest.skip("this machine has no nvcc")
    source = Path(compilers.ROOT / "csrc/cuda/gae.cu")
    kernels, errors = compiler.compile(source, "sm_90a")
    assert not errors and [k.name for k in kernels] == ["gae_kernel"]
    record = kernels[0].record
    assert record is not None and record.registers == kernels[0].registers
    assert record.looped and record.loaded and record.size > record.turn > 20
    assert compiler.compile(Path(compilers.ROOT / "csrc/cuda/errors.cu"), "sm_90a") == ([], [])


# What a change must not bring; each with the word that tells of it.
FAULTS = {
    "a spill": (of(), of(spilled=8), "spills 8 bytes"),
    "more instructions": (of(), of(size=1060), "1060 instructions, the ledger has 1000"),
    "a longer loop": (of(), of(turn=215), "215 instructions for 64 bytes"),
    "less for as much": (of(), of(loaded=32, turn=120), "120 instructions for 32 bytes"),
    "a wgmma that vanished": (
        of(units={"HGMMA.64x256x16.F32.BF16": 4}, flops=512, tensor=4),
        of(units={"HMMA.16816.F32.BF16": 4}, flops=512, tensor=4),
        "HGMMA has vanished",
    ),
    "a copy that vanished": (of(units={"UTMALDG.2D": 4}), of(), "UTMALDG has vanished"),
    "an mfma that vanished": (of(units={"v_mfma_f32_32x32x8_bf16": 4}), of(), "v_mfma has vanished"),
    "fewer warps": (of(), of(registers=90), "90 registers leave room for 20 warps, the ledger's 64 for 32"),
    "shared memory": (of(), of(shared=4096), "4096 bytes of shared memory, the ledger has 512"),
    "a loop that lost its work": (of(), of(loaded=0), "its loop loads nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    before, after, said = FAULTS[fault]
    found = worse(before, after, H100)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize(
    "after",
    [
        of(),
        of(size=1049, turn=209),
        of(registers=32, size=900, turn=100),
        of(loaded=128, turn=400, size=1040),
        of(units={"HGMMA.64x256x16.F32.BF16": 1}),
    ],
)
def test_what_is_no_worse_is_no_fault(after):
    assert worse(of(), after, H100) == []


def test_another_tile_of_the_same_unit_is_no_fault():
    before = of(units={"HGMMA.64x128x16.F32.BF16": 4}, flops=512, tensor=4, loaded=0)
    assert worse(before, before._replace(units={"HGMMA.64x256x16.F32.BF16": 2}), H100) == []


def test_bounds_follow_from_the_busiest_part():
    share, what, busiest = bound(of(turn=237, loaded=64, special=36), H100)
    assert (share, what) == (1.0, "bandwidth")
    share, what, busiest = bound(of(turn=1200, loaded=64), H100)
    assert busiest == "issue" and share == pytest.approx(64 * 32 / (3.35e12 / 132 / 1.83e9) / 300)
    tiles = of(flops=262144, tensor=4, loaded=128, turn=73, lsu=39, units={"HGMMA.64x128x16.F32.BF16": 4})
    share, what, busiest = bound(tiles, H100)
    assert what == "peak" and busiest == "L2" and 0.3 < share < 0.6
    assert bound(of(loaded=0), H100) is None


def committed():
    return Ledger.load()


def test_the_committed_ledger_is_what_it_writes():
    text = ledger.FILE.read_text()
    assert committed().text() == text  # sorted, and what follows from the rest is right
    assert len(text) < 400_000
    assert not re.search(r"(^|[\s\"'])/\w", text), "a path of a machine"


def test_the_committed_ledger_has_every_part():
    known = committed()
    assert set(known.compilers) == set(check.PARTS) == set(known.parts)
    archs = {part: sorted(archs) for part, archs in known.parts.items()}
    assert archs == {
        "cuda": ["sm_100", "sm_80", "sm_90a"],
        "hip": ["gfx90a", "gfx942"],
        "triton": ["gfx942", "sm_100", "sm_80", "sm_90"],
    }
    spilling = [n for p in known.parts.values() for k in p.values() for n, r in k.items() if r.spilled]
    assert not spilling


def planted(part, arch, name, **changes):
    """What was compiled, were the ledger right but for one kernel that the ledger has otherwise."""
    known = committed()
    record = known.parts[part][arch][name]
    known.parts[part][arch][name] = record._replace(**changes)
    return known, committed().parts[part]


def test_faults_planted_in_the_committed_ledger_fail_the_comparison():
    name = "logprob: forward_kernel<bf16, 0, 0>"
    before = committed().find("cuda", "sm_90a", name)
    known, found = planted("cuda", "sm_90a", name, turn=before.turn - 20)
    assert [name in x and "in its loop" in x for x in known.differences("cuda", found)] == [True]
    known, found = planted("cuda", "sm_90a", name, units={"HGMMA.64x256x16.F32.BF16": 4})
    assert ["HGMMA has vanished" in x for x in known.differences("cuda", found)] == [True]
    known, found = planted("cuda", "sm_90a", name)
    found["sm_90a"][name] = before._replace(spilled=16)
    assert ["spills 16 bytes" in x for x in known.differences("cuda", found)] == [True]
    del found["sm_90a"][name]
    assert known.differences("cuda", found) == [f"{name} for sm_90a is in the ledger alone"]
    known, found = planted("cuda", "sm_90a", name)
    found["sm_90a"]["logprob: new_kernel"] = before
    assert known.differences("cuda", found) == ["logprob: new_kernel for sm_90a is not in the ledger"]


@pytest.fixture
def checking(monkeypatch, tmp_path):
    """The command over one kernel that was not compiled, with a ledger of its own."""
    monkeypatch.setattr(ledger, "FILE", tmp_path / "codegen.json")
    monkeypatch.setattr(check, "HERE", check.ROOT / "build/codegen/test" / tmp_path.name / "codegen.json")
    monkeypatch.setattr(Ledger.load.__func__, "__defaults__", (tmp_path / "codegen.json",))

    def run(*options, compiler="nvcc 13.0.88", **changes):
        records = {"sm_90a": {"op: kernel": of(**changes)}}
        monkeypatch.setattr(check, "check", lambda part, jobs: Checked(compiler, records, "", []))
        monkeypatch.setattr(sys, "argv", ["check.py", "--only", "cuda", *options])
        return check.main()

    return run


def test_the_command_writes_and_then_compares(checking, capsys):
    assert checking() == 0 and "nothing is compared" in capsys.readouterr().out
    assert checking("--write") == 0
    assert checking() == 0 and "1 kernels beside the ledger, 0 worse" in capsys.readouterr().out
    assert checking(turn=230) == 1
    assert "ERROR: op: kernel for sm_90a: 230 instructions for 64 bytes" in capsys.readouterr().out
    assert checking("--write", turn=230) == 0 and checking(turn=230) == 0


def test_the_command_compares_no_other_compilers_code(checking, capsys):
    checking("--write")
    assert checking(turn=400, compiler="nvcc 13.1.0") == 0
    said = capsys.readouterr().out
    assert "the ledger is of nvcc 13.0.88, this is nvcc 13.1.0: nothing is compared" in said
    here = Ledger.load(check.HERE)
    assert here.compilers["cuda"] == "nvcc 13.1.0" and here.parts["cuda"]["sm_90a"]["op: kernel"].turn == 400


def test_a_ledger_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "codegen.json"
    path.write_text(json.dumps({"columns": ["registers"], "compilers": {}, "parts": {}}))
    with pytest.raises(ValueError, match="must have the columns registers, shared, .*; write it anew"):
        Ledger.load(path)
