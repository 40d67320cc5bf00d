"""axolotl's asynchronous GRPO, which scores tokens in methods of its own."""

import contextlib
import threading

import earlier
import pytest
import runs
import torch
from axolotl.core.trainers.grpo import async_trainer
from earlier import Widest

import rlkernel
from rlkernel.integrations.axolotl import scoring

TRAINER = "AsyncGRPOTrainer"
SCORES = f"{TRAINER}._get_per_token_logps_and_entropies"
FLAT = f"{SCORES}_flattened"
PRODUCER = {"use_data_producer": True, "beta": 0.0}


@pytest.fixture
def in_fp32(monkeypatch):
    """axolotl runs its scores in bf16's autocast whatever the model is."""
    monkeypatch.setattr(torch, "autocast", lambda **_: contextlib.nullcontext())


@pytest.mark.parametrize("more", [{}, {"batch_flattening": True}], ids=["padded", "flattened"])
def test_trains_the_same(model_path, in_fp32, more):
    groups = PRODUCER | (
        {"loss_type": "luspo"} if not more else {}
    )  # which has the padding behind completions
    if more:
        more |= {"attn_implementation": "flash_attention_2"}  # that axolotl asks for, and needs a GPU
    stock = train(model_path, groups, more)
    ours = train(model_path, groups, more, plugin=True)
    patch = runs.plugin().patch
    assert patch.calls == {FLAT if more else SCORES: 2} and not patch.fallbacks
    earlier.check_same(ours, stock)


def train(model_path, groups, more, plugin=False):
    cfg = runs.config(model_path, "grpo", plugin, groups, **more)
    if more:
        cfg.attn_implementation = "eager"
    trainer = runs.made(cfg)
    trainer.train()
    if plugin:
        runs.plugin().post_train(cfg, trainer.model)
    return earlier.log_of(trainer), {name: x.clone() for name, x in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def trainer(model_path):
    return runs.made(runs.config(model_path, "grpo", groups=PRODUCER | {"temperature": 0.7}))


@pytest.fixture
def samples():
    """64 samples with padding on both sides of six and five tokens."""
    ids = torch.randint(4, 40, (4, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[3, :1] = mask[0, 8:] = mask[3, 10:] = 0
    prompt = mask.clone()
    prompt[:, 6:] = 0
    return [x.repeat(16, 1) for x in (ids.masked_fill(mask == 0, 0), mask, prompt)]


def asked(trainer, samples, kind, **more):
    ids, mask, prompt = samples
    kept = mask[:, 6:]
    flat = {} if kind == SCORES else {"prompt_mask": prompt}
    result = getattr(trainer, kind.rpartition(".")[2])(trainer.model, ids, mask, 5, 32, **flat, **more)
    scores = result if isinstance(result, tuple) else (result,)
    return [x.float() * kept for x in scores if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [SCORES, FLAT, f"{TRAINER}._get_per_token_logps_flattened"])
def test_scores(trainer, samples, kind, dtype, request):
    if dtype == torch.float32:
        request.getfixturevalue("in_fp32")
    more = {"compute_entropy": True} if "entropies" in kind else {}
    with torch.no_grad():
        with Widest() as all_logits:
            stock = asked(trainer, samples, kind, **more)
        limited = rlkernel.workspace.limited(2**20)  # has room for tiles of 128 rows
        with rlkernel.patch_axolotl() as patch, limited, Widest() as widest:
            ours = asked(trainer, samples, kind, **more)
    assert patch.calls == {kind: 1} and not patch.fallbacks and widest.rows <= 128 < 190 < all_logits.rows
    assert len(ours) == len(stock) == 1 + bool(more)
    limit = 1e-5 if dtype == torch.float32 else 0.1
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit)


def test_another_thread_gets_logits(trainer, samples):
    """As one that generates, while this one scores."""
    ids, seen = samples[0], {}

    def generates():
        with torch.no_grad():
            seen["logits"] = trainer.model(input_ids=ids).logits

    def beside(*_):
        thread = threading.Thread(target=generates)
        thread.start()
        thread.join()

    with torch.no_grad():
        want = trainer.model(input_ids=ids).logits
        stock = asked(trainer, samples, SCORES)
        hook = trainer.model.model.register_forward_hook(lambda *_: hook.remove() or beside())
        with rlkernel.patch_axolotl() as patch:
            ours = asked(trainer, samples, SCORES)
    assert patch.calls == {SCORES: 1} and torch.equal(seen["logits"], want)
    torch.testing.assert_close(ours, stock, rtol=0, atol=0.1)


def test_what_ligers_kernel_scores(trainer, samples, monkeypatch):
    monkeypatch.setattr(trainer, "use_liger_kernel", True)
    monkeypatch.setattr(async_trainer, "_fused_selective_log_softmax", None)
    with torch.no_grad(), pytest.warns(UserWarning, match=scoring.LIGER), rlkernel.patch_axolotl() as patch:
        asked(trainer, samples, SCORES)
    assert patch.fallbacks == {f"{SCORES}: {scoring.LIGER}": 1}
    assert patch.calls == {"selective_log_softmax": 2}  # without Liger it would read the logits like this


def test_it_does_not_pack(trainer, samples):
    with pytest.warns(UserWarning, match="AsyncGRPOTrainer overrides it"):
        patch = rlkernel.patch_axolotl(prefix_sharing=True)
        trainer.train()
        patch.undo()
    assert patch.calls and not patch.trl.prefix.tokens


@pytest.mark.parametrize(
    "groups, error",
    [
        ({"async_prefetch": True}, "too many values to unpack"),
        ({"use_data_producer": True, "beta": 0.04}, "unexpected keyword argument 'num_tiles'"),
    ],
    ids=["prefetch", "reference"],
)
def test_what_axolotl_alone_does_not_train(model_path, groups, error):
    """With the TRL that it pins, in one process."""
    with pytest.raises((ValueError, TypeError), match=error):
        runs.made(runs.config(model_path, "grpo", groups=groups)).train()
