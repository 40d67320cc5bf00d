"""To which axolotl tells how it is used; AXOLOTL_DO_NOT_TRACK=1 forbids it."""
