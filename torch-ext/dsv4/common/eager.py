"""When a public function may call its backend straight away, and when torch must see a registered op."""

import torch

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def is_eager(*tensors) -> bool:
    """True if nobody but the backend needs to see the call: no compilation, trace, mode or transform, plain tensors.

    The dispatcher's way to a Python implementation and back costs 17 us of host time a call, more than all the rest of
    it (torch 2.11, the H200's host).
    """
    if _compiling() or _modes() or _transforms() is not None or _tracing() is not None:
        return False
    for tensor in tensors:
        kind = type(tensor)
        if (kind is not _Tensor and kind is not _Parameter) or tensor.is_meta:
            return False
    return True
