"""SWIFT's distillation beside rlkernel's in its place: the loss, its gradient, and trainings."""

import functools

import pytest
import swift_cases
import torch
from swift.rlhf_trainers import gkd_loss
from swift_cases import DOOR, check_trained, nothing_left_behind, upstream

import rlkernel
from rlkernel.integrations.swift.losses import ROWS, WHOLE

assert nothing_left_behind and upstream  # fixtures of every test here
PARTS = ["losses"]
OFFLINE = {"teacher_model_type": "qwen2", "lmbda": 0.0}  # of answers of the data set


def given(dtype=torch.float32, shape=(3, 7, 40), seed=0):
    g = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(shape, generator=g) for _ in range(2))
    labels = torch.randint(0, shape[-1], shape[:-1], generator=g)
    labels[:, :2] = -100
    return student.to(dtype), teacher.to(dtype), labels


def computed(student, teacher, labels, beta=0.5, temperature=0.9, places=None, **options):
    """The loss, the number of rows and the gradient of the student."""
    leaf = student.detach().clone().requires_grad_()
    output = gkd_loss.TeacherOutput(full_logits=teacher, labels=labels if places is None else places)
    if "top" in options:
        output = output.to_topk(options.pop("top"))
    total, count = gkd_loss.gkd_loss(leaf, output, labels, beta, temperature, **options)
    (grad,) = torch.autograd.grad(total, leaf)
    return total.detach(), count, grad


def check_near_fp64(ours, stock, exact):
    """At most twice the error of SWIFT's formula in the same dtype."""
    assert ours[1] == stock[1] == exact[1] and ours[1].dtype == stock[1].dtype
    for mine, theirs, truth in zip(ours[::2], stock[::2], exact[::2], strict=True):
        scale = truth.abs().max().item()
        error = (mine.double() - truth).abs().max().item()
        least = 4 * torch.finfo(mine.dtype).eps * scale  # a sum of rows, of which SWIFT's may be lucky
        assert error <= 2 * (theirs.double() - truth).abs().max().item() + least, (error, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", [0, 0.0, 0.3, 1.0])
def test_are_the_same(beta, dtype):
    student, teacher, labels = given(dtype)
    for temperature in (1.0, 0.7):
        run = functools.partial(computed, labels=labels, beta=beta, temperature=temperature)
        stock, exact = run(student, teacher), run(student.double(), teacher.double())
        with rlkernel.patch_swift(PARTS) as patch:
            ours = run(student, teacher)
        assert patch.calls == {WHOLE: 1} and not patch.fallbacks
        assert ours[0].dtype == torch.float32 and ours[2].dtype == dtype
        check_near_fp64(ours, stock, exact)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", ["top", "places", "vocabularies"])
def test_rows_of_the_rest_are_ours_too(case, beta):
    """Where SWIFT gathers the rows first, its sum over them is replaced."""
    student, teacher, labels = given()
    options = {}
    if case == "top":
        options, reason = {"top": 5}, "the likeliest tokens alone"
    elif case == "places":  # as the teacher has a prompt of its own
        options, reason = {"places": labels.roll(-1, 1)}, "at different places"
    else:
        teacher = torch.nn.functional.pad(teacher, (0, 9))
        reason = "not \\[..., V\\] of one shape"
    run = functools.partial(computed, labels=labels, beta=beta, **options)
    stock, exact = run(student, teacher), run(student.double(), teacher.double())
    with rlkernel.patch_swift(PARTS) as patch, pytest.warns(UserWarning, match=reason):
        ours = run(student, teacher)
    assert patch.calls == {ROWS: 1} and patch.fallbacks.total() == 1
    check_near_fp64(ours, stock, exact)


def test_tokens_that_the_teacher_has_left_out():
    """SWIFT's sum is NaN where a token of the likeliest has no log-probability."""
    student, _, labels = given()
    values = torch.randn(*labels.shape, 4, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(4).expand(*labels.shape, 4)
    values[..., 3] = -torch.inf
    output = gkd_loss.TeacherOutput(topk_logprobs=values, topk_indices=ids, labels=labels)
    assert gkd_loss.gkd_loss(student, output, labels, 0.0, 1.0)[0].isnan()
    with rlkernel.patch_swift(PARTS), pytest.warns(UserWarning, match="the likeliest tokens alone"):
        total, count = gkd_loss.gkd_loss(student, output, labels, 0.0, 1.0)
    kept = labels != -100
    log_p, log_q = (x[kept][:, :4].double().log_softmax(-1) for x in (student, values))
    want = (log_q[:, :3].exp() * (log_q[:, :3] - log_p[:, :3])).sum()
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=0.0)
    assert count == kept.sum()


def test_no_row_counts():
    student, teacher, labels = given()
    labels.fill_(-100)
    with rlkernel.patch_swift(PARTS) as patch:
        total, count, grad = computed(student, teacher, labels)
    assert patch.calls == {WHOLE: 1} and total == 0 and count == 0 and not grad.any()


def its_own(x):
    return gkd_loss.default_log_softmax(x)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"log_softmax_fn": its_own}, "is the caller's own"),
        ({"beta": 1.5}, "beta is no number in"),
        ({"temperature": torch.tensor(0.9)}, "the temperature is no number above 0"),
    ],
)
def test_what_is_left_to_swift(change, reason):
    student, teacher, labels = given()
    run = functools.partial(computed, student, teacher, labels, **change)
    stock = run()
    with rlkernel.patch_swift(PARTS) as patch, pytest.warns(UserWarning, match=reason):
        ours = run()
    assert WHOLE not in patch.calls and patch.fallbacks
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_fp64_is_left_to_swift():
    student, teacher, labels = given(torch.float64)
    DOOR.check_left(functools.partial(computed, student, teacher, labels), "student_logits is", PARTS)


@pytest.fixture(scope="module")
def teacher(files):
    folder = files / "teacher"
    swift_cases.save(folder, scale=2.0)
    return folder


@pytest.mark.parametrize("options", [{}, {"beta": 1.0, "sft_alpha": 0.3}], ids=["jsd", "reverse-sft"])
def test_a_training(files, teacher, options):
    stock = swift_cases.stock("gkd", files, teacher_model=teacher, temperature=0.9, **OFFLINE, **options)
    assert stock[0][0]["loss"] > 0.01  # the teacher is another one
    check_trained("gkd", files, [WHOLE], teacher_model=teacher, temperature=0.9, **OFFLINE, **options)


def test_a_training_with_the_likeliest_tokens(files, teacher):
    given = {**OFFLINE, "teacher_model": teacher, "gkd_logits_topk": 7}
    stock = swift_cases.trained("gkd", files, **given)
    with rlkernel.patch_swift() as patch, pytest.warns(UserWarning, match="the likeliest tokens alone"):
        ours = swift_cases.trained("gkd", files, **given)
    assert set(patch.calls) == {ROWS} and patch.fallbacks
    swift_cases.check_same(ours, stock)
