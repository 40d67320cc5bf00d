"""How long ``make bench`` and ``make test`` take is noted by them, and stated from what they noted."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkernel.bench import commands, readme
from rlkernel.bench.cases import UsageError

ROOT = Path(__file__).parents[1]
REPORT = '<testsuites><testsuite tests="5" skipped="2"/><testsuite tests="1003" skipped="0"/></testsuites>'


@pytest.fixture
def root(tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "build/tests.xml").write_text(REPORT)
    return tmp_path


def run(root, *arguments):
    return commands.main([str(x) for x in arguments], root)


def test_what_a_command_took_is_noted_and_said_the_next_time(root, capsys):
    assert run(root, "bench") == 0
    assert "it took" not in capsys.readouterr().out
    now = time.time()
    assert run(root, "bench", "--began", now - 500, "--ready", now - 200, "--fresh") == 0
    assert run(root, "test", "--began", now - 1700, "--ready", now - 1620, "--jobs", 2) == 0
    assert "make: make test took 27 min for 1,006 tests, its set-up: was there" in capsys.readouterr().out
    assert run(root, "bench") == 0
    assert "; it took 3 min 20 s on " in capsys.readouterr().out
    bench, test = json.loads((root / "build/commands.json").read_text()).values()
    assert bench["set_up_seconds"] == pytest.approx(300, abs=1) and test["set_up_seconds"] is None
    assert (bench["jobs"], test["jobs"], test["tests"]) == (None, 2, 1006)
    assert bench["cores"] > 0 and bench["header"]["command"] == "make bench"


def test_a_command_that_failed_is_not_noted(root):
    assert run(root, "test", "--ready", time.time(), "--status", 1) == 0
    assert not (root / "build/commands.json").exists()


def test_the_readme_states_what_the_newest_report_says(root):
    results = root / "benchmarks/results"
    page = "<!-- bench:begin commands -->\nold\n<!-- bench:end commands -->\n"
    assert "old" not in readme.fill(page, results) and commands.NEVER in readme.fill(page, results)
    with pytest.raises(
        UsageError, match="must hold what a command took, got none: run make bench or make test"
    ):
        commands.keep(root)
    now = time.time()
    commands.note("bench", now - 80, now - 30, now, True, None, root)
    commands.keep(root).rename(results / "2000-01-01-commands.json")
    (root / "build/commands.json").unlink()
    commands.note("test", now - 100, now - 100, now, False, 2, root)
    commands.keep(root)  # what it says of the other command is that of the report before
    lines = readme.fill(page, results).splitlines()
    assert lines[3].startswith("| `make bench` | 50 s | 30 s | ") and "cores; Python 3." in lines[3]
    assert lines[4].startswith("| `make test` | was there | 1 min 40 s for 1,006 tests | ")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(45.4, "45 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (1620, "27 min"), (3900, "1 h 5 min")],
)
def test_no_more_digits_than_another_run_would_have_again(seconds, said):
    assert commands.words(seconds) == said


MADE = ("venv", "torch", "build", "test", "bench", "docs", "frameworks")
PYTHON = """#!{python}
import sys
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
sys.exit({status} if sys.argv[2] == {failing!r} else 0)
"""


@pytest.mark.parametrize(
    ("target", "failing", "arguments", "noted"),
    [
        ("test", "", "", "test --began B --ready R --jobs 3 --status 0"),
        ("test", "pytest", "", "test --began B --ready R --jobs 3 --status 7"),
        ("test", "", "-k gae", ""),
        ("bench", "", "", "bench --began B --ready R"),
        ("bench", "rlkernel.bench", "", ""),
        ("bench", "", "speed", ""),
    ],
)
def test_make_notes_what_it_took(tmp_path, target, failing, arguments, noted):
    """Its set-up is there, and a script in the place of Python that writes down what it is asked for."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = tmp_path / ".venv/done"
    done.mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir()
    for folder in ("requirements", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    log = tmp_path / "log"
    python.write_text(PYTHON.format(python=sys.executable, log=str(log), status=7, failing=failing))
    python.chmod(0o755)
    later = time.time() + 60
    for place, name in enumerate(MADE):
        (done / name).touch()
        os.utime(done / name, (later + place, later + place))
    command = ["make", "-C", str(tmp_path), target, f"ARGS={arguments}", "JOBS=3"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode == 0) == (not failing), ended.stderr
    asked = [line for line in log.read_text().splitlines() if "rlkernel.bench.commands" in line]
    if not arguments:
        assert asked.pop(0).split() == ["-m", "rlkernel.bench.commands", target]
    words = asked[0].split()[2:] if asked else []
    for option, letter in (("--began", "B"), ("--ready", "R")):
        if option in words:
            seconds = int(words[(at := words.index(option) + 1)])
            assert 0 <= time.time() - seconds < 60
            words[at] = letter
    assert " ".join(words) == noted and len(asked) <= 1
