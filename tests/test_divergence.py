"""divergence: fp64 is the truth, TRL's and Liger's functions the peers; one body for every backend."""

import sys

import instruction_sets
import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.calls.divergence import DivergenceCall
from rlkernel.ops.divergence import op
from rlkernel.reference.divergence import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("divergence"))
pytestmark = pytest.mark.usefixtures("poison")
BETAS = (0.0, 0.3, 1.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def upstream(x):
    g = torch.Generator().manual_seed(len(x.flatten()))
    return torch.randn(x.shape, generator=g).to(x)


def run(backend, inputs, grad=None, **options):
    """The outputs by name, and the gradient of the logits."""
    inputs = inputs | {"logits": inputs["logits"].detach().requires_grad_()}
    with running(backend):
        out = rlkernel.divergence(**inputs, **options)
        grad = upstream(out.divergence) if grad is None else grad
        (found,) = torch.autograd.grad(out.divergence, inputs["logits"], grad.to(out.divergence))
    got = {name: x.detach() for name, x in out._asdict().items() if x is not None}
    return got | {"grad": found}


def double(inputs):
    return {name: x.double() for name, x in inputs.items()}


def check_against_fp64(backend, inputs, **options):
    ours, torchs, truth = (
        run(b, x, **options)
        for b, x in ((backend, inputs), ("reference", inputs), ("reference", double(inputs)))
    )
    assert ours["divergence"].dtype == torch.float32 and ours["grad"].dtype == inputs["logits"].dtype
    # differences of logarithms of the order of 1, of which the mixture takes a part
    magnitude = 0.5 if 0 < options["beta"] < 1 else 1.0
    for name, exact in truth.items():
        check(name, ours[name], torchs[name], exact, magnitude if name != "entropy" else 0.0)


def definition(logits, teacher_logits, beta, temperature=1.0):
    """The sums as they are written down, by autograd."""
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (logits, teacher_logits))
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (p * (log_p - log_q)).sum(-1)
    log_m = ((1 - beta) * p + beta * q).log()
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


@pytest.mark.parametrize("beta", (0.0, 1e-6, 0.25, 0.5, 1 - 1e-6, 1.0))
@pytest.mark.parametrize("temperature", (1.0, 0.3, 2.5))
def test_the_reference_is_the_definition(beta, temperature):
    inputs = double(make_inputs(7, 30, apart=2.0))
    got = run("reference", inputs, beta=beta, temperature=temperature, return_entropy=True)
    leaf = inputs["logits"].clone().requires_grad_()
    want = definition(leaf, inputs["teacher_logits"], beta, temperature)
    torch.testing.assert_close(got["divergence"], want, rtol=1e-10, atol=1e-14)
    (grad,) = torch.autograd.grad(want, leaf, upstream(want))
    torch.testing.assert_close(got["grad"], grad, rtol=1e-8, atol=1e-14)
    entropy = torch.distributions.Categorical(logits=inputs["logits"] / temperature).entropy()
    torch.testing.assert_close(got["entropy"], entropy)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_matches_fp64(backend, device, dtype, beta):
    whole = ((40, 1), (40, 7), (30, 64), (20, 1000), (9, 2049), (3, 33000))
    few = ((3, 1), (20, 7), (6, 300))
    for n, vocab in few if is_slow(backend, device) else whole:
        for apart in (0.05, 3.0):
            inputs = make_inputs(n, vocab, dtype=dtype, device=device, apart=apart)
            check_against_fp64(backend, inputs, beta=beta, return_entropy=True)
    inputs = make_inputs(20, 90, dtype=dtype, device=device)
    mask = torch.arange(20, device=device) % 3 > 0
    for temperature in (0.37, 2.5):
        check_against_fp64(backend, inputs, beta=beta, temperature=temperature, mask=mask)


@ON_EVERY_BACKEND
def test_a_teacher_of_another_width(backend, device):
    for of_student, of_teacher in ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
        inputs = make_inputs(12, 77, device=device)
        inputs = {
            "logits": inputs["logits"].to(of_student),
            "teacher_logits": inputs["teacher_logits"].to(of_teacher),
        }
        check_against_fp64(backend, inputs, beta=0.5)
        if backend == "native":  # which widens them first
            for beta in BETAS:
                got = run(backend, inputs, beta=beta)
                wide = run(backend, {name: x.float() for name, x in inputs.items()}, beta=beta)
                assert_equal("divergence", got["divergence"], wide["divergence"])
                assert_equal("grad", got["grad"], wide["grad"].to(of_student))


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", BETAS)
def test_offsets_and_equal_rows(backend, device, beta):
    """A constant that all logits of a row share costs no digits, and equal logits are no divergence apart."""
    inputs = make_inputs(6, 50, device=device)
    inputs = {name: (x * 8).round() / 8 for name, x in inputs.items()}  # which the offsets leave exact
    plain = run(backend, inputs, beta=beta)
    moved = {"logits": inputs["logits"] + 1024, "teacher_logits": inputs["teacher_logits"] - 4096}
    for name, x in run(backend, moved, beta=beta).items():
        assert_equal(name, x, plain[name])
    same = run(backend, inputs | {"teacher_logits": inputs["logits"]}, beta=beta)
    assert (same["divergence"] == 0).all()
    assert same["grad"].abs().max() < 1e-6


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", BETAS)
def test_near_each_other_the_digits_stay(backend, device, beta):
    """Of rows nearly one the divergence is far below what its terms are rounded to; never below 0."""
    for vocab in (30, 300) if is_slow(backend, device) else (30, 5000):
        for apart in (1e-2, 1e-3, 1e-4):
            inputs = make_inputs(5, vocab, device=device, apart=apart)
            got, truth = run(backend, inputs, beta=beta), run("reference", double(inputs), beta=beta)
            lost = (got["divergence"] / truth["divergence"] - 1).abs().max()
            assert lost < 2e-6 / apart and (got["divergence"] >= 0).all()
            far = (got["grad"] - truth["grad"]).norm() / truth["grad"].norm()
            assert far < 2e-6 / apart


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", (0.1, 0.9, 1.0))
def test_gradients_of_peaked_rows(backend, device, beta):
    """Nearly all probability is on one token, whose gradient is far below what statistics are rounded to."""
    x = torch.tensor([[-8.5625, 5.53125, -9.0], [1.0, 2.0, 13.0]], device=device)
    inputs = {"logits": x, "teacher_logits": x - torch.tensor([0.0, 0.03125, 0.0], device=device)}
    got, truth = run(backend, inputs, beta=beta), run("reference", double(inputs), beta=beta)
    for found, exact in zip(got["grad"], truth["grad"], strict=True):
        assert (found - exact).norm() < 1e-2 * exact.norm()


@ON_EVERY_BACKEND
def test_a_beta_that_fp32_has_not(backend, device):
    """1 - beta has its digits too, which alone the gradient and the logarithm of the mixture have of it."""
    x = torch.tensor([[1.0, 2.0, 0.0, 0.5]], device=device)
    y = torch.tensor([[1.0, -200.0, 1.0, 0.3]], device=device)
    inputs = {"logits": x, "teacher_logits": y}
    for beta in (1 - 1e-8, 1 - 3e-6, 3e-6, 1e-8):
        got, truth = run(backend, inputs, beta=beta), run("reference", double(inputs), beta=beta)
        for name in ("divergence", "grad"):
            assert (got[name] - truth[name]).norm() < 1e-5 * truth[name].norm(), (beta, name)


@ON_EVERY_BACKEND
def test_tokens_without_probability(backend, device):
    """-inf in one or both rows; F.kl_div, and TRL's function with it, gives NaN."""
    inputs = make_inputs(4, 9, device=device)
    x, y = inputs["logits"], inputs["teacher_logits"]
    x[:, 2] = y[:, 2] = -torch.inf
    x[1, 4] = y[2, 5] = -torch.inf  # the student alone, the teacher alone
    left = torch.tensor([i for i in range(9) if i != 2], device=device)
    for beta in BETAS:
        got = run(backend, inputs, beta=beta, return_entropy=True)
        without = run(
            backend, {"logits": x[:, left], "teacher_logits": y[:, left]}, beta=beta, return_entropy=True
        )
        torch.testing.assert_close(got["divergence"], without["divergence"], rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(got["entropy"], without["entropy"], rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(
            got["grad"][:, left], without["grad"], rtol=2e-6, atol=1e-7, equal_nan=True
        )
        infinite = {0.0: [1], 1.0: [2]}.get(beta, [])
        assert got["divergence"].isinf().nonzero().flatten().tolist() == infinite
        rows = [r for r in range(4) if not (beta == 1 and r == 2)]
        assert got["grad"][rows].isfinite().all() and (got["grad"][rows, 2] == 0).all()
        assert got["grad"].isnan().all(-1).nonzero().flatten().tolist() == ([2] if beta == 1 else [])
        truth = run("reference", double(inputs), beta=beta)
        finite = truth["divergence"].isfinite()
        torch.testing.assert_close(
            got["divergence"].double()[finite], truth["divergence"][finite], rtol=1e-5, atol=1e-6
        )


@ON_EVERY_BACKEND
def test_rows_that_are_no_distribution(backend, device):
    inputs = make_inputs(8, 40, device=device)
    x, y = inputs["logits"], inputs["teacher_logits"]
    x[0, 3], x[1], x[2, 39], y[3, 0], y[4], y[5, 7] = (
        torch.nan,
        -torch.inf,
        torch.inf,
        torch.nan,
        -torch.inf,
        torch.inf,
    )
    for beta in BETAS:
        got = run(backend, inputs, torch.ones(8), beta=beta)
        assert got["divergence"].isnan().tolist() == [True] * 6 + [False] * 2
        assert got["grad"][:6].isnan().all() and got["grad"][6:].isfinite().all()
        # not read where nobody asks
        quiet = run(backend, inputs, torch.tensor([0.0] * 6 + [1.0] * 2), beta=beta)
        assert (quiet["grad"][:6] == 0).all()
        assert_equal("grad", quiet["grad"][6:], got["grad"][6:])
        masked = run(backend, inputs, torch.ones(8), beta=beta, mask=torch.arange(8) > 5, return_entropy=True)
        assert (masked["divergence"][:6] == 0).all() and (masked["entropy"][:6] == 0).all()
        assert (masked["grad"][:6] == 0).all()
        assert_equal("divergence", masked["divergence"][6:], got["divergence"][6:])


@ON_EVERY_BACKEND
def test_the_ends_of_the_range(backend, device):
    """Logits far apart, temperatures at either end, and weights of nearly nothing."""
    x = torch.tensor([[60000.0, 0.0, -60000.0], [1e38, -1e38, 0.0], [1e-38, 0.0, -1e-38]], device=device)
    y = torch.tensor([[60000.0, 59999.0, 0.0], [1e38, 1e38, 0.0], [0.0, 1e-38, 0.0]], device=device)
    for beta in (*BETAS, 1e-30, 1e-44, 1 - 2.0**-24):
        for temperature in (1.0, 1e-3, 1e30):
            options = dict(beta=beta, temperature=temperature)
            got = run(backend, {"logits": x, "teacher_logits": y}, **options)
            truth = run("reference", {"logits": x.double(), "teacher_logits": y.double()}, **options)
            for name in ("divergence", "grad"):
                exact = truth[name].float()
                torch.testing.assert_close(got[name], exact, rtol=1e-5, atol=1e-6, equal_nan=True)


@ON_EVERY_BACKEND
def test_any_strides_and_no_rows(backend, device):
    wide = {name: x.view(3, 4, 20) for name, x in make_inputs(12, 20, device=device).items()}
    mask = torch.arange(12, device=device).view(3, 4) % 5 > 0
    views = (
        lambda x: x[:, :-1],
        lambda x: x.transpose(0, 1),
        lambda x: x[None, :, ::2],
        lambda x: x[..., ::2],
    )
    for view in views:
        inputs = {name: view(x) for name, x in wide.items()}
        kept = view(mask[..., None].expand(3, 4, 20))[..., 0]
        for beta in BETAS:
            dense = run(backend, {n: x.contiguous() for n, x in inputs.items()}, beta=beta, mask=kept.clone())
            for name, x in run(backend, inputs, beta=beta, mask=kept).items():
                assert_equal(name, x, dense[name])
    empty = run(backend, make_inputs(0, 5, device=device), beta=0.5, return_entropy=True)
    assert empty["divergence"].shape == empty["entropy"].shape == (0,) and empty["grad"].shape == (0, 5)
    one = {name: x[0] for name, x in make_inputs(1, 5, device=device).items()}
    assert run(backend, one, beta=0.5)["divergence"].shape == ()


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", BETAS)
def test_a_row_does_not_feel_the_others(backend, device, beta):
    n, vocab = (7, 300) if is_slow(backend, device) else (130, 3001)
    inputs = make_inputs(n, vocab, device=device)
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(device)
    whole = run(backend, inputs, grad, beta=beta, return_entropy=True)
    for rows in (slice(0, 1), slice(n - 3, n), torch.randperm(n, generator=torch.Generator().manual_seed(2))):
        part = run(
            backend, {k: x[rows] for k, x in inputs.items()}, grad[rows], beta=beta, return_entropy=True
        )
        for name, x in part.items():
            assert_equal(name, x, whole[name][rows])
    for name, x in run(backend, inputs, grad, beta=beta, return_entropy=True).items():
        assert_equal(f"{name}, again", x, whole[name])


def test_threads_do_not_show():
    inputs, before, found = make_inputs(300, 700), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append([run("native", inputs, beta=beta, return_entropy=True) for beta in BETAS])
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*found, strict=True):
        for name, x in one.items():
            assert_equal(name, three[name], x)


def results():
    """All outputs and gradients of the native backend."""
    found = []
    for dtype in DTYPES:
        for vocab in (1, 7, 40, 2049, 5000):
            for beta in BETAS:
                inputs = make_inputs(5, vocab, dtype=dtype)
                found += run("native", inputs, beta=beta, temperature=0.8, return_entropy=True).values()
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_do_not_show(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


@ON_EVERY_BACKEND
def test_the_gradient_over_the_logits(backend, device):
    inputs = make_inputs(6, 40, device=device)
    want = run(backend, inputs, beta=0.3)["grad"]
    leaf = inputs["logits"].clone().requires_grad_()
    with running(backend):
        logits = leaf * 1
        out = rlkernel.divergence(
            logits, inputs["teacher_logits"], beta=0.3, inplace_backward=True
        ).divergence
        (found,) = torch.autograd.grad(out, leaf, upstream(out), retain_graph=True)
        assert_equal("grad", found, want)
        assert_equal("over the logits", logits.detach(), want)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(out, leaf, upstream(out))


def test_trls_function_says_the_same():
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    inputs = double(make_inputs(12, 60))
    logits, teacher_logits = (x.view(2, 6, 60) for x in inputs.values())
    labels = torch.tensor([[5, -100, 3, 2, 1, -100], [-100, -100, 3, 2, 1, 9]])
    for beta in (0, 0.2, 0.5, 1):
        for temperature in (1.0, 0.6):
            mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
            out = rlkernel.divergence(
                mine, teacher_logits, beta=beta, temperature=temperature, mask=labels != -100
            ).divergence
            want = trainer.generalized_jsd_loss(
                theirs, teacher_logits, labels=labels, beta=beta, temperature=temperature
            )
            got = out.sum() / (labels != -100).sum()
            torch.testing.assert_close(got, want)
            for a, b in zip(torch.autograd.grad(got, mine), torch.autograd.grad(want, theirs), strict=True):
                torch.testing.assert_close(a, b)


def test_trls_chunked_divergence_says_the_same():
    """Of heads that are the identity."""
    function = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    inputs = make_inputs(10, 32)
    eye = torch.eye(32)
    for beta in BETAS:
        mine, theirs = (inputs["logits"].clone().requires_grad_() for _ in range(2))
        out = rlkernel.divergence(
            mine, inputs["teacher_logits"], beta=beta, temperature=0.7, return_entropy=True
        )
        want, entropy = function.apply(theirs, eye, None, inputs["teacher_logits"], eye, None, beta, 0.7)
        torch.testing.assert_close(out.divergence, want, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(out.entropy, entropy, rtol=1e-5, atol=2e-6)
        grad = upstream(want)
        (a,), (b,) = torch.autograd.grad(out.divergence, mine, grad), torch.autograd.grad(want, theirs, grad)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def test_kl_div_of_torch_says_the_same():
    inputs = double(make_inputs(9, 40))
    p, q = (x.log_softmax(-1) for x in inputs.values())
    for beta, (a, b) in ((0, (p, q)), (1, (q, p))):
        want = F.kl_div(a, b, reduction="none", log_target=True).sum(-1)
        torch.testing.assert_close(rlkernel.divergence(**inputs, beta=beta).divergence, want)


X = torch.zeros(2, 3)
BAD = [
    (dict(logits=torch.zeros(2, 0)), r"logits must be \[..., V\] with V >= 1, got \(2, 0\)"),
    (dict(logits=X.int()), "logits must be float16, .* got int32"),
    (
        dict(teacher_logits=torch.zeros(2, 4)),
        r"teacher_logits must have logits' shape \(2, 3\), got \(2, 4\)",
    ),
    (
        dict(teacher_logits=X.double()),
        "teacher_logits must be float64 beside float64 alone, got float64",
    ),
    (
        dict(teacher_logits=X.clone().requires_grad_()),
        r"teacher_logits must not require a gradient \(detach it\)",
    ),
    (dict(beta=1.5), r"beta must be in \[0, 1\], got 1.5"),
    (dict(beta=torch.tensor(0.5)), "beta must be a number, got Tensor"),
    (dict(mask=torch.ones(3)), r"mask must have the rows of logits' shape \(2,\), got \(3,\)"),
    (dict(mask=torch.ones(2, dtype=torch.complex64)), "mask must be bool, integer or float, got complex64"),
    (dict(temperature=0.0), "temperature must be > 0 and finite, got 0.0"),
    (dict(temperature=torch.ones(2)), "temperature must be a number, got Tensor"),
    (
        dict(logits=X[:1].expand(2, 3), inplace_backward=True),
        "logits must not be expanded with inplace_backward",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:44] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.divergence(**{"logits": X, "teacher_logits": X, "beta": 0.5} | change)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_compiles_as_one_graph(backend):
    inputs = make_inputs(4, 40)

    def step(logits, teacher_logits):
        out = rlkernel.divergence(logits * 2, teacher_logits, beta=0.5, return_entropy=True)
        return out.divergence * 3 + out.entropy.detach()

    found = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = inputs["logits"].clone().requires_grad_()
        with rlkernel.use_backend(backend):
            out = fn(leaf, inputs["teacher_logits"])
            found.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    for a, b in zip(*found, strict=True):
        assert_equal("compiled", b, a)


def test_opcheck():
    inputs = make_inputs(3, 20)
    call = DivergenceCall(inputs["logits"].requires_grad_(), inputs["teacher_logits"], None, 0.5, 1.0, True)
    torch.library.opcheck(op.node, op.flat(call))
