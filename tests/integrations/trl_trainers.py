"""Real trainers of TRL over a tiny model on the disk, and what each step of theirs scored."""

import types

import pytest
import tiny
from trl_prefix_cases import METHOD, trl

PROMPTS = [f"what is {i} plus {i + 1}? it is" for i in range(32)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), vocab=len(tiny.make_tokenizer()))


@pytest.fixture
def make_trainer(model_path, tmp_path):
    """``make_trainer(algorithm, base=a subclass of its trainer, reward=..., ...)``: further options are those
    of its config, but for ``peft_config``."""
    from datasets import Dataset

    def make(algorithm="GRPO", base=None, reward=tiny.reward, model=model_path, **options):
        arguments = {name: options.pop(name) for name in ("peft_config", "callbacks") if name in options}
        settings = {
            **tiny.TRAINING, "output_dir": str(tmp_path), "per_device_train_batch_size": 8,
            "num_generations": 4, "max_completion_length": 8, "max_steps": 3, "beta": 0.0,
            "gradient_checkpointing": False, **options,
        }  # fmt: skip
        return (base or getattr(trl, f"{algorithm}Trainer"))(
            model=model, args=getattr(trl, f"{algorithm}Config")(**settings), reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}), processing_class=tiny.make_tokenizer(),
            **arguments,
        )  # fmt: skip

    return make


def recording(algorithm="GRPO"):
    """The trainer, with ``passes``: logprobs of each loss, and the old ones that it was given, if any."""

    class Recording(getattr(trl, f"{algorithm}Trainer")):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.passes, self.in_loss = [], False

        def _compute_loss(self, model, inputs):
            seen = types.SimpleNamespace(logps=None, mask=inputs["completion_mask"].bool())
            seen.old, seen.ref = inputs.get("old_per_token_logps"), inputs.get("ref_per_token_logps")
            seen.old_sums, seen.prompts = inputs.get("old_logps"), inputs["prompt_ids"]
            self.passes.append(seen)
            self.in_loss = True
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.in_loss = False

    def remember(self, *args, **options):
        scores = getattr(super(Recording, self), METHOD)(*args, **options)
        if self.in_loss:
            self.passes[-1].logps = scores[0].detach()
        return scores

    setattr(Recording, METHOD, remember)
    return Recording


def told(caught):
    return [str(w.message) for w in caught if "rlkernel" in str(w.message)]


def lora(**options):
    """The adapter that TRL's scripts make, whose dropout is 0.05 unless somebody says otherwise."""
    pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    return trl.get_peft_config(trl.ModelConfig(use_peft=True, **options))
