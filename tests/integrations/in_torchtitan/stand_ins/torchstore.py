"""Of TorchStore nothing is called: no generator pulls weights here."""
