"""The tables of docs/build.md, from reports as the tools in .ci write them."""

from rlkernel.bench import build_tables

COSTS = {
    "command": "measure",
    "before": {
        "commit": "abc",
        "cpu_seconds": {"cuda/long.cu": 160.0, "cpu/short.cpp": 1.25, "cpu/other.cpp": 2.0},
    },
    "now": {
        "commit": "def",
        "cpu_seconds": {"cuda/part.cu": 40.0, "cuda/rest.cu": 30.0, "cpu/short.cpp": 1.0},
    },
}


def test_short_files_are_one_line_and_all_are_counted():
    assert build_tables.build(COSTS).splitlines()[2:] == [
        "| source | abc, s | def, s |",
        "|---|---|---|",
        "| `cuda/long.cu` | 160.0 | 0.0 |",
        "| `cuda/part.cu` | 0.0 | 40.0 |",
        "| `cuda/rest.cu` | 0.0 | 30.0 |",
        "| all others | 3.2 | 1.0 |",
        "| **all** | 163.2 | 71.0 |",
    ]


def test_a_wheel_is_named_by_what_it_is_for():
    row = {
        "wheel": "rlkernel-1.2+cu130-cp310-cp310-manylinux_2_28_x86_64.whl",
        "parts": "cpu,cuda",
        "bytes": 12_340_000,
    }
    table = build_tables.wheels(
        {"command": "make wheels", "wheels": [row | {"cpu_seconds": 20.04, "seconds": 9.0}]}
    )
    assert table.splitlines()[-1] == "| cp310 | cpu, cuda | manylinux_2_28_x86_64 | 12.3 | 20.0 |"
    commands = [{"command": "python3 -m venv env", "seconds": 3.0}]
    said = build_tables.clean_machine({"wheel": row["wheel"], "commands": commands}).splitlines()
    assert said[0].endswith(f"dist/{row['wheel']}`") and said[-1] == "| `python3 -m venv env` | 3.0 |"
