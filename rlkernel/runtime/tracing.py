"""Whether somebody records the operations of torch, among which a kernel does not show."""

import torch

_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_on() -> bool:
    """In torch.compile, in ``make_fx``, in ``torch.jit.trace``, and where ``FakeTensorMode`` asks for shapes.

    What a kernel writes is in no such record: only that memory was taken for it.  There an op is one node.
    """
    return (
        torch.compiler.is_compiling()
        or _mode(_PROXY) is not None
        or _mode(_FAKE) is not None
        or _is_included(_PRE_DISPATCH)
        or torch._C._get_tracing_state() is not None
    )


def is_fake() -> bool:
    """Where ``FakeTensorMode`` asks for shapes and nothing is compiled, which would break its graph here."""
    return _mode(_FAKE) is not None and not torch.compiler.is_compiling()
