"""A program that runs one commit of the kernel, the one that kernels.lock names, whatever is published later."""

import os
from pathlib import Path

import torch
from kernels import get_locked_kernel, load_kernel

LOCK = Path(__file__).with_name("kernels.lock")


def dsv4():
    """The kernel at the locked commit: from the cache when offline, else fetched if the cache lacks it."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return load_kernel("org/dsv4", lockfile=LOCK)
    return get_locked_kernel("org/dsv4", lockfile=LOCK, trust_remote_code=["org/dsv4"])


def main():
    kernel = dsv4()
    x = 3 * torch.randn(2, 4096)
    y = kernel.rms_norm(x, torch.ones(4096), 1e-6)
    print(f"{kernel.__name__}: rms_norm of {tuple(x.shape)} has rms {y.float().square().mean().sqrt():.3f}")


if __name__ == "__main__":
    main()
