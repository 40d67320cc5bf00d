"""Of lark what AReaL derives its parser of allocations from, which no test uses."""


class Lark:
    pass


class Transformer:
    pass
