"""Packed batches whose prompts are kept once: the batch, the forest of its tokens, the rows of its layout."""
