"""What rlkernel.patch_trl() replaces in the real TRL, restores and refuses."""

import sys
import types

import pytest
import torch
import trl_places
from trl_places import HEAD, PLACES, UPSTREAM, trl, utils

import rlkernel
from rlkernel.integrations._patch import PatchError

nothing_left_behind = trl_places.nothing_left_behind


def test_modules_that_imported_a_helper_by_name(monkeypatch):
    from trl.experimental.cpo import cpo_trainer

    late = types.ModuleType("trl._imported_under_the_patch")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    with rlkernel.patch_trl() as patch:
        late.selective_log_softmax = utils.selective_log_softmax
        assert cpo_trainer.selective_log_softmax is utils.selective_log_softmax
        assert "trl.experimental.cpo.cpo_trainer.selective_log_softmax" in patch.replaced
    original = UPSTREAM["selective_log_softmax"]
    assert cpo_trainer.selective_log_softmax is late.selective_log_softmax is original


def test_second_call_returns_the_active_patch():
    with rlkernel.patch_trl() as patch:
        with rlkernel.patch_trl() as inner:
            assert inner is patch
        assert patch.active and getattr(utils, HEAD) is not UPSTREAM[HEAD]
    assert not patch.active
    with rlkernel.patch_trl() as fresh:
        assert fresh is not patch and not fresh.calls


def test_with_under_a_standing_patch_leaves_it_on():
    patch = rlkernel.patch_trl()
    with rlkernel.patch_trl():
        pass
    assert patch.active
    patch.undo()


def test_exception_inside_with_restores():
    with pytest.raises(ZeroDivisionError), rlkernel.patch_trl():
        raise ZeroDivisionError


def test_says_what_it_replaced():
    with rlkernel.patch_trl() as patch:
        assert patch.replaced[f"trl.trainer.utils.{HEAD}"] == "rlkernel.linear_logprob"
        assert {f"trl.trainer.utils.{name}" for name in PLACES} <= patch.replaced.keys()
        assert f"trl.trainer.utils.{HEAD} -> rlkernel.linear_logprob" in repr(patch)


def test_refuses_to_undo_over_somebody_else(monkeypatch):
    patch = rlkernel.patch_trl()
    with monkeypatch.context() as other:
        other.setattr(utils, HEAD, "somebody else's")
        with pytest.raises(PatchError, match=f"cannot undo trl.trainer.utils.{HEAD}.*somebody else's"):
            patch.undo()
        assert patch.active and utils.entropy_from_logits is not UPSTREAM["entropy_from_logits"]
    patch.undo()


@pytest.mark.parametrize("version", ["0.29.1", "1.17.0", "2.0.0"])
def test_refuses_other_versions(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(PatchError, match=rf"version of trl must be >=1\.0,<1\.17, got {version}"):
        rlkernel.patch_trl()


@pytest.mark.parametrize("version", ["1.17.0", "2.0.0"])
def test_not_strict_compares_what_is_replaced(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(PatchError, match=r"patch_trl\(strict=False\) compares what is replaced"):
        rlkernel.patch_trl()
    with pytest.warns(UserWarning, match=f"run with TRL .*, and this is {version}"):
        patch = rlkernel.patch_trl(strict=False, prefix_sharing=True)
    with patch:
        assert patch.replaced[f"trl.trainer.utils.{HEAD}"] == "rlkernel.linear_logprob"

    def other_default(logits, chunk_size=64):
        return logits

    with monkeypatch.context() as upstream:
        upstream.setattr(utils, "entropy_from_logits", other_default)
        want = r"entropy_from_logits must take \(logits, chunk_size=128\), got \(logits, chunk_size=64\)"
        with pytest.raises(PatchError, match=want), pytest.warns(UserWarning, match="run with TRL"):
            rlkernel.patch_trl(strict=False)
        assert getattr(utils, HEAD) is UPSTREAM[HEAD]


@pytest.mark.parametrize("name", ["training_step", "_get_per_token_logps_and_entropies"])
def test_not_strict_compares_the_trainers_too(monkeypatch, name):
    def other(self, model):
        return None

    with monkeypatch.context() as upstream:
        upstream.setattr(trl.RLOOTrainer, name, other)
        with pytest.raises(
            PatchError, match=rf"RLOOTrainer\.{name} must take \(self, .*\), got \(self, model\)"
        ):
            rlkernel.patch_trl(strict=False, prefix_sharing=True)
        assert getattr(utils, HEAD) is UPSTREAM[HEAD]


def test_an_undone_patch_comes_back_after_another():
    first = rlkernel.patch_trl()
    first.undo()
    with rlkernel.patch_trl() as second:
        with pytest.raises(PatchError, match="no other patch of TRL must be in place"):
            first.apply()
        assert second.active and not first.active
    with first:
        assert rlkernel.patch_trl() is first and getattr(utils, HEAD) is not UPSTREAM[HEAD]
        with pytest.raises(PatchError, match="no other patch"):
            second.apply()
    first.undo()  # claimed by the call in the block, as under any standing patch
    assert getattr(utils, HEAD) is UPSTREAM[HEAD]


def test_refuses_a_head_of_another_contract(monkeypatch):
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            return hidden

    with monkeypatch.context() as upstream:
        upstream.setattr(utils, HEAD, Other)
        with pytest.raises(
            PatchError, match=rf"{HEAD} must take \(hidden, .*\), got \(hidden, weight, targets\)"
        ):
            rlkernel.patch_trl()
        assert getattr(utils, HEAD) is Other
        upstream.setattr(utils, HEAD, None)
        with pytest.raises(PatchError, match=f"{HEAD} must be callable, got None"):
            rlkernel.patch_trl()


def test_one_helper_of_another_contract_refuses_all(monkeypatch):
    with monkeypatch.context() as upstream:
        upstream.setattr(utils, "entropy_from_logits", lambda logits: logits)
        with pytest.raises(
            PatchError, match=r"entropy_from_logits must take \(logits, chunk_size=128\), got \(logits\)"
        ):
            rlkernel.patch_trl()
        assert getattr(utils, HEAD) is UPSTREAM[HEAD]


def test_what_brings_vllm_is_in_the_class_that_trainers_inherit_unless_it_is_not_wanted():
    from trl.trainer.base_trainer import _BaseTrainer

    before = dict(vars(_BaseTrainer))
    with rlkernel.patch_trl() as patch:
        assert "trl.trainer.base_trainer._BaseTrainer.__init__" in patch.replaced
        assert vars(_BaseTrainer)["train"] is not before.get("train") and patch.vllm is None
    assert dict(vars(_BaseTrainer)) == before
    with rlkernel.patch_trl(vllm=False):
        assert dict(vars(_BaseTrainer)) == before


@pytest.mark.parametrize(
    ("have", "want"), [(False, True), (False, "require"), (True, "require"), ("require", True), (True, False)]
)
def test_a_second_call_gets_the_vllm_that_it_asks_for(have, want):
    with rlkernel.patch_trl(vllm=have) as patch:
        if want and (have is False or want == "require"):
            with pytest.raises(PatchError, match=f"vllm must be .* in place has, {have}, got {want}: undo"):
                rlkernel.patch_trl(vllm=want)
        else:
            assert rlkernel.patch_trl(vllm=want) is patch
    with pytest.raises(ValueError, match="vllm must be True, False or 'require', got 'always'"):
        rlkernel.patch_trl(vllm="always")


def test_missing_trl_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"needs TRL: pip install 'trl>=1\.0,<1\.17'"):
        rlkernel.patch_trl()
