"""Of Hydra."""
