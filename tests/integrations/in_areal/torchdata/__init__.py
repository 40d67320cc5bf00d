"""Of torchdata the data loader that AReaL annotates with."""
