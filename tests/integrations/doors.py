"""What the tests of doors share whose functions come in parts: verl's, OpenRLHF's, SkyRL's and others'."""

import contextlib
import doctest
import functools
import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accuracy import check
from patch_orders import same, state
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def stood_in(folder, forgotten):
    """Packages of ``folder`` stand for those that are not here; of those ``forgotten`` no module stays."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] in forgotten]:
            del sys.modules[name]


@dataclass(frozen=True)
class Door:
    patch: Callable[..., Any]
    kind: type  # of what it returns
    name: str
    framework: str  # as it writes itself
    supported: str  # versions
    switch: ModuleType
    variables: tuple[str, ...]  # that the patch sets
    registries: tuple[dict, ...] = ()  # of the framework's functions
    distribution: str = ""  # where it is not named like the framework

    @property
    def path(self):
        return f"rlkernel.{self.patch.__name__}"

    def everything(self):
        """All that the framework has, which a patch must leave as it was."""
        tables = {(i, key): value for i, table in enumerate(self.registries) for key, value in table.items()}
        return state((self.name,)) | tables

    def fixtures(self, inside=contextlib.nullcontext):
        """For every test of a file: what the patch replaces, and that nothing of it is left behind."""

        @pytest.fixture(autouse=True, scope="module")
        def upstream():
            with inside():
                with self.patch() as patch:
                    places = [(entry, entry.expected) for entry in patch._done]
                yield places

        @pytest.fixture(autouse=True)
        def nothing_left_behind(upstream, monkeypatch):
            for name in self.variables:
                monkeypatch.delenv(name, raising=False)
            yield
            for name in self.variables:  # monkeypatch gives back what it took, and no more
                os.environ.pop(name, None)
            for entry, original in upstream:
                assert entry.current() is original, f"a test left {entry.path} patched"

        return upstream, nothing_left_behind

    def listen(self, monkeypatch, caplog):
        """Another test's framework may have switched off every logger, or raised the level of the root."""
        monkeypatch.setattr(logging.getLogger(self.path), "disabled", False)
        caplog.set_level(logging.WARNING, logger=self.path)

    # numbers

    def check_against(self, call, leaves, dtype, upstream, name, exact=None, magnitude=0.0):
        """``call`` patched, beside the framework's own: within twice its error in this dtype; the truth is
        ``exact`` in fp64, or the framework's own.  ``magnitude``: of what is subtracted on the way."""
        leaves = [x.to(dtype) for x in leaves]
        truth = differentiated(exact or call, leaves, torch.float64, upstream)
        stock = differentiated(call, leaves, dtype, upstream)
        with self.patch() as patch:
            found = differentiated(call, leaves, dtype, upstream)
            assert patch.calls[name] == 1 and not patch.fallbacks, (patch.calls, patch.fallbacks)
        for kind, got, theirs, want in zip(("output", "gradient"), found, stock, truth, strict=True):
            for i, of in enumerate(zip(got, theirs, want, strict=True)):
                check(f"{name}'s {kind} {i}", *of, magnitude=magnitude)
        return found, stock

    def check_left(self, call, reason, parts=None):
        """Patched, ``call`` gives to the bit what it gave, be it an error, and ``reason`` is why."""

        def outcome():
            try:
                return call()
            except Exception as error:
                return type(error), str(error)

        want = outcome()
        with self.patch(parts) as patch:
            got = outcome()
            assert reason in str(patch.fallbacks) and not patch.calls, (patch.fallbacks, patch.calls)
        assert alike(got, want), (got, want)

    def check_told_once(self, call, name, reason):
        """What is left is counted each time, and warned of the first time."""
        told = f"leaves {name} to {self.framework}: {reason}"
        with self.patch() as patch, pytest.warns(UserWarning, match=told) as warned:
            for _ in range(3):
                call()
        assert len(warned) == 1 and patch.fallbacks == {f"{name}: {reason}": 3}

    # modules that are imported later

    def check_wrong_later(self, monkeypatch, caplog, part, load, message):
        """What is wrong with a module that was not there is an error of its import, which ``load`` is."""
        name = self.homes[part]
        with self.patch([part]) as patch:
            with pytest.raises(PatchError, match=f"{part} cannot be replaced: .*{message}"):
                load(name)
            assert name not in sys.modules and not patch.replaced
        self.listen(monkeypatch, caplog)
        with self.patch([part], strict=False) as patch:
            load(name)
            assert part in patch.refused and f"leaves {part} to {self.framework}" in caplog.text

    def check_undone_waits(self, part, load):
        """For nothing: what is imported behind it, and returned, is the framework's own."""
        self.patch([part]).undo()
        assert not any(isinstance(finder, Arrivals) for finder in sys.meta_path)
        return load(self.homes[part])

    @property
    def homes(self):
        return importlib.import_module(f"rlkernel.integrations.{self.name}.contract").HOMES

    # the patch itself

    def check_one_at_a_time(self, patch):
        """A second call returns the patch that is on, and only the one who put it on takes it off."""
        with self.patch() as inner:
            assert inner is patch
        assert patch.active and patch.parts == self.switch.PARTS

    def check_restored(self, before):
        """All is as it was; so it is after a patch that was put on without a block."""
        assert same(before, self.everything())
        patch = self.patch()
        with self.patch():
            pass
        assert patch.active, "the block found it on"
        assert rlkernel.unpatch_all() == [self.path]
        assert same(before, self.everything())

    def check_parts(self, part):
        assert self.patch().parts == (part,)
        with pytest.raises(PatchError, match=r"parts must be what the patch in place has, .*: undo it first"):
            self.patch(self.switch.PARTS)

    def check_example(self):
        """Of the docstring."""
        text, told = inspect.cleandoc(self.patch.__doc__), []
        test = doctest.DocTestParser().get_doctest(text, {"rlkernel": rlkernel}, self.path, None, 0)
        doctest.DocTestRunner(verbose=False).run(test, out=told.append)
        assert test.examples and not told

    def check_refusals(self, monkeypatch, become, others):
        """Of arguments and versions; ``become`` makes the framework one of another version, or of none."""
        first, *_, last = self.switch.PARTS
        for options, message in (
            ({"parts": "losses"}, "parts must be names, got 'losses'"),
            ({"parts": [last, "x"]}, rf"parts must name some of \('{first}', .*got \('{last}', 'x'\)"),
            ({"parts": []}, "parts must name some of"),
            ({"strict": 1}, "strict must be True or False, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                self.patch(**options)
        versions = re.escape(self.supported)
        for version in others:
            found = re.escape(version)
            with monkeypatch.context() as changed:
                become(changed, version)
                refused = f"version of {self.name} must be {versions}, got {found}; patch_{self.name}"
                with pytest.raises(PatchError, match=refused):
                    self.patch()
                run = f"run with {self.framework} {versions}, and this is {found}"
                with pytest.warns(UserWarning, match=run) as told:
                    patch = self.patch(strict=False)
                with patch:
                    assert patch.replaced and len(told) == 1 and told[0].filename == __file__
        with monkeypatch.context() as changed:
            become(changed, None)
            needs = f"needs {self.framework}: pip install '{self.distribution or self.name}{versions}'"
            with pytest.raises(ImportError, match=needs):
                self.patch()

    def check_change(self, monkeypatch, caplog, change, name, kept):
        """What is not as it was is an error, or left to the framework by itself with the rest replaced."""
        before = self.everything()
        with monkeypatch.context() as changed:
            change(changed)
            with pytest.raises(PatchError, match=f"{name} cannot be replaced: .* must "):
                self.patch()
            assert not self.kind.in_place() and not any(name in os.environ for name in self.variables)
            self.listen(monkeypatch, caplog)
            with self.patch(strict=False) as patch:
                assert list(patch.refused) == [name]
                assert f"leaves {name} to {self.framework}" in caplog.text
                assert kept in patch.replaced
                assert not any(place.endswith(f".{name}") for place in patch.replaced)
        assert same(before, self.everything())

    def check_around(self, monkeypatch, owner, name):
        """What somebody has put around a function stays: it shows the same parameters, and is not it."""
        stock = vars(owner)[name]

        @functools.wraps(stock)
        def around(*args, **kwargs):
            return stock(*args, **kwargs)

        with monkeypatch.context() as changed:
            changed.setattr(owner, name, around)
            own = f"{name} must be {self.framework}'s own, got one that {__name__} made"
            with pytest.raises(PatchError, match=own):
                self.patch()
            with self.patch(strict=False) as patch:
                assert vars(owner)[name] is around and len(patch.refused) == 1

    def check_somebody_else(self, monkeypatch, replace, place):
        """Who replaces what is replaced must give it back first."""
        patch = self.patch()
        with monkeypatch.context() as others:
            replace(others)
            with pytest.raises(PatchError, match=f"cannot undo .*{place}: it must hold rlkernel"):
                rlkernel.unpatch_all()
            assert patch.active
        assert rlkernel.unpatch_all() == [self.path]

    # the switch

    def check_switch(self, monkeypatch):
        """How the variable is read."""
        switch = self.switch
        *_, one, other = switch.PARTS
        for text, parts in (("1", switch.PARTS), (f"{other}, {one}", (one, other))):
            monkeypatch.setenv(switch.SWITCH, text)
            assert switch.asked() == Asked(parts, False)
        monkeypatch.setenv(switch.STRICT, "1")
        assert switch.asked() == Asked((one, other), True)
        monkeypatch.setenv(switch.SWITCH, "0")
        assert switch.asked() is None
        monkeypatch.setenv(switch.SWITCH, "loss")
        with pytest.raises(ValueError, match=rf"{switch.SWITCH} must name some of .*, got \('loss',\)"):
            switch.asked()

    def check_asked_once(self, monkeypatch, caplog, start, part):
        """What a process does as it starts: what the variable asks for, once; an error is told, or strict."""
        self.listen(monkeypatch, caplog)
        start()
        assert self.kind.in_place() is None
        monkeypatch.setenv(self.switch.SWITCH, part)
        start()
        patch = self.kind.in_place()
        start()
        assert self.kind.in_place() is patch is self.patch() and patch.parts == (part,)
        assert "leaves everything" not in caplog.text
        assert rlkernel.unpatch_all() == [self.path]
        assert os.environ[self.switch.SWITCH] == part, "what the process was started with stays"

    def check_wrong_name(self, monkeypatch, caplog, start):
        self.listen(monkeypatch, caplog)
        monkeypatch.setenv(self.switch.SWITCH, "fused-head")
        start()
        wrong = f"{self.switch.SWITCH} must name"
        assert f"rlkernel leaves everything to {self.framework}: ValueError: {wrong}" in caplog.text
        monkeypatch.setenv(self.switch.STRICT, "1")
        with pytest.raises(ValueError, match="must name some of"):
            start()
        assert self.kind.in_place() is None


def alike(a, b):
    """Of the same values throughout, NaN included."""
    if isinstance(a, torch.Tensor):
        if a.dtype != getattr(b, "dtype", None) or a.shape != b.shape or a.device != b.device:
            return False
        return a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a != a, b != b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b or str(a) == str(b)


def random(seed, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def policy_batch(seed=0, rows=6, tokens=11, drift=0.4):
    """New, old and the rollout's log-probabilities, advantages and the mask of a policy loss: sequences of
    several lengths, one of them empty, with holes where a tool spoke."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.randn(rows, tokens, generator=g).abs() - 0.05
    new = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[rows // 2] = 0 if rows > 1 else 1
    mask = (torch.arange(tokens) < lengths[:, None]) & (torch.rand(rows, tokens, generator=g) > 0.15)
    mask[0, 0] = True
    advantages = torch.randn(rows, tokens, generator=g)
    rollout = (old + drift * torch.randn(rows, tokens, generator=g)).clamp(max=-0.01)
    return new, old, rollout, advantages, mask


def differentiated(call, leaves, dtype, upstream):
    """The outputs of ``call`` and the gradients of its ``leaves``, in ``dtype``."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
    # no leaf itself: a backward that works in place writes over what it is given
    outputs = call(*(x * 1 for x in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((x.double() * u).sum() for x, u in zip(outputs, upstream, strict=True))
    return [x.detach() for x in outputs], torch.autograd.grad(total, leaves)


class Logits(TorchDispatchMode):
    """The most rows that any tensor has whose last dimension is the vocabulary."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == self.vocab:
                self.rows = max(self.rows, x.numel() // self.vocab)
        return out


class FlashAttn(torch.autograd.Function):
    """flash-attn's cross entropy, which writes its gradient over the logits."""

    @staticmethod
    def forward(ctx, logits, labels, inplace_backward):
        ctx.save_for_backward(labels)
        ctx.logits, ctx.inplace = logits, inplace_backward
        loss = torch.nn.functional.cross_entropy(logits.detach().float(), labels, reduction="none")
        return loss, torch.zeros_like(loss)

    @staticmethod
    def backward(ctx, grad, _):
        (labels,) = ctx.saved_tensors
        p = ctx.logits.detach().float().softmax(-1)
        kept = (labels != -100)[:, None]
        found = p.scatter_add(1, labels.clamp(min=0)[:, None], -kept.float()) * kept * grad[:, None]
        found = found.to(ctx.logits.dtype)
        if ctx.inplace:
            ctx.logits.data.copy_(found)
        return found, None, None


def with_flash_attn(monkeypatch, home, there):
    """A module of the framework that has found flash-attn's cross entropy, which it notes in ``there``."""
    monkeypatch.setattr(home, there, True)
    monkeypatch.setattr(
        home, "cross_entropy_loss", lambda *x, inplace_backward: FlashAttn.apply(*x, inplace_backward),
        raising=False,
    )  # fmt: skip


def check_idle_entry_point(framework):
    """The entry point, called twice in a process that has asked for nothing, imports no framework."""
    code = f"""
import sys
from rlkernel.integrations.{framework} import register
register()
register()
assert not any(name.partition(".")[0] == "{framework}" for name in sys.modules), "{framework}"
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
