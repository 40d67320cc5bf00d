"""The loss code of TRL, verl and Liger, as the benchmark runs it; skips where they are not installed."""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from accuracy import error
from policy_cases import run

from rlkernel.benchmarks import _peers, policy_loss


def check_same(ours, theirs, inputs, tolerance=1e-12, **options):
    """Value and gradient of a peer's own code, in fp64."""
    x = inputs["logprobs"].detach().requires_grad_()
    theirs = theirs(inputs | {"logprobs": x})
    (grad,) = torch.autograd.grad(theirs, x)
    loss, _, got, *_ = run("reference", ours, **options)
    assert error(loss, theirs) < tolerance and error(got, grad) < tolerance
    return got


def verl(path):
    try:
        return _peers.verl(path)
    except ImportError as error:
        pytest.skip(f"verl: {error}")


def verl_core():
    return verl("trainer.ppo.core_algos")


def verl_rollout_corr():
    return verl("trainer.ppo.rollout_corr_helper")


def config_defaults(package, path, name):
    """The plain defaults of a peer's dataclass, field by field: read from its source, as verl's package
    needs more to be imported than is installed here."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name).body
    found = {}
    for field in (n for n in body if isinstance(n, ast.AnnAssign)):
        value = field.value
        if isinstance(value, ast.Call):  # of field(default=...)
            value = next((k.value for k in value.keywords if k.arg == "default"), None)
        if isinstance(value, ast.Constant):
            found[field.target.id] = value.value
    return found


@functools.cache
def verl_presets():
    """What the class methods of verl's RolloutCorrectionConfig give with their defaults: read from its
    source, as the package needs more to be imported than is installed here."""
    verl_core()
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    tree = ast.parse((folder / "trainer/config/algorithm.py").read_text())
    body = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "RolloutCorrectionConfig"
    ).body
    presets = {}
    for method in (n for n in body if isinstance(n, ast.FunctionDef)):
        names = [argument.arg for argument in method.args.args[1:]]
        defaults = dict(zip(names, map(ast.literal_eval, method.args.defaults), strict=True))
        result = next(n for n in ast.walk(method) if isinstance(n, ast.Return)).value
        presets[method.name] = {
            keyword.arg: eval(compile(ast.Expression(keyword.value), "algorithm.py", "eval"), dict(defaults))
            for keyword in result.keywords
        }
    return presets


def verl_loss(name, inputs, agg, weights=None, **config):
    return policy_loss.verl_loss(verl_core(), name, inputs, agg, weights, **config)


def trl_trainer():
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    return module.GRPOTrainer


def trl_loss(inputs, **options):
    return policy_loss.trl_loss(trl_trainer(), inputs, **options)


def trl_off_policy_mask(inputs, threshold):
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    return trl_trainer().get_off_policy_mask(
        advantages, inputs["logprobs"], inputs["rollout_logprobs"], inputs["mask"].double(), threshold
    )


def liger_loss(hidden, weight, ids, mask, advantages, old, ref, ratio, *, beta, epsilon_high, **options):
    module = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed")
    loss = module.LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, use_ref_model=bool(beta), epsilon_high=epsilon_high, **options
    )
    ref = ref if beta else None
    return loss(
        hidden, weight, ids, mask.long(), advantages, old_per_token_logps=old, ref_per_token_logps=ref,
        vllm_is_ratio=ratio,
    )[0]  # fmt: skip
