"""When a public function may call its backend straight away, and when torch must see a registered op."""

import torch
from torch.autograd import forward_ad

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
    if _compiling() or _modes() or _transforms() is not None or _tracing() is not None or forward_ad._current_level >= 0:
        return False
    for tensor in tensors:
        kind = type(tensor)
        # A negated view (`z.conj().imag`) holds the other sign in memory; the dispatcher resolves it.
        if (kind is not _Tensor and kind is not _Parameter) or tensor.is_meta or tensor.is_neg():
            return False
    return True


def is_batched(tensor: torch.Tensor) -> bool:
    """True for the wrapped gradients of `is_grads_batched=True`, which only the dispatcher can take apart: no storage."""
    return not _compiling() and not torch._C._has_storage(tensor)


def refuse_forward_ad(**tensors) -> None:
    """Raise NotImplementedError if a tensor carries a tangent: without this its derivative would silently be zero."""
    if _compiling() or forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} carries a forward-mode tangent; only reverse-mode derivatives are supported")
