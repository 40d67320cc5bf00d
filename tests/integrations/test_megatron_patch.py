"""What rlkernel.patch_megatron() replaces in the real Megatron-Core, restores and refuses."""

import sys

import pytest
from doors import Door

import rlkernel
from rlkernel.integrations import megatron
from rlkernel.integrations.megatron import contract, install

NEEDED = "needs Megatron-Core, which is not installed"
core = pytest.importorskip("megatron.core", reason=NEEDED)
fused = pytest.importorskip("megatron.core.fusions.fused_cross_entropy", reason=NEEDED)
gpt = pytest.importorskip("megatron.core.models.gpt.gpt_model", reason=NEEDED)
language = pytest.importorskip("megatron.core.models.common.language_module.language_module", reason=NEEDED)
plain = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy", reason=NEEDED)

DOOR = Door(
    rlkernel.patch_megatron, megatron.MegatronPatch, "megatron", "Megatron", contract.SUPPORTED, install, (),
    distribution=contract.DISTRIBUTION,
)  # fmt: skip
upstream, nothing_left_behind = DOOR.fixtures()


def test_what_is_replaced_and_restored():
    before = DOOR.everything()
    with rlkernel.patch_megatron() as patch:
        assert "fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy -> rlkernel.logprob" in str(
            patch
        )
        assert "tensor_parallel.vocab_parallel_cross_entropy -> rlkernel.logprob" in str(patch)
        assert "gpt_model.GPTModel._postprocess -> rlkernel.linear_logprob" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused
        assert language.fused_vocab_parallel_cross_entropy is fused.fused_vocab_parallel_cross_entropy
        assert core.tensor_parallel.vocab_parallel_cross_entropy is plain.vocab_parallel_cross_entropy
        DOOR.check_one_at_a_time(patch)
    DOOR.check_restored(before)


@pytest.mark.parametrize("part", install.PARTS)
def test_parts(part):
    with rlkernel.patch_megatron([part]) as patch:
        places = " ".join(patch.replaced)
        assert ("vocab_parallel_cross_entropy" in places) == (part == "cross_entropy")
        assert ("_postprocess" in places) == (part == "fused_head")
        DOOR.check_parts(part)
    patch.undo()


def test_refusals(monkeypatch):
    def become(changed, version):
        if version is None:
            changed.setitem(sys.modules, "megatron.core", None)
        else:
            changed.setattr(core, "__version__", version)

    DOOR.check_refusals(monkeypatch, become, ["0.13.1", "0.17.0"])


CHANGES = {
    "fused_vocab_parallel_cross_entropy": lambda m: m.setattr(
        fused, "fused_vocab_parallel_cross_entropy", lambda vocab_parallel_logits, target: 0
    ),
    "vocab_parallel_cross_entropy": lambda m: m.setattr(
        plain, "vocab_parallel_cross_entropy", lambda logits, target: 0
    ),
    "GPTModel._postprocess": lambda m: m.setattr(gpt.GPTModel, "_postprocess", lambda self, hidden: 0),
    "fused_head": lambda m: m.setattr(
        language.LanguageModule, "compute_language_model_loss", lambda self, logits: 0
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_megatron(monkeypatch, caplog, name):
    of_logits = ("vocab_parallel_cross_entropy", "fused_vocab_parallel_cross_entropy")
    kept = of_logits[name == of_logits[0]]
    homes = dict(
        zip(of_logits, ("tensor_parallel.cross_entropy", "fusions.fused_cross_entropy"), strict=True)
    )
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, f"megatron.core.{homes[kept]}.{kept}")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(plain, "vocab_parallel_cross_entropy"), (gpt.GPTModel, "_postprocess")],
)
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setattr(gpt.GPTModel, "_postprocess", lambda *x: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "GPTModel._postprocess")


def test_slimes_hook(monkeypatch):
    """slime calls what ``--custom-megatron-init-path`` names with its arguments, in each actor."""
    with monkeypatch.context() as slimes:
        # the patch of its image adds a parameter
        slimes.setattr(gpt.GPTModel, "_postprocess", lambda self, hidden_states, mtp_kwargs=None: 0)
        megatron.init(object())
        megatron.init(object())  # an actor and its reference model in one process
        assert megatron.MegatronPatch.in_place().parts == ("cross_entropy",)
        assert rlkernel.unpatch_all() == [DOOR.path]
    with rlkernel.patch_megatron() as patch:
        megatron.init(object())
        assert patch.parts == install.PARTS
