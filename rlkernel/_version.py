"""The version: its one home, read by `rlkernel.__version__` and by the build."""

__version__ = "0.1.0.dev0"
