"""Megatron-Core's models and its groups of ranks, on CPUs."""

import contextlib

import torch

VOCAB, HIDDEN, LENGTH, BATCH = 48, 16, 8, 3


def begin(tensor_parallel):
    """Megatron's groups, and what it asks of a GPU though it was told to be on CPUs."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.compiler.set_stance("force_eager")  # Megatron's own functions, whose compilation takes longer
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    return parallel_state.get_tensor_model_parallel_group()


def _config(tensor_parallel, **options):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, **options,
    )  # fmt: skip


def gpt(tensor_parallel, *, tied=False, **options):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(1)
    return GPTModel(
        config=_config(tensor_parallel, **options),
        transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip


def mamba(tensor_parallel):
    """Without a Mamba layer, which needs a GPU: attention and an MLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm  # Transformer Engine's is for GPUs
    layer = get_gpt_layer_local_spec()
    layers = MambaStackSubmodules(attention_layer=layer, mlp_layer=layer)
    torch.manual_seed(1)
    return MambaModel(
        config=_config(tensor_parallel), mamba_stack_spec=ModuleSpec(MambaStack, submodules=layers),
        vocab_size=VOCAB, max_sequence_length=LENGTH, hybrid_override_pattern="*",
    )  # fmt: skip


def ddp(model):
    """Whose parameters' gradients are in buffers, reduced while others are computed."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)


def inputs():
    """Token ids, positions and the causal mask; and labels, two of which mark padding."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g)
    labels[0, 0], labels[1, -1] = -100, VOCAB
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    return (ids, positions, mask), labels
