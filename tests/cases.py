"""Named shapes, layouts and hostile memory that the op tests share."""

import gc
from dataclasses import dataclass

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class RopeCase:
    """x is [batch, heads, tokens, width] with the trailing 2 * pairs channels rotary."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    pairs: int

    def __str__(self):
        return self.name


ROPE = (
    RopeCase("q", batch=1, heads=4, tokens=9, width=512, pairs=32),
    RopeCase("shared_kv", batch=2, heads=1, tokens=17, width=512, pairs=32),
    RopeCase("indexer", batch=2, heads=3, tokens=5, width=128, pairs=32),
    RopeCase("decode", batch=3, heads=8, tokens=1, width=64, pairs=8),
    RopeCase("full_rotary", batch=2, heads=3, tokens=5, width=16, pairs=8),
    RopeCase("odd_everything", batch=3, heads=5, tokens=7, width=45, pairs=11),
    RopeCase("one_pair", batch=1, heads=1, tokens=1, width=2, pairs=1),
    RopeCase("one_pair_odd_width", batch=1, heads=2, tokens=3, width=3, pairs=1),
    RopeCase("no_tokens", batch=2, heads=3, tokens=0, width=32, pairs=4),
    RopeCase("no_batch", batch=0, heads=3, tokens=4, width=32, pairs=4),
)


def rope_tables(case, device, dtype=torch.float32, batch=1, seed=1):
    """cos and sin of angles up to a million positions, [batch, tokens, pairs]."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.randint(0, 1_048_576, (batch, case.tokens, 1), generator=generator).double()
    frequency = 10000.0 ** (-torch.arange(case.pairs, dtype=torch.float64) / case.pairs)
    angle = position * frequency
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


# Widths: V4's norms (512, 1024, 4096, 7168 and the four streams' 16384), odd ones, and one channel.
NORM_SHAPES = (
    (4, 512),
    (2, 3, 1024),
    (3, 4096),
    (2, 1, 7168),
    (2, 16384),
    (2, 3, 4, 33),
    (5, 96),
    (3, 200),
    (7, 1),
    (64,),
    (0, 512),
    (2, 0, 64),
)


def layouts(x):
    """The same values in memory orders that models and callers produce, by name."""
    yield "contiguous", x.contiguous()
    if x.dim() > 2:
        yield "transposed", x.transpose(-3, -2).contiguous().transpose(-3, -2)
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), float("nan"))
    wide[..., 3 : 3 + x.shape[-1]] = x
    yield "slice_of_wider_rows", wide[..., 3 : 3 + x.shape[-1]]
    spread = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    spread[..., ::2] = x
    yield "every_second_channel", spread[..., ::2]
    if x.dim() > 1:
        strided = x.new_full((2 * x.shape[0], *x.shape[1:]), float("nan"))
        strided[::2] = x
        yield "every_second_row", strided[::2]


def poison(device, *sizes):
    """Leave NaN in memory that the next allocations of these byte sizes are likely to get."""
    blocks = [torch.full((max(size, 4) // 4,), float("nan"), device=device) for size in sizes for _ in range(4)]
    del blocks
    gc.collect()
