"""What ``patch`` returns."""

from rlkernel.integrations._parts import WaitingPatch


class VerlPatch(WaitingPatch):
    """See ``WaitingPatch``."""

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_verl", "verl", parts, strict)
