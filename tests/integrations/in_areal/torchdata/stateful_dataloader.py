"""See the package."""


class StatefulDataLoader:
    pass
