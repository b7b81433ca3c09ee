"""Launch a Triton kernel, the first time as Triton does and from then on with little host time."""

import torch
import triton

from .device import capability, launch_on

# The versions whose CompiledKernel.run was read and takes what is passed to it below; others launch as Triton does.
_KNOWN = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"]) and torch.version.cuda is not None
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # both in CUDA builds only
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def prepare_launch(kernel, programs: int, scalars: tuple, constants: dict, device: torch.device, pdl: bool = True, **options):
    """A function of tensors that launches `kernel` on them with all its other arguments.

    A JIT launch works out types, divisibility and the compiled kernel from 25 arguments anew: 19 us of host time. All
    of that is the same for every call of one signature, but for the alignment of pointers, so later calls enqueue the
    compiled kernel: 8 us (the H200's host, Triton 3.6). Triton's launch hooks don't see those; profilers do.

    Args:
        kernel: its parameters are tensors first, then scalars, then constexprs, PDL last.
        programs: the grid, one-dimensional.
        scalars: runtime arguments.
        constants: constexprs by name, without PDL.
        device: where the tensors will be.
        pdl: False for a kernel that does not wait for the previous one itself (follow_previous_kernel).
        options: num_warps and the like.
    """
    pdl = pdl and capability(device) >= 90
    constants = {**constants, "PDL": pdl}
    if pdl:
        options["launch_pdl"] = True
    index, tail, grid = device.index, (*scalars, *constants.values()), (programs,)
    run = function = metadata = None

    def launch(*tensors):
        nonlocal run, function, metadata
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        unaligned = 0
        for pointer in pointers:
            unaligned |= pointer
        if run is not None and not unaligned & 15 and index == _current_device():
            run(programs, 1, 1, _stream(index), function, metadata, None, None, None, *pointers, *tail)
            return
        with launch_on(tensors[0]):
            compiled = kernel[grid](*tensors, *scalars, **constants, **options)
        if _KNOWN and device.type == "cuda" and not unaligned & 15:
            function, metadata, run = compiled.function, compiled.packed_metadata, compiled.run

    return launch
