"""``python -m rlkernel.info``: what it shows is what dispatch does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlkernel
from rlkernel import dispatch, info, native
from rlkernel.bench import cases, report
from rlkernel.integrations.areal import switch as areals
from rlkernel.integrations.llamafactory import switch as llamafactories
from rlkernel.integrations.openrlhf import switch as openrlhfs
from rlkernel.integrations.sglang import switch as sglangs
from rlkernel.integrations.skyrl import switch as skyrls
from rlkernel.integrations.swift import switch as swifts
from rlkernel.integrations.verl import switch as verls
from rlkernel.integrations.vllm import switch as vllms
from rlkernel.runtime import log

ROOT = Path(__file__).parent.parent


def test_json_is_what_collect_returns():
    command = [sys.executable, "-m", "rlkernel.info", "--json"]
    shown = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert shown.keys() == info.collect().keys()
    assert shown["versions"]["torch"] == torch.__version__
    assert list(shown["ops"]) == dispatch.ops()


@pytest.mark.parametrize("op", dispatch.ops())
def test_the_named_backend_is_the_one_that_runs(op):
    choice = info.collect()["ops"][op]["cpu"]
    function = getattr(cases.modules([op])[op], "FUNCTION", op)
    getattr(rlkernel, function)(**info._inputs(op, "cpu"))
    assert rlkernel.last_backend(op) == choice["backend"]
    assert {choice["backend"], *choice["also"]}.isdisjoint(choice["reasons"])
    assert {choice["backend"], *choice["also"], *choice["reasons"]} == set(dispatch.BACKENDS)


def test_text_names_every_op_and_every_reason():
    shown = info.collect()
    text = info.render(shown, every=True)
    assert shown["ops"]["prefix_shared_attention"]["cpu"]["path"] == "torch's flash kernels"
    assert "  prefix_shared_attention runs over torch's flash kernels\n" in info.render(shown)
    for op, choices in shown["ops"].items():
        over = f", over {choices['cpu']['path']}" if choices["cpu"]["path"] else ""
        assert f"{op} on cpu runs on {choices['cpu']['backend']}{over}" in text
        for name, why in choices["cpu"]["reasons"].items():
            assert f"  not {name}: {'; '.join(why)}" in text


@pytest.mark.parametrize(("count", "said"), [(1, "1 thread"), (2, "2 threads")])
def test_one_thread_is_no_plural(count, said, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert info.collect()["devices"]["cpu"].endswith(f", {said}")
    assert report.header([], "cpu")["machine"]["cpu details"].startswith(f"{said}, ")


def test_reasons_are_grouped():
    shown = info.collect()
    assert set(shown["environment"]) == {name for name, stage in variables() if stage == "run"}
    choice = {"backend": "native", "path": None, "also": [], "reasons": {"triton": ["no GPU"]}}
    reasons = {"triton": ["no GPU"], "native": ["not built"]}
    other = {"backend": "reference", "path": None, "also": [], "reasons": reasons}
    shown["ops"] = {"gae": {"cpu": choice}, "whiten": {"cpu": other}, "swiglu": {"cpu": choice}}
    shown["environment"]["RLKERNEL_DEBUG"] = "1"
    lines = info.render(shown).splitlines()
    start = lines.index("on cpu")
    assert lines[start + 1 :] == [
        "  native runs gae, swiglu",
        "  reference runs whiten",
        "  not triton: no GPU: all 3 ops",
        "  not native: not built: whiten",
    ]
    told = [line.split(maxsplit=1) for line in lines]  # in columns as wide as the longest name
    assert ["RLKERNEL_DEBUG", "1"] in told and ["RLKERNEL_LOG", "not set"] in told


def variables():
    """Those of the page on building, and when each is read; those of frameworks are on their pages."""
    rows = re.findall(r"^\| `(RLKERNEL_\w+)` \| (\w+) \|", (ROOT / "docs/build.md").read_text(), re.MULTILINE)
    of_frameworks = (
        *vllms.OWN,
        *sglangs.OWN,
        *verls.OWN,
        *openrlhfs.OWN,
        *skyrls.OWN,
        *areals.OWN,
        *swifts.OWN,
        *llamafactories.OWN,
    )
    return [*rows, *((name, "run") for name in of_frameworks)]


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m rlkernel.info --all | head -1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "" and run.stdout.startswith("rlkernel")


@pytest.mark.parametrize(
    "level, said", [("debug", "[rlkernel DEBUG] gae runs on reference"), ("error", ""), ("", "")]
)
def test_a_variable_shows_the_log(level, said):
    code = (
        "import torch, rlkernel\n"
        "with rlkernel.use_backend('reference'):\n"
        "    rlkernel.gae(torch.ones(1, 3), torch.ones(1, 3))\n"
    )
    environment = {**os.environ, "RLKERNEL_LOG": level}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stderr.strip() == said


def test_a_level_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv("RLKERNEL_LOG", "loud")
    with pytest.raises(ValueError, match="RLKERNEL_LOG must be one of 'debug', .*, got 'loud'"):
        log.set_up()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RLKERNEL_CPU_ISA", "avx3", "RLKERNEL_CPU_ISA must be one of baseline, .*got 'avx3'"),
        ("RLKERNEL_DEBUG", "false", "RLKERNEL_DEBUG must be 0 or 1, got 'false'"),
        ("RLKERNEL_LOG", "loud", "RLKERNEL_LOG must be one of 'debug', .*, got 'loud'"),
        ("RLKERNEL_NVTX", "false", "RLKERNEL_NVTX must be 0 or 1, got 'false'"),
        ("RLKERNEL_WORKSPACE_MIB", "lots", "RLKERNEL_WORKSPACE_MIB must be a number >= 1, got 'lots'"),
        ("RLKERNEL_WORKSPACE_MIB", "inf", "RLKERNEL_WORKSPACE_MIB must be a number >= 1, got 'inf'"),
        (vllms.SWITCH, "sampling", "VLLM_RLKERNEL must name some of .*got .'sampling',"),
        (verls.SWITCH, "sampling", "VERL_RLKERNEL must name some of .*got .'sampling',"),
        (openrlhfs.SWITCH, "sampling", "OPENRLHF_RLKERNEL must name some of .*got .'sampling',"),
        (areals.SWITCH, "sampling", "AREAL_RLKERNEL must name some of .*got .'sampling',"),
        (swifts.SWITCH, "sampling", "SWIFT_RLKERNEL must name some of .*got .'sampling',"),
        (llamafactories.SWITCH, "sampling", "LLAMAFACTORY_RLKERNEL must name .*got .'sampling',"),
        (skyrls.SWITCH, "sampling", "SKYRL_RLKERNEL must name some of .*got .'sampling',"),
    ],
)
def test_a_variable_that_the_first_call_would_refuse_is_named(name, value, said, monkeypatch):
    monkeypatch.setattr(info, "_extension", lambda: {"parts": {"cpu": ["baseline", "avx2"]}, "missing": None})
    assert not info.collect()["wrong"]
    monkeypatch.setenv(name, value)
    shown = info.collect()
    assert list(shown["wrong"]) == [name] and re.search(f"\nwrong: {said}", info.render(shown))


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("-m rlkernel.info", 0),
        ("-mrlkernel.info --require nothing", 1),
        ("-c import\trlkernel rlkernel.info", 1),
        ("-m rlkernel.bench rlkernel.info", 1),
    ],
)
def test_info_runs_with_variables_that_the_import_refuses(words, status):
    wrong = {"RLKERNEL_DEBUG": "false", "RLKERNEL_LOG": "loud", "RLKERNEL_NVTX": "2"}
    run = subprocess.run(
        [sys.executable, *words.split(" ")],
        cwd=ROOT,
        env={**os.environ, **wrong},
        capture_output=True,
        text=True,
    )
    assert run.returncode == status
    if "mrlkernel.info" in words.replace(" ", ""):
        assert re.findall(r"^wrong: (\w+)", run.stdout, re.MULTILINE) == [*wrong] and "on cpu\n" in run.stdout
        assert "Traceback" not in run.stderr
    else:
        assert run.stderr.endswith(
            "ValueError: RLKERNEL_LOG must be one of 'debug', 'info', 'warning', 'error', got 'loud'\n"
        )


@pytest.mark.parametrize("name", ["RLKERNEL_DEBUG", "RLKERNEL_NVTX"])
def test_a_flag_that_is_neither_0_nor_1_is_an_error(name):
    """RLKERNEL_DEBUG=false had turned the checks on."""
    run = subprocess.run(
        [sys.executable, "-c", "import rlkernel"],
        cwd=ROOT,
        env={**os.environ, name: "false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode and f"ValueError: {name} must be 0 or 1, got 'false'" in run.stderr


def test_it_works_without_the_extension_and_says_so(monkeypatch, capsys):
    def absent():
        raise ImportError("rlkernel._C cannot be loaded: no such file")

    monkeypatch.setattr(native, "extension", absent)
    assert info.main(["--require", "cpu"]) == 1
    output = capsys.readouterr()
    assert "not built: rlkernel._C cannot be loaded: no such file" in output.out
    assert "the extension must have cpu" in output.err


def test_the_hint_of_a_wheel_asks_no_package_index():
    """Nothing is on one yet, so what is there under this name would be somebody else's."""
    text = (ROOT / "rlkernel/native/__init__.py").read_text()
    hints = re.findall(r"`(pip install [^`]+)`", text)
    assert hints and all(hint.endswith(" .") for hint in hints)
    assert "Nothing is on a package index yet" in (ROOT / "README.md").read_text()


def test_require_accepts_what_was_built(monkeypatch, capsys):
    monkeypatch.setattr(
        info, "_extension", lambda: {"parts": {"cpu": ["avx2"], "cuda": ["90a"]}, "missing": None}
    )
    assert info.main(["--require", "cpu", "cuda"]) == 0
    assert "built cuda    90a" in capsys.readouterr().out


def test_a_missing_package_and_a_version_are_told_apart():
    assert info._version("pytest", "pytest") == pytest.__version__
    assert info._version("no-such-distribution", "no_such_module") is None


def test_the_commit_is_told_only_in_a_checkout(tmp_path):
    assert info._commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = info._commit(tmp_path)
    assert clean is not None and len(clean) == 12
    (tmp_path / "file").write_text("two")
    assert info._commit(tmp_path) == clean + "+changes"


@pytest.mark.parametrize("asked", [("cpu", "cuda"), ("cuda", "cpu")])
def test_require_sees_a_part_that_is_missing_beside_one_that_is_there(monkeypatch, capsys, asked):
    monkeypatch.setattr(info, "_extension", lambda: {"parts": {"cpu": ["avx2"]}, "missing": None})
    assert info.main(["--require", *asked]) == 1
    assert "the extension must have cuda, got {'parts': {'cpu': ['avx2']}" in capsys.readouterr().err
