"""For `kernels benchmark .`: a few verified workloads against plain torch. sweep.py has the full measurements.

Self-contained: the runner loads this file alone. Inputs are uniform in [-1, 1], so that the results stay below 2, where
one bf16 step is less than the runner's tolerance of 1e-2.
"""

import torch
from kernels.benchmark import Benchmark


def uniform(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (2 * torch.rand(*shape, device=device) - 1).to(dtype)


class RopeBenchmark(Benchmark):
    """V4-Flash's query: 64 heads of 512 channels, the trailing 64 rotated; on a CPU 4 heads."""

    seed = 2
    rotary = 64

    def prepare(self, tokens: int) -> None:
        heads = 4 if self.device == "cpu" else 64
        # The projection's output [B, T, H, D], transposed as the model does.
        self.x = uniform(1, tokens, heads, 512, device=self.device).transpose(1, 2)
        self.original = self.x.clone()
        positions = torch.arange(1000, 1000 + tokens, device=self.device)
        angles = positions[:, None] * 10000.0 ** -(torch.arange(0, self.rotary, 2, device=self.device) / self.rotary)
        self.cos, self.sin = angles.cos().bfloat16()[None], angles.sin().bfloat16()[None]

    def rotated(self) -> torch.Tensor:
        """(even + i odd) * (cos + i sin) in fp32, rounded once."""
        cos, sin, tail = (
            self.cos[:, None].float(),
            self.sin[:, None].float(),
            self.original[..., -self.rotary :].float(),
        )
        even, odd = tail[..., ::2], tail[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        return torch.cat((self.original[..., : -self.rotary], rotated.to(self.x.dtype)), -1)

    def setup_decode(self) -> None:
        self.prepare(1)

    def benchmark_decode(self) -> None:
        self.out = self.kernel.apply_rotary_pos_emb(self.x, self.cos, self.sin)

    def verify_decode(self) -> torch.Tensor:
        return self.rotated()

    def setup_prefill(self) -> None:
        self.prepare(64 if self.device == "cpu" else 4096)

    def benchmark_prefill(self) -> None:
        self.out = self.kernel.apply_rotary_pos_emb(self.x, self.cos, self.sin)

    def verify_prefill(self) -> torch.Tensor:
        return self.rotated()

    def setup_prefill_inplace(self) -> None:
        self.setup_prefill()

    def benchmark_prefill_inplace(self) -> None:
        self.out = self.kernel.apply_rotary_pos_emb_(self.x, self.cos, self.sin)

    def verify_prefill_inplace(self) -> torch.Tensor:
        return self.rotated()  # of the original: the runner verifies after one call


class RmsNormBenchmark(Benchmark):
    """Hidden states of V4-Flash, 4096 wide, with an fp32 weight."""

    seed = 3

    def prepare(self, rows: int) -> None:
        self.x = uniform(rows, 4096, device=self.device)
        self.weight = 1 + 0.1 * uniform(4096, device=self.device, dtype=torch.float32)

    def normalized(self) -> torch.Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded once."""
        x = self.x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(self.x.dtype)

    def setup_decode(self) -> None:
        self.prepare(1)

    def benchmark_decode(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, 1e-6)

    def verify_decode(self) -> torch.Tensor:
        return self.normalized()

    def setup_prefill(self) -> None:
        self.prepare(64 if self.device == "cpu" else 4096)

    def benchmark_prefill(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight, 1e-6)

    def verify_prefill(self) -> torch.Tensor:
        return self.normalized()
