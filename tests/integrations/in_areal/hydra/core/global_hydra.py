"""Of Hydra its registry."""


class GlobalHydra:
    pass
