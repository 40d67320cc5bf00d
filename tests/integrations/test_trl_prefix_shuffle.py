"""rlkernel.patch_trl(prefix_sharing=True): a shuffle that keeps the samples of a prompt together."""

import pytest
import torch
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import SHUFFLE, UPSTREAM, grpo_trainer, patch_trl

from rlkernel.integrations.trl.order import Order

nothing_left_behind = trl_prefix_cases.nothing_left_behind
model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def generation_batch(groups=(4, 4, 4, 4)):
    prompt = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))
    n = len(prompt)
    return {
        "prompt_ids": torch.stack([prompt, prompt * 7], 1),
        "advantages": torch.arange(n).float(),
        "names": [f"sample {i}" for i in range(n)],
        "num_items_in_batch": torch.tensor(99),
        "missing": None,
    }


@pytest.mark.parametrize("groups", [(4, 4, 4, 4), (1, 1, 1), (3, 5, 1, 2), (6,)])
def test_shuffle_moves_groups_as_a_whole(groups):
    batch = generation_batch(groups)
    orders = set()
    with patch_trl() as patch:
        for seed in range(40):
            torch.manual_seed(seed)
            out = grpo_trainer.shuffle_sequence_dict(batch)
            rows = out["advantages"].long().tolist()
            assert sorted(rows) == list(range(sum(groups))) and out.keys() == batch.keys()
            assert out["names"] == [f"sample {i}" for i in rows]
            assert torch.equal(out["prompt_ids"], batch["prompt_ids"][rows])
            assert out["num_items_in_batch"] == 99 and out["missing"] is None
            order = out["prompt_ids"][:, 0].unique_consecutive().tolist()
            assert len(order) == len(groups), f"groups are apart: {out['prompt_ids'][:, 0].tolist()}"
            orders.add(tuple(order))
    assert patch.calls[SHUFFLE] == 40 and not patch.fallbacks
    assert len(orders) > len(groups) - 1


def test_shuffle_orders_groups_evenly():
    batch, first = generation_batch((4, 4, 4, 4)), torch.zeros(4)
    with patch_trl():
        for _ in range(800):
            first[grpo_trainer.shuffle_sequence_dict(batch)["prompt_ids"][0, 0]] += 1
    assert (first - 200).abs().max() < 60  # five standard deviations


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_shuffle_draws_what_trl_draws_on_a_default_device():
    with torch.device("cuda"):
        batch = generation_batch()
        torch.manual_seed(3)
        UPSTREAM[SHUFFLE](batch)
        after = torch.cuda.get_rng_state()
        torch.manual_seed(3)
        planned = Order().plan(batch["prompt_ids"])
        with patch_trl():
            out = grpo_trainer.shuffle_sequence_dict(batch)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert out["advantages"].long().tolist() == planned.tolist()


def test_shuffle_draws_what_trl_draws():
    batch = generation_batch()
    torch.manual_seed(3)
    UPSTREAM[SHUFFLE](batch)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with patch_trl():
        grpo_trainer.shuffle_sequence_dict(batch)
    assert torch.equal(torch.get_rng_state(), after)


def test_shuffle_without_prompts_is_trls():
    torch.manual_seed(3)
    stock = UPSTREAM[SHUFFLE]({"x": torch.arange(6)})
    torch.manual_seed(3)
    with patch_trl() as patch:
        assert torch.equal(grpo_trainer.shuffle_sequence_dict({"x": torch.arange(6)})["x"], stock["x"])
    assert patch.fallbacks == {f"{SHUFFLE}: no prompt_ids": 1}


def test_a_run_that_broke_off_leaves_no_order_behind(make_trainer):
    """Its order was settled for its old logprobs, and its rewards failed before TRL could shuffle."""

    def fails(completions, **_):
        raise RuntimeError("no rewards today")

    with patch_trl():
        with pytest.raises(RuntimeError, match="no rewards today"):
            make_trainer(
                reward=fails, num_generations=2, gradient_accumulation_steps=2, num_iterations=2
            ).train()
        trainer = make_trainer(
            base=trl_trainers.recording(), num_generations=8, gradient_accumulation_steps=2, max_steps=1
        )
        trainer.train()
    assert len(trainer.passes) == 2
    assert all(len(seen.prompts.unique(dim=0)) == 1 for seen in trainer.passes), "groups are apart"
