"""A tiny model in an engine of DeepSpeed, spread and rounded as a kind is named: "zero3-tied-fp16"."""

import tiny
import torch

VOCAB = 96
# of the last word of a kind; a scale grows after two steps that are not skipped
PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16dynamic": {
        "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    },
}


def precision(kind):
    return kind.rpartition("-")[2]


def dtype(kind):
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision(kind)[:4], torch.float32)


def _settings(kind, trained):
    from deepspeed.accelerator import get_accelerator

    stage = int(kind[4])
    if not trained and stage < 3:  # there is no optimizer to share out
        stage = 0
    settings = {"stage": stage, "stage3_param_persistence_threshold": 0}  # no parameter is too small to split
    if "offload" in kind:
        settings["offload_param" if stage == 3 else "offload_optimizer"] = {"device": "cpu"}
    if dtype(kind) == torch.float16:
        # DeepSpeed refuses fp16 where oneDNN has no instructions for it; torch computes it all the same
        get_accelerator().is_fp16_supported = lambda: True
    return {
        **PRECISIONS.get(precision(kind), {}),
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": settings,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def engine(kind, trained=True, seed=0):
    import deepspeed

    model = tiny.make_model(vocab=VOCAB, hidden=32)
    if "tied" in kind:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    widths = []

    def watch(module, inputs, output):  # eight rows of a first call are for the look at what becomes of them
        widths.append(output.shape[-1] if output.shape[:2] != (1, 8) else 1)

    model.lm_head.register_forward_hook(watch)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if trained else {}
    engine = deepspeed.initialize(model=model, config=_settings(kind, trained), **options)[0]
    engine.widths = widths
    return engine


def weights(engine):
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]
