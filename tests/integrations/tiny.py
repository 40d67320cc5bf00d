"""A tokenizer and a causal language model of a few thousand parameters, for tests of trainers."""

import string

import torch

PAD, BOS, EOS = 0, 1, 2
# of a run that is over in seconds and leaves nothing behind
TRAINING = {
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
    "disable_tqdm": True,
}


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *string.ascii_lowercase, *string.digits, *" .,?"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def make_model(vocab=2048, hidden=64, layers=2):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config)


def save(path, **sizes):
    """Model and tokenizer on the disk, where trainers load them from; the path."""
    make_model(**sizes).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def reward(completions, **_):
    """Larger for what a model easily learns to say."""
    return [text.count("a") + 0.1 * len(set(text)) for text in completions]
