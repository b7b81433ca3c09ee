"""Train a tiny DeepSeek-V4 for a few steps, kernelized and not, from the same weights and data; print both losses."""

import argparse

import torch
from flash_model import flash_config, prompt, seeded_model
from kernels import get_kernel
from tqdm import tqdm


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dsv4 = get_kernel("org/dsv4", version=1, trust_remote_code=["org/dsv4"])

    original = train(lambda model: model, args.steps)
    kernelized = train(dsv4.kernelize, args.steps)

    print(f"{'step':>4} {'unkernelized':>14} {'kernelized':>14}")
    for step, losses in enumerate(zip(original, kernelized)):
        print("{:4} {:14.6f} {:14.6f}".format(step, *losses))
    difference = max(abs(a - b) for a, b in zip(original, kernelized))
    print(f"largest difference of the losses: {difference:.1e}")


def train(prepare, steps: int) -> list[float]:
    """The loss before each step of AdamW, on text.txt cut into pieces of 128 tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = seeded_model(flash_config(layers=4, hidden_size=64), seed=0, device=device, dtype=torch.float32).train()
    model = prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pieces = prompt(1024, device).view(-1, 128)
    losses = []
    for step in tqdm(range(steps), leave=False, disable=None):
        batch = pieces[2 * step % len(pieces) :][:2]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
