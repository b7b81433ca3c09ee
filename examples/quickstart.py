"""Load the kernel, kernelize a tiny DeepSeek-V4, generate.

From the Hub, or from this repository: `make build`, then LOCAL_KERNELS=org/dsv4=<this repository>.
"""

import torch
from flash_model import decode, flash_config, prompt, seeded_model
from kernels import get_kernel

dsv4 = get_kernel("org/dsv4", version=1, trust_remote_code=["org/dsv4"])

device = "cuda" if torch.cuda.is_available() else "cpu"
model = seeded_model(flash_config(layers=4), seed=0, device=device, dtype=torch.bfloat16)
model = dsv4.kernelize(model)
print(dsv4.kernelization_report(model))

ids = prompt(64, device)
tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
print("generated:", decode(tokens[0, ids.shape[1] :].tolist()))
