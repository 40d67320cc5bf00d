"""Of jaxtyping what SkyRL writes in annotations, which nothing reads."""


class _Annotation:
    def __getitem__(self, item):
        return item[0] if isinstance(item, tuple) else item


Float = Integer = _Annotation()
