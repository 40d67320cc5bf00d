"""Calls of every compiled kernel as ops make them, until each tensor that one may take was given."""

from functools import cache
from importlib.util import find_spec

import torch

import rlkernel
from rlkernel import native
from rlkernel.bench import cases, parity
from rlkernel.calls.swiglu import ACTIVATIONS
from rlkernel.consistency import composed
from rlkernel.native.prefix_shared_attention.kernels import attention_merge, gather_kv, segment_reduce
from rlkernel.reference import paged_prefix_attention as paged
from rlkernel.reference import rotary


class Recording:
    """A part that keeps what its kernels are called with."""

    def __init__(self, part):
        self.module, self.calls = part, {}

    def __getattr__(self, name):
        kernel = getattr(self.module, name)
        if not callable(kernel):
            return kernel

        def called(*arguments, **fields):
            self.calls.setdefault(name, []).append(fields)
            kernel(*arguments, **fields)

        return called


CU_SEQLENS = torch.tensor([0, 3, 8])


def _benchmarks():
    """Each op that has compiled kernels, forward and backward, on all small cases of its benchmark."""
    for op, module in cases.modules(None).items():
        if find_spec(f"{native.__name__}.{op}") is None:
            continue
        for case in module.PRESETS["tiny"]:
            if case.dtype == "float64" or case.axis:
                continue
            case = case.replace(op=op, gradients=case.gradients or module.GRADIENTS)
            inputs = parity.make_inputs(module, case, "cpu")
            upstream = parity.upstream(module, case, inputs)
            parity.outcome(parity.ours(module, op, "native"), inputs, case, upstream)


def _tokens(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    mask = torch.rand(shape, generator=generator) < 0.8
    mask[..., 0] = True
    return lambda: torch.randn(shape, generator=generator) / 4, mask


def _groups():
    rlkernel.group_advantages(torch.arange(4.0), group_ids=torch.tensor([1, 0, 1, 0]))


def _advantages():
    noise, mask = _tokens(8)
    packed = {"mask": mask, "cu_seqlens": CU_SEQLENS}
    last, lam = torch.ones(2), torch.full((2,), 0.9)
    rlkernel.gae(noise(), noise(), gamma=0.9, lam=lam, last_values=last, **packed)
    rewards = torch.arange(8.0).view(4, 2)
    counts, weights = torch.tensor([[True, True]] * 4), torch.tensor([1.0, 2.0])
    for options in (
        {"group_size": 2, "reward_weights": weights, "mask": counts, "estimator": "gdpo"},
        {"group_offsets": torch.tensor([0, 1, 4]), "reward_weights": weights, "scale_rewards": "batch"},
    ):
        rlkernel.group_advantages(rewards, **options)
    _groups()
    rlkernel.group_advantages(rewards[:, 0], group_size=2, estimator="remax", baselines=torch.ones(4))
    rlkernel.group_advantages(rewards[:, 0], group_size=2, estimator="opo", lengths=torch.arange(1, 5))


def _losses():
    noise, mask = _tokens(8)
    packed = {"mask": mask, "cu_seqlens": CU_SEQLENS}
    one = torch.tensor(7.0)

    def policy(**options):
        logprobs = noise().requires_grad_()
        rlkernel.policy_loss(logprobs, noise(), noise(), **packed | options).loss.backward()

    entropy = noise().requires_grad_()
    correction = rlkernel.RolloutCorrection(staleness_decay=0.9, high=2.0)
    policy(ref_logprobs=noise(), beta=0.1, entropy=entropy, entropy_coef=0.1)
    policy(rollout_logprobs=noise(), correction=correction, staleness=torch.ones(2))
    policy(loss_agg_mode="seq-mean-token-mean", token_counts=torch.tensor([3.0, 4.0]), num_items_in_batch=2)
    policy(loss_type="clip_cov", cov_ratio=0.5)

    def preference(loss_type, ref=True, **options):
        logprobs, reference = noise().requires_grad_(), noise() if ref else None
        rlkernel.preference_loss(
            logprobs, reference, **packed | {"loss_type": loss_type} | options
        ).loss.backward()

    preference("sigmoid", use_weighting=True, log_sum_sq_probs=noise(), nll_coef=1.0, nll_mask=mask)
    preference("sigmoid", num_items_in_batch=one, nll_coef=1.0, num_tokens_in_batch=one)
    preference("bco_pair", running_delta=torch.zeros(2))
    preference("kto", labels=torch.tensor([True, False]), kl=one)

    values = noise().requires_grad_()
    rlkernel.value_loss(values, noise(), num_items_in_batch=one, **packed).loss.backward()
    rlkernel.kl_shaped_rewards(noise(), noise(), noise(), beta=0.1, **packed)
    rlkernel.whiten(noise(), mask, weights=noise().abs())


def _logprobs():
    noise, _ = _tokens(3, 10)
    targets, temperature = torch.tensor([1, 9, -100]), torch.tensor([0.5, 1.0, 2.0])
    lists = {"support_ids": torch.arange(6, dtype=torch.int32), "support_offsets": torch.tensor([0, 4, 6, 6])}

    def backward(out):
        (out.logprobs + 0.1 * out.entropy + 0.1 * out.lse).sum().backward()

    for support in ({}, lists):
        logits = noise().requires_grad_()
        backward(rlkernel.logprob(logits, targets, temperature=temperature, return_entropy=True, **support))
    bias, options = noise()[0], {"temperature": temperature, "return_entropy": True}
    for frozen in (False, True):
        hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (3, 10))
        head = weight.detach() if frozen else weight
        backward(rlkernel.linear_logprob(hidden, head, targets, bias=bias, **options))


def _divergences():
    for beta in (0.0, 0.5):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            logits, teacher = torch.randn(2, 3, 10, dtype=dtype)
            out = rlkernel.divergence(
                logits.requires_grad_(), teacher, beta=beta, mask=torch.tensor([1, 0, 1]), return_entropy=True
            )
            out.divergence.sum().backward()
    models = [torch.randn(n, size, requires_grad=size == 8) for size in (8, 6) for n in (3, 10)]
    out = rlkernel.linear_divergence(*models, beta=0.5, mask=torch.tensor([1, 0, 1]), softcap=5.0)
    out.divergence.sum().backward()


def _samples():
    noise, _ = _tokens(3, 70)
    each = {"seeds": torch.arange(3), "positions": torch.arange(3), "temperature": torch.full((3,), 0.5)}
    shares = {name: torch.full((3,), 0.9) for name in ("top_p", "min_p", "typical_p")}
    cutoffs = {"top_k": torch.full((3,), 9), "top_n_sigma": torch.ones(3), "epsilon_cutoff": 1e-3}
    words = {"token_bitmask": torch.full((3, 3), -1, dtype=torch.int32), "logit_bias": {3: 1.0}}
    wanted = {"return_entropy": True, "return_support": 8, "return_rank": True}
    rlkernel.sample(noise(), **each, **shares, **cutoffs, **words, **wanted)
    rlkernel.logprob(
        noise(), torch.tensor([1, 2, 3]), support_ids=torch.tensor([1], dtype=torch.int32),
        support_offsets=torch.tensor([0, 1, 1, 1]),
    )  # fmt: skip


def _products():
    noise, _ = _tokens(3, 10)
    rlkernel.matmul(noise(), noise().t(), noise()[:, 0])


def _prefixes():
    out, part = torch.randn(2, 5, 3, 8)
    lse, part_lse = torch.randn(2, 3, 5)
    index, offsets = torch.tensor([0, 4, 2]), torch.tensor([0, 1, 3])
    attention_merge(out, lse, part, part_lse, torch.zeros(3))
    gather_kv(out, part, index)
    segment_reduce(out, part, index, offsets)


def _pages():
    rlkernel.paged_prefix_attention(**paged.make_inputs(70, 1, 2, 3, head_dim=8), sinks=torch.zeros(4))


def _norms():
    """Rows of a part of a vector, of several threads and of all, strided and with each kind of weight."""
    for length in (5, 70, 1030):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, residual = torch.randn(2, 3, 2, length, dtype=dtype)[:, :, :1].clone().requires_grad_()
            for weight in (torch.ones(length, dtype=dtype), torch.ones(length)):
                rlkernel.rms_norm(x, weight.requires_grad_()).sum().backward()
                rlkernel.layer_norm(x, weight, weight).sum().backward()
                out = rlkernel.rms_norm(x[:, 0], weight, residual=residual[:, 0])
                (out.normed + out.summed).sum().backward()


def _composed():
    for length in (5, 70, 1030):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, residual = torch.randn(2, 6, length, dtype=dtype)
            composed.rms_norm(x, torch.ones(length, dtype=dtype), 1e-6, residual)
            with rlkernel.batch_invariant():
                _ = x[:, :-1].softmax(-1), x.log_softmax(-1)


def _elements():
    """Of each kind, of rows that are a part of wider ones and alone."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        wide = torch.randn(2, 3, 2, 150, dtype=dtype).requires_grad_()
        for activation in ACTIVATIONS:
            rlkernel.swiglu(wide, activation=activation).sum().backward()
            gate, up = wide[:, :, 0, :5], wide[:, :, 1, 8:13]
            rlkernel.swiglu(gate, up, activation=activation, rounding="after_product").sum().backward()


def _turned():
    """Transposed and packed, by position and not, with half tables, and a part of the head alone."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs = rotary.make_inputs(2, 3, 2, 24, rotary_dim=20, dtype=dtype)
        rlkernel.rotary(
            **{name: x.requires_grad_(name in "qk") for name, x in inputs.items()}
        ).q.sum().backward()
        packed = rotary.make_inputs(2, 3, 2, 24, packed=True, dtype=dtype)
        for name in ("cos", "sin"):
            packed[name] = packed[name][:, :12].contiguous().float()
        for interleaved in (False, True):
            options = {"interleaved": interleaved, "rotary_dim": 24, "rounding": "after_sum"}
            rlkernel.rotary(**packed, **options, positions=torch.tensor([1, 0, 5, 3, 2, 2]))


ONE_OF_EACH = (_advantages, _losses, _logprobs, _samples, _prefixes, _norms, _elements, _turned)
CALLS = (
    _benchmarks,
    *ONE_OF_EACH,
    _divergences,
    _products,
    _pages,
    _composed,
)  # those of kernels that are a CPU's alone

# (kernel, field, what is wrong) that is another right call: of a sequence, a group or a token less
ALLOWED = {
    ("paged_prefix_attention", "key_cache", "not dense"),  # any strides
    ("paged_prefix_attention", "value_cache", "not dense"),
    ("sampling_statistics", "logits", "one element short"),
    ("sampling_finish", "support", "one element short"),  # room for a token less
    ("logprob_forward", "logits", "one element short"),
    ("logprob_support_forward", "logits", "one element short"),
    ("logprob_support_backward", "out", "one element short"),
    ("kl_shaped_rewards", "cu_seqlens", "one element short"),
    ("group_advantages", "offsets", "one element short"),
    ("matmul", "a", "not dense"),
    ("matmul", "b", "not dense"),
}


@cache
def recorded():
    """The calls of each kernel."""
    recording = Recording(native.extension().cpu)
    with native.emulated(recording), rlkernel.use_backend("native"):
        for make in CALLS:
            make()
        recording.part = "emulated"  # ids are sorted by torch
        _groups()
    return recording.calls
