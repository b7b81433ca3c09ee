"""Questions about the machine, asked at launch and never at import."""

import contextlib
import functools

import torch
import triton


def why_not_triton(tensor: torch.Tensor) -> str | None:
    """None if Triton can run on this tensor: on a GPU, or on the CPU when interpreting."""
    if triton.knobs.runtime.interpret:
        return None if tensor.device.type == "cpu" else f"the tensors are on {tensor.device.type} and TRITON_INTERPRET is set"
    return None if tensor.device.type in ("cuda", "xpu") else f"the tensors are on {tensor.device.type}, not on a GPU"


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU as one number (80, 90, 100, 120); 0 on anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; 64 KiB, which every GPU has, where it can't be asked."""
    if device.type != "cuda":
        return 65536
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65536)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has; 1 where it can't be asked."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_on(tensor: torch.Tensor):
    """Context manager that makes the tensor's device the current one: Triton launches on the current device."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    backend = getattr(torch, tensor.device.type)
    if tensor.device.index == backend.current_device():
        return contextlib.nullcontext()
    return backend.device(tensor.device)
