"""Of Hydra the names with which AReaL reads a configuration from a file, which no test does."""

compose = initialize = None
