"""verl's entry point.  verl imports it and calls nothing, so the import itself does what is asked for."""

from rlkernel.integrations.verl.install import register

register()
