"""Launch a Triton kernel, the first time as Triton does and from then on with little host time."""

import torch
import triton

from .device import capability, launch_on

# The versions whose CompiledKernel.run was read and takes what is passed to it below; others launch as Triton does.
_KNOWN = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"]) and torch.version.cuda is not None
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # both in CUDA builds only
_current_device = getattr(torch._C, "_cuda_getDevice", None)


class Launch:
    """One kernel, its grid and all arguments but the tensors: call it with tensors of the signature it was made for.

    A JIT launch works out types, divisibility and the compiled kernel from 25 arguments anew: 19 us of host time. All
    of that is the same for every call of one signature, but for the alignment of pointers, so later calls enqueue the
    compiled kernel: 8 us (the H200's host, Triton 3.6). Triton's launch hooks don't see those; profilers do.

    Among the kernel's parameters the tensors come first, then the scalars, then the constexprs, PDL last.
    """

    __slots__ = ("kernel", "programs", "scalars", "constants", "options", "device", "index", "tail", "fast")

    def __init__(self, kernel, programs: int, scalars: tuple, constants: dict, device: torch.device, **options):
        pdl = capability(device) >= 90
        self.kernel, self.programs, self.scalars, self.device = kernel, programs, scalars, device
        self.constants = {**constants, "PDL": pdl}
        self.options = {**options, "launch_pdl": True} if pdl else options
        self.index, self.tail, self.fast = device.index, (*scalars, *self.constants.values()), None

    def __call__(self, *tensors):
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        unaligned = 0
        for pointer in pointers:
            unaligned |= pointer
        if self.fast is not None and not unaligned & 15 and self.index == _current_device():
            run, function, metadata = self.fast
            run(self.programs, 1, 1, _stream(self.index), function, metadata, None, None, None, *pointers, *self.tail)
            return
        with launch_on(tensors[0]):
            compiled = self.kernel[(self.programs,)](*tensors, *self.scalars, **self.constants, **self.options)
        if _KNOWN and self.device.type == "cuda" and not unaligned & 15:
            self.fast = compiled.run, compiled.function, compiled.packed_metadata
