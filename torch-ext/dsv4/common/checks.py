"""Argument checks that two or more ops share. Each raises one error that names the argument and what is accepted."""

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless the argument is a dense float16, bfloat16, float32 or float64 tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    # Traced tensors are dense, and torch.compile can't trace the question in a backward.
    if not torch.compiler.is_compiling() and (tensor.is_nested or tensor.layout is not torch.strided):
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if tensor.is_nested else tensor.layout}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")


def check_same_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device} and {other_name} is on {other.device}; both must be on one device")


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True unless it is certain that no two elements share memory: each stride must clear all that lies below it."""
    if tensor.numel() == 0:
        return False
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def span(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    return (sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape)) + 1) * tensor.element_size()
