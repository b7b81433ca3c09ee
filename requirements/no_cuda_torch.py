"""Refuse to install a CUDA build of torch: `pip install --dry-run --report - ... | python no_cuda_torch.py`.

On Linux pip's default index offers the CUDA build, gigabytes of it, to a machine without a GPU as well.
"""

import json
import sys

from pip._vendor.packaging.requirements import Requirement

(torch,) = (package["metadata"] for package in json.load(sys.stdin)["install"])
needed = [
    r for r in map(Requirement, torch.get("requires_dist", [])) if not r.marker or r.marker.evaluate({"extra": ""})
]
cuda = [r.name for r in needed if r.name.startswith(("nvidia-", "cuda-"))]
if cuda:
    sys.exit(
        f"pip would install torch {torch['version']} with {cuda[0]} and more, but there is no GPU here.\n"
        "Give the address of PyTorch's CPU packages (pytorch.org, 'Get started'):  make TORCH_INDEX=<address> ...\n"
        f"or ask for a build by name, which is then installed as it is:  make TORCH=torch=={torch['version']} ..."
    )
