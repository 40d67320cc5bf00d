"""What ``patch`` returns."""

from rlkernel.integrations._parts import PartsPatch


class MegatronPatch(PartsPatch):
    """See ``PartsPatch``."""

    def __init__(self, parts: tuple[str, ...], strict: bool) -> None:
        super().__init__("rlkernel.patch_megatron", "Megatron", parts, strict)
