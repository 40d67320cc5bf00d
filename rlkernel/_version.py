"""The version: that of the tag, which setuptools-scm wrote into the metadata of what is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlkernel")
except PackageNotFoundError:  # sources on a path, never installed
    __version__ = "0+unknown"
