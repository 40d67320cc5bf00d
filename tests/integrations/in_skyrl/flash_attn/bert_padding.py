"""flash-attn's packing of padded batches, by indices."""

import torch


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, offsets, int(lengths.max()), lengths


def pad_input(hidden_states, indices, batch, seqlen):
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
