"""Types of the public functions: what a type checker finds in scripts of users, and the words they name."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import rlkernel
from rlkernel import dispatch
from rlkernel import types as words
from rlkernel.ops import _options

SCRIPTS = Path(__file__).parent / "typing"
ROOT = SCRIPTS.parents[1]


def of(path, name):
    return getattr(importlib.import_module(f"rlkernel.{path}"), name)


RULE = "ops.policy_loss.rule"
CORRECTION = "ops.policy_loss.rollout_correction"
SAMPLING = "calls.sampling"
KNOWN = {  # what the functions themselves take
    words.Backend: ("auto", *dispatch.BACKENDS),
    words.LinearAlgorithm: of("ops.linear_logprob", "ALGORITHMS"),
    words.LinearPolicyAlgorithm: of("ops.linear_policy_loss", "ALGORITHMS"),
    words.Parity: of("calls.prefix_shared_attention", "PARITIES"),
    words.InvarianceLevel: of("consistency.mode", "LEVELS"),
    words.LossType: of(RULE, "LOSS_TYPES"),
    words.PolicyPreset: of(RULE, "PRESETS"),
    words.LossAggMode: of(RULE, "AGGREGATIONS"),
    words.ImportanceSamplingLevel: of("calls.policy_loss", "LEVELS"),
    words.PolicyKlEstimator: of(RULE, "KL"),
    words.KlFactor: [x for x in of(RULE, "KL_FACTORS") if isinstance(x, str)],
    words.Correction: of(CORRECTION, "CORRECTIONS"),
    words.CorrectionLevel: of(CORRECTION, "CORRECTION_LEVELS")[1:],
    words.CorrectionMode: (*of(CORRECTION, "CORRECTION_MODES"), "reject"),
    words.CorrectionDenominator: ("keep", "shrink"),
    words.Divergence: of(CORRECTION, "DIVERGENCES")[1:],
    words.ValueLoss: of("ops.value_loss", "LOSSES"),
    words.PreferenceLossType: of("ops.preference_loss.rule", "TERMS"),
    words.PreferencePreset: of("ops.preference_loss.rule", "PRESETS"),
    words.FDivergence: of("calls.preference_loss", "PREFERENCE_DIVERGENCES"),
    words.AdvantageEstimator: of("calls.group_advantages", "ESTIMATORS"),
    words.ScaleRewards: of("calls.group_advantages", "SCALES"),
    words.Singletons: of("calls.group_advantages", "SINGLETONS"),
    words.EpsIn: of("calls.whiten", "EPS_PLACES"),
    words.Holes: of("calls.gae", "HOLES"),
    words.KlEstimator: of("calls.kl_shaped_rewards", "KL_ESTIMATORS"),
    words.FilterOrder: of(SAMPLING, "FILTER_ORDERS"),
    words.SamplingMethod: of(SAMPLING, "METHODS"),
    words.LogprobKind: of(SAMPLING, "LOGPROBS"),
    words.GreedyLogprobs: of(SAMPLING, "GREEDY_LOGPROBS"),
    words.RankTies: of(SAMPLING, "RANK_TIES")[:2],
    words.StoreLogits: ("auto",),
    words.Statistic: of("calls.linear_logprob", "STATISTICS"),
    words.InputScheme: of("ops._fp8", "NAMES"),
    words.NormRounding: of("calls.rms_norm", "ROUNDINGS"),
    words.RotaryRounding: of("calls.rotary", "ROUNDINGS"),
    words.SwigluRounding: of("calls.swiglu", "ROUNDINGS"),
    words.Activation: of("calls.swiglu", "ACTIVATIONS"),
    words.VllmOp: of("integrations.vllm.switch", "OPS"),
    words.SglangPart: of("integrations.sglang.switch", "PARTS"),
    words.SkyrlPart: of("integrations.skyrl.switch", "PARTS"),
    words.ArealPart: of("integrations.areal.switch", "PARTS"),
    words.SwiftPart: of("integrations.swift.switch", "PARTS"),
    words.LlamafactoryPart: of("integrations.llamafactory.switch", "PARTS"),
    words.MegatronPart: of("integrations.megatron.install", "PARTS"),
    words.VerlPart: of("integrations.verl.switch", "PARTS"),
    words.OpenRlhfPart: of("integrations.openrlhf.switch", "PARTS"),
}
IN_FRAMEWORKS = {words.Require: ("require",), words.Dropout: ("own", "shared")}  # whose modules want TRL
FREE = {("register_hf", "name"), ("explain", "op"), ("last_backend", "op")}  # any name
FUNCTIONS = {name: f for name in rlkernel.__all__ if inspect.isfunction(f := getattr(rlkernel, name))}


def test_words_are_those_that_the_functions_take():
    literals = {x for x in vars(words).values() if typing.get_origin(x) is typing.Literal}
    assert literals == set(KNOWN) | set(IN_FRAMEWORKS)
    for literal, known in KNOWN.items():
        assert set(typing.get_args(literal)) == set(known), literal
    source = (ROOT / "integrations/trl/install.py").read_text()
    for word in (*IN_FRAMEWORKS[words.Require], *IN_FRAMEWORKS[words.Dropout]):
        assert f'"{word}"' in source, word


def test_no_choice_is_a_bare_string():
    for name, function in FUNCTIONS.items():
        for p in inspect.signature(function).parameters.values():
            kinds = (
                typing.get_args(p.annotation)
                if isinstance(p.annotation, types.UnionType)
                else (p.annotation,)
            )
            if str in kinds and (name, p.name) not in FREE and p.name != "device" and name != "warm_up":
                pytest.fail(f"{name}({p.name}: {p.annotation}) has no Literal")


@pytest.mark.parametrize(
    "function, options, apart",
    [
        ("logprob", _options.LogprobOptions, {"return_entropy"}),
        ("linear_logprob", _options.LinearLogprobOptions, {"return_entropy"}),
        ("attention", _options.AttentionOptions, {"return_lse"}),
        ("prefix_shared_attention", _options.PrefixAttentionOptions, {"return_lse"}),
        ("paged_prefix_attention", _options.PagedAttentionOptions, {"return_lse"}),
        ("policy_loss", _options.HandedOn, {"entropy", "entropy_coef", "cu_seqlens"}),
    ],
)
def test_keywords_of_overloads_are_those_of_the_function(function, options, apart):
    parameters = inspect.signature(getattr(rlkernel, function)).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    hints = typing.get_type_hints(getattr(rlkernel, function))
    assert {name: hints[name] for name in keywords - apart} == typing.get_type_hints(options)


def test_keywords_of_linear_policy_loss():
    hints = typing.get_type_hints(rlkernel.linear_policy_loss)
    assert typing.get_args(hints.pop("options")) == (_options.HandedOn,)
    parameters = inspect.signature(rlkernel.linear_policy_loss).parameters.values()
    own = {
        p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "return_entropy"
    }
    handed_on = typing.get_type_hints(_options.HandedOn)
    assert typing.get_type_hints(_options.LinearPolicyLossOptions) == own | handed_on


@pytest.mark.parametrize(
    "door, file, function",
    [
        ("patch_trl", "trl/install.py", "patch"),
        ("patch_vllm", "vllm/install.py", "patch"),
        ("patch_deepspeed", "deepspeed/install.py", "patch"),
        ("patch_megatron", "megatron/install.py", "patch"),
        ("patch_sglang", "sglang/install.py", "patch"),
        ("patch_skyrl", "skyrl/install.py", "patch"),
        ("patch_areal", "areal/install.py", "patch"),
        ("patch_swift", "swift/install.py", "patch"),
        ("patch_axolotl", "axolotl/install.py", "patch"),
        ("patch_llamafactory", "llamafactory/install.py", "patch"),
        ("patch_verl", "verl/install.py", "patch"),
        ("patch_openrlhf", "openrlhf/install.py", "patch"),
        ("packed_logprobs", "hf/logprobs.py", "packed_logprobs"),
    ],
)
def test_a_door_has_the_arguments_of_what_is_behind_it(door, file, function):
    def arguments(path, name):
        found = [
            n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == name
        ]
        args = found[-1].args  # behind the overloads
        keywords = {a.arg: ast.unparse(a.annotation) for a in args.kwonlyargs}
        defaults = {a.arg: ast.unparse(d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
        return [ast.unparse(a) for a in args.args], keywords, defaults

    ours = arguments(ROOT / "rlkernel/_frameworks.py", door)
    theirs = arguments(ROOT / "integrations" / file, function)
    if door == "packed_logprobs":
        options = typing.get_type_hints(of("_frameworks", "PackedOptions"))
        assert set(ours[1]) | set(options) == set(theirs[1]) and ours[0] == theirs[0]
    else:
        assert ours == theirs


def test_a_type_checker_finds_the_planted_mistakes_and_no_others(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        json.dumps({"include": [str(SCRIPTS)], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"})
    )
    command = [sys.executable, "-m", "basedpyright", "-p", str(config), "--pythonpath", sys.executable]
    run = subprocess.run([*command, "--outputjson"], capture_output=True, text=True)
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] == 2, run.stdout
    found = {(Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in report["generalDiagnostics"]}
    lines = (SCRIPTS / "wrong.py").read_text().splitlines()
    planted = {("wrong.py", i) for i, line in enumerate(lines, 1) if re.search(r"# wrong:", line)}
    assert len(planted) > 10
    assert found == planted, run.stdout
