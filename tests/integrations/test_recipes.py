"""The recipes of GRPO with LoRA, with ZeRO-3 and with FSDP 2, in short forms: what they print is so."""

import os

import pytest
import ranks
import recipes
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed")
TRAINER = trl.GRPOTrainer  # imported here, and by that before ranks are forked

SHORT = ["--short", "--steps", "8", "--threads", "1", "--workspace", "4", "--quiet"]


@pytest.fixture(autouse=True)
def quiet_transformers():
    from transformers.utils import logging

    level, threads = logging.get_verbosity(), torch.get_num_threads()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()
    torch.set_num_threads(threads)


def assert_saved(found, printed):
    """Rewards of both runs rise, the steps are those of stock TRL, and the peak of memory falls."""
    stock, patched, logprobs = found["stock"], found["patched"], found["logprobs"]
    # later on one sample may fall the other way, and then the runs go their own ways
    assert logprobs["same_tokens"] >= 3 and logprobs["first"] < 1e-5
    for name in ("reward", "loss", "grad_norm"):
        assert patched[name][:2] == pytest.approx(stock[name][:2], rel=1e-3, abs=1e-5), name
    assert min(recipes.rise(stock["reward"]), recipes.rise(patched["reward"])) > 0.1
    assert patched["calls"]["_ChunkedLogProbFunction"] >= len(patched["reward"]) and not patched["fallbacks"]
    saved = stock["summary"]["peak_mib"] - patched["summary"]["peak_mib"]
    assert saved > stock["summary"]["peak_mib"] / 2
    assert f"Saved: {saved:.0f} MiB." in printed and "Left to TRL: nothing." in printed


def test_lora(capsys):
    pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    found = recipes.run("grpo_lora", *SHORT)
    printed = capsys.readouterr().out
    assert_saved(found, printed)
    assert max(found["stock"]["kl"]) > 1e-3  # the adapter moves from its base, which is the reference
    assert found["patched"]["kl"][:2] == pytest.approx(found["stock"]["kl"][:2], rel=1e-2, abs=1e-5)
    assert found["patched"]["trained"] < found["patched"]["parameters"] / 10


def test_an_adapter_on_the_head_is_refused(capsys):
    """By TRL, whose loss would leave it out, and so the patch: nothing is trained that is not scored."""
    pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        recipes.run("grpo_lora", *SHORT, "--targets", "lm_head")


def _launched(rank, kind, command):
    """Both runs of a rank, in the environment that ``accelerate launch`` makes of this command."""
    import accelerate.state as state
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    here = dict(os.environ)
    at = command.index("accelerate.commands.launch")
    args, defaults, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(command[at + 1 :])
    )
    assert args.num_processes == ranks.RANKS
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        told = prepare_deepspeed_cmd_env(args)[1]
    else:
        told = prepare_multi_gpu_env(args)
    os.environ.update(
        {name: value for name, value in told.items() if name.startswith(("ACCELERATE", "FSDP"))}
    )
    recipe = recipes.load("grpo_sharded")
    argv = [args.training_script, *args.training_script_args]
    assert argv[0] == recipe.__file__
    at = argv.index("--worker") + 1
    for mode in ("stock", "patched"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        recipes.worker(recipe, [*argv[:at], mode, *argv[at + 1 :]])
    os.environ.clear()
    os.environ.update(here)


@pytest.mark.parametrize("kinds", ranks.kinds("zero3", "fsdp2", apart=True))
def test_sharded(kinds, tmp_path, capsys):
    (kind,) = kinds
    modes = []

    def start(command):
        modes.append(command[command.index("--worker") + 1])
        if len(modes) == 1:  # the same processes run both
            ranks.run(_launched, kinds, tmp_path, command)

    found = recipes.run("grpo_sharded", kind, *SHORT, start=start)
    assert modes == ["stock", "patched"]
    assert_saved(found, capsys.readouterr().out)
    name = {"zero3": "DeepSpeedEngine", "fsdp2": "FSDPQwen2ForCausalLM"}[kind]
    assert found["stock"]["sharding"] == found["patched"]["sharding"] == name
    assert found["patched"]["tokens a row"] > 2
