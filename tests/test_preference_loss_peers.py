"""preference_loss against the loss code of TRL and Liger itself: values and gradients; each difference is a
test."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accuracy import error
from peer_sources import load
from preference_peers import IGNORED, batch_of_trl, head, trl_batch_loss

import rlkernel
from rlkernel.benchmarks import preference_loss as peers
from rlkernel.ops.preference_loss import rule as names
from rlkernel.reference.preference_loss import make_inputs

DPO = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
# TRL's own list of those that an f-divergence may go with
DIFFERENCES = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]


@pytest.fixture(scope="module")
def dpo():
    return pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is not installed").DPOTrainer


@pytest.fixture(scope="module")
def kto():
    return pytest.importorskip("trl.trainer.kto_trainer", reason="TRL is not installed").KTOTrainer


def grad_of(function, logprobs):
    x = logprobs.detach().requires_grad_()
    loss = function(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def check_same(theirs, inputs, tolerance=1e-12, **options):
    """Value and gradient of a peer's own code; of the compiled kernels too, as far as fp32 goes."""
    inputs = dict(inputs)
    logprobs = inputs.pop("logprobs")
    want, want_grad = grad_of(lambda x: theirs(inputs | {"logprobs": x}), logprobs)
    for backend, dtype in (("reference", logprobs.dtype), ("native", torch.float32)):
        given = {k: v.to(dtype) if v is not None and v.is_floating_point() else v for k, v in inputs.items()}
        tolerance = tolerance if backend == "reference" else max(tolerance, 1e-5)
        ours = functools.partial(rlkernel.preference_loss, **given, **options)
        with rlkernel.use_backend(backend):
            got, grad = grad_of(lambda x, ours=ours: ours(x).loss, logprobs.to(dtype))
        assert error(got, want) < tolerance * max(1, want.abs().item()), backend
        assert error(grad, want_grad) < tolerance * max(1, want_grad.abs().max().item()), backend


def smoothing_of(name):
    return 0.1 if name in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0


def without_sft(inputs, name):
    return inputs | {"ref_logprobs": None} if name == "sft" else inputs


@pytest.mark.parametrize("drift", [0.05, 1.0])
@pytest.mark.parametrize("kind", [{"ipo": True}, {}, {"label_smoothing": 0.1}], ids=str)
def test_is_openrlhfs_dpo(kind, drift):
    """DPOLoss of sums of log-probabilities, its IPO too."""
    loss = load("openrlhf", "openrlhf/models/loss.py", "DPOLoss").DPOLoss(0.3, **kind)
    inputs = make_inputs(12, 40, dtype=torch.float64, drift=drift)

    def theirs(x):
        ours, reference = (
            torch.where(inputs["mask"], x[k], 0).sum(-1).chunk(2) for k in ("logprobs", "ref_logprobs")
        )
        return loss(*ours, *reference)[0]

    options = {"loss_type": "ipo_sum"} if "ipo" in kind else {"loss_type": "sigmoid", **kind}
    check_same(theirs, inputs, beta=0.3, **options)


@pytest.mark.parametrize("drift", [0.05, 1.0])
@pytest.mark.parametrize("name", DPO)
def test_is_trls_dpo(dpo, name, drift):
    inputs = make_inputs(12, 40, dtype=torch.float64, drift=drift)
    options = {"loss_type": name, "label_smoothing": smoothing_of(name), "beta": 0.3}
    # TRL holds exo's epsilon in fp32
    check_same(
        lambda x: peers.trl_dpo_loss(dpo, inputs | {"logprobs": x["logprobs"]}, **options),
        without_sft(inputs, name), 1e-7 if name == "exo_pair" else 1e-12, **options,
    )  # fmt: skip


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_is_trls_f_dpo(dpo, name, divergence):
    inputs = make_inputs(8, 40, dtype=torch.float64, drift=0.05)
    options = {"loss_type": name, "label_smoothing": smoothing_of(name), "f_divergence_type": divergence}
    check_same(
        lambda x: peers.trl_dpo_loss(dpo, inputs | {"logprobs": x["logprobs"]}, **options),
        without_sft(inputs, name), 1e-7 if name == "exo_pair" else 1e-12, **options,
    )  # fmt: skip


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.7])
def test_is_trls_alpha_divergence(dpo, alpha):
    """In fp32: TRL's clamp knows no fp64."""
    inputs = make_inputs(8, 40, drift=0.2)
    inputs["ref_logprobs"][0] -= 20  # beyond the clamp with alpha 1.7
    for name in ("sigmoid", "ipo"):
        options = {
            "loss_type": name,
            "f_divergence_type": "alpha_divergence",
            "f_alpha_divergence_coef": alpha,
        }
        check_same(lambda x, o=options: peers.trl_dpo_loss(dpo, x, **o), inputs, 1e-3, **options)


@pytest.mark.parametrize("ld_alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "aot", "sft"])
def test_is_trls_ld_dpo(dpo, name, ld_alpha):
    inputs = make_inputs(8, 40, dtype=torch.float64)
    options = {"loss_type": name, "ld_alpha": ld_alpha}
    check_same(
        lambda x: peers.trl_dpo_loss(dpo, inputs | {"logprobs": x["logprobs"]}, **options),
        without_sft(inputs, name), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in DPO if name not in ("aot", "aot_unpaired", "sft")])
def test_is_trls_wpo(dpo, name):
    inputs = make_inputs(8, 40, dtype=torch.float64, extras=True)
    del inputs["nll_mask"]
    options = {"loss_type": name, "label_smoothing": smoothing_of(name), "use_weighting": True}
    if name == "hinge":  # TRL multiplies the relu's output in place, which autograd refuses
        with torch.no_grad(), rlkernel.use_backend("reference"):
            ours = rlkernel.preference_loss(**inputs, **options).loss
            assert error(ours, peers.trl_dpo_loss(dpo, inputs, **options)) < 1e-12
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad_of(
                lambda x: peers.trl_dpo_loss(dpo, inputs | {"logprobs": x}, **options), inputs["logprobs"]
            )
        return
    check_same(
        lambda x: peers.trl_dpo_loss(dpo, x, **options),
        inputs,
        1e-7 if name == "exo_pair" else 1e-12,
        **options,
    )


def test_is_trls_mpo(dpo):
    inputs = make_inputs(8, 40, dtype=torch.float64)
    check_same(
        lambda x: peers.trl_dpo_loss(
            dpo, x, loss_type=["sigmoid", "bco_pair", "sft", "aot"], loss_weights=[0.8, 0.2, 1.0, 0.5]
        ),
        inputs, loss_type=["sigmoid", "bco_pair", "sft", "aot"], loss_weights=[0.8, 0.2, 1.0, 0.5],
    )  # fmt: skip


def test_trl_does_not_smooth_the_labels_of_sigmoid(dpo):
    """Difference: ours is the conservative DPO of TRL's CPO and TPO; TRL's DPO leaves the number unused."""
    inputs = make_inputs(8, 40, dtype=torch.float64)
    plain = rlkernel.preference_loss(**inputs).loss
    assert error(peers.trl_dpo_loss(dpo, inputs, label_smoothing=0.2), plain) < 1e-12
    assert error(rlkernel.preference_loss(**inputs, label_smoothing=0.2).loss, plain) > 1e-3
    both = {"loss_type": ["sigmoid", "robust"], "label_smoothing": [0.0, 0.2]}  # TRL's 0.2 for both
    check_same(
        lambda x: peers.trl_dpo_loss(dpo, x, loss_type=["sigmoid", "robust"], label_smoothing=0.2),
        inputs,
        **both,
    )


def test_trl_counts_pairs_with_an_empty_side(dpo):
    """Difference: such a pair is none here; there it adds the loss of a log-ratio of 0."""
    inputs = make_inputs(8, 40, dtype=torch.float64)
    inputs["mask"][5] = False
    rows = torch.tensor([0, 2, 3, 4, 6, 7])
    rest = {k: v[rows] for k, v in inputs.items()}
    ours = rlkernel.preference_loss(**inputs).loss
    assert error(ours, peers.trl_dpo_loss(dpo, rest)) < 1e-12
    assert error(ours, peers.trl_dpo_loss(dpo, inputs)) > 1e-3


def test_trls_discopop_overflows_where_ours_does_not(dpo):
    """Difference: exp(-z) * sigmoid(z / tau) is one exponential here; there it is infinity * 0."""
    inputs = make_inputs(2, 40)
    inputs["logprobs"][0] -= 40
    options = {"loss_type": "discopop", "beta": 1.0}
    loss, grad = grad_of(
        lambda x: rlkernel.preference_loss(x, inputs["ref_logprobs"], inputs["mask"], **options).loss,
        inputs["logprobs"],
    )
    assert bool(loss.isfinite()) and bool(grad.isfinite().all())
    assert bool(peers.trl_dpo_loss(dpo, inputs, **options).isnan())


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("desirable", [0, 3, 7])
def test_is_trls_kto(kto, name, desirable):
    inputs = make_inputs(7, 40, dtype=torch.float64, drift=1.0)
    inputs["labels"] = torch.arange(7) < desirable
    options = {"loss_type": name, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    for kl in (torch.tensor([0.4, 3.0], dtype=torch.float64), torch.tensor([-2.0, 1.0], dtype=torch.float64)):
        ours = {"kl": kl.mean().clamp(min=0)} if name == "kto" else {}
        check_same(lambda x, kl=kl: peers.trl_kto_loss(kto, x, kl, **options), inputs, **ours, **options)


def test_trls_kto_drops_what_is_not_a_number(kto):
    """Difference: its mean leaves out a sequence whose loss is NaN; here NaN shows and is counted."""
    inputs = make_inputs(4, 20, dtype=torch.float64)
    inputs["labels"] = torch.arange(4) < 2
    inputs["logprobs"][1, inputs["mask"][1]] = torch.nan
    assert bool(peers.trl_kto_loss(kto, inputs, torch.zeros(2), loss_type="kto").isfinite())
    out = rlkernel.preference_loss(**inputs, loss_type="kto")
    assert bool(out.loss.isnan()) and out.metrics[rlkernel.PREFERENCE_METRICS.index("not_finite")] == 1


def test_trls_ipo_of_cpo_scores_the_mean():
    """Difference: with AlphaPO's alpha, ours is the mean of the score, as TRL's DPO has it."""
    trainer = pytest.importorskip(
        "trl.experimental.cpo.cpo_trainer", reason="TRL is not installed"
    ).CPOTrainer
    batch = batch_of_trl()
    this = SimpleNamespace(loss_type="ipo", beta=0.7, alpha=0.25, cpo_alpha=0.0, pad_token_id=0)
    hidden, weight = head(batch)
    theirs = trl_batch_loss(trainer, this, batch, hidden, weight)
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, batch["targets"][..., None])[..., 0]
    means = torch.where(batch["counted"], logprobs, 0).sum(1) / batch["counted"].sum(1)
    scores = ((1 - (-0.25 * means).exp()) / 0.25).chunk(2)
    assert error(theirs, ((scores[0] - scores[1] - 1 / 1.4) ** 2).mean()) < 1e-5
    options = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.75, "beta": 0.7}
    ours = rlkernel.preference_loss(logprobs, None, batch["counted"], loss_type="ipo", **options).loss
    assert error(ours, theirs) > 1e-2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
def test_is_trls_cpo(name, alpha, smoothing):
    """AlphaPO's reward is the score of the alpha divergence with 1 - alpha, of sums or (simpo) of means."""
    if name in ("hinge", "ipo") and (smoothing or alpha and name == "ipo"):
        pytest.skip(
            "TRL does not smooth it" if smoothing else "ours divides the score by the length, TRL the sum"
        )
    trainer = pytest.importorskip(
        "trl.experimental.cpo.cpo_trainer", reason="TRL is not installed"
    ).CPOTrainer
    batch = batch_of_trl()
    this = SimpleNamespace(
        loss_type=name, beta=0.7, alpha=alpha, simpo_gamma=0.4, label_smoothing=smoothing, cpo_alpha=0.6,
        pad_token_id=0,
    )  # fmt: skip
    options = {"nll_coef": 0.6, "beta": 0.7, "gamma": 0.4, "loss_type": name, "label_smoothing": smoothing}
    if name == "sigmoid":
        options["loss_type"] = "cpo"
    if alpha:
        options |= {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1 - alpha}
    check_head(lambda hidden, weight: trl_batch_loss(trainer, this, batch, hidden, weight), batch, **options)


def test_is_trls_orpo():
    """The likelihood there is of prompt and completion."""
    trainer = pytest.importorskip(
        "trl.experimental.orpo.orpo_trainer", reason="TRL is not installed"
    ).ORPOTrainer
    batch = batch_of_trl()
    this = SimpleNamespace(beta=0.4, padding_value=0)
    check_head(
        lambda hidden, weight: trl_batch_loss(trainer, this, batch, hidden, weight), batch, nll=True,
        loss_type="orpo", beta=0.4,
    )  # fmt: skip


def check_head(theirs, batch, reference=None, nll=False, labels=None, tolerance=2e-5, **options):
    """Gradients of hidden states and weight, through ours and a log_softmax in front of it."""
    results = []
    for ours in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in head(batch))
        if ours:
            logprobs = (
                (hidden @ weight.T)
                .log_softmax(-1)
                .gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
            )
            extra = {"nll_mask": batch["attended"]} if nll else {}
            extra |= {"labels": labels} if labels is not None else {}
            loss = rlkernel.preference_loss(logprobs, reference, batch["counted"], **extra, **options).loss
        else:
            loss = theirs(hidden, weight)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for a, b in zip(*results, strict=True):
        assert error(b, a) < tolerance * max(1, a.abs().max().item())


def liger(name):
    return pytest.importorskip(f"liger_kernel.chunked_loss.{name}_loss", reason="Liger is not installed")


def reference_of(batch):
    """Other hidden states, and the sums of their logprobs."""
    hidden, weight = head(batch, seed=5)
    logprobs = (
        (hidden @ weight.T).log_softmax(-1).gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
    )
    return hidden, weight, logprobs


LIGER_DPO = [
    "sigmoid",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]


@pytest.mark.parametrize("name", LIGER_DPO)
def test_is_ligers_dpo(name):
    batch, smoothing = batch_of_trl(), 0.1 if name in ("robust", "exo_pair") else 0.0
    ref_hidden, ref_weight, reference = reference_of(batch)
    module = liger("dpo").LigerFusedLinearDPOLoss(
        beta=0.5, loss_type=name, label_smoothing=smoothing, compiled=False, compute_nll_loss=True, alpha=0.3
    )
    check_head(
        lambda hidden, weight: module(weight, hidden, batch["labels"], ref_input=ref_hidden,
        ref_weight=ref_weight)[0],
        batch, reference, loss_type=name, label_smoothing=smoothing, beta=0.5, nll_coef=0.3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "module", "options"),
    [
        ("orpo", "LigerFusedLinearORPOLoss", {"beta": 0.4}),
        ("simpo", "LigerFusedLinearSimPOLoss", {"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1}),
        ("cpo", "LigerFusedLinearCPOLoss", {"beta": 0.3, "label_smoothing": 0.1}),
    ],
)
def test_is_ligers(name, module, options):
    batch = batch_of_trl()
    fused = getattr(liger(name), module)(**options, compiled=False)
    # its likelihood is part of all three
    check_head(
        lambda hidden, weight: fused(weight, hidden, batch["labels"])[0],
        batch,
        loss_type=name,
        nll_coef=1.0,
        **options,
    )


def test_is_ligers_kto():
    batch = batch_of_trl()
    ref_hidden, ref_weight, reference = reference_of(batch)
    labels = torch.tensor([True, False, True, True, False, False])
    module = liger("kto").LigerFusedLinearKTOLoss(beta=0.5, compiled=False, use_ref_model=True)
    kl = torch.tensor(0.3)
    check_head(
        lambda hidden, weight: module(
            hidden, weight, batch["labels"], preference_labels=labels, ref_input=ref_hidden,
            ref_weight=ref_weight, kl=kl
        )[0],
        batch, reference, labels=labels, loss_type="kto", beta=0.5, kl=kl,
    )  # fmt: skip


def test_every_type_of_trl_is_known():
    config = pytest.importorskip("trl", reason="TRL is not installed").DPOConfig
    assert set(DPO) <= set(names.TERMS)
    documented = config.__doc__.split("Possible values are:")[1].split("If multiple")[0]
    assert {name for name in names.TERMS if f"'{name}'" in documented} == set(DPO)
    assert F.cross_entropy.__defaults__[2] == IGNORED
