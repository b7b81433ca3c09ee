"""RoPE at V4-Flash's dimensions: the query alone, and the three calls of an attention block."""

from collections.abc import Callable
from types import ModuleType

import torch

from .harness import Case, Provider, Results, Tensors, Work

LENGTHS = (512, 2048, 4096)
HEADS, WIDTH, ROTARY, THETA = 64, 512, 64, 10000.0
INVERSE = "o"  # the attention's output is rotated back

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]  # (x, cos, sin, inverse)


def cases(kernel: ModuleType, tiny: bool = False) -> list[Case]:
    """q_T<n>: one call on the query. agg_T<n>: query, shared key/value, and the inverse on the attention's output.

    `tiny` gives sizes for a dry run on a CPU.
    """
    lengths, heads = ((16,), 4) if tiny else (LENGTHS, HEADS)
    fresh = fresh_rotations(kernel)
    compiled = {"compile": torch.compile(fresh["eager"], fullgraph=True, dynamic=False)}
    inplace = {"dsv4_inplace": inplace_rotation(kernel)}
    single = {"q": heads}
    block = {"q": heads, "kv": 1, INVERSE: heads}
    return [
        *(case(f"q_T{n}", n, single, PASSES, fresh | compiled | inplace) for n in lengths),
        *(case(f"agg_T{n}", n, block, ("full",), fresh | compiled) for n in lengths),
        case("host_tiny", 1, single, ("step",), fresh | inplace, timer="host"),
    ]


PASSES = ("forward", "backward", "full")


def case(
    name: str, tokens: int, heads: dict[str, int], passes: tuple[str, ...], rotations: dict[str, Rotate], **more
) -> Case:
    """The calls on x [1, heads, tokens, WIDTH], one for each entry of `heads`, as one case."""

    def call(rotate: Rotate) -> Callable[[Tensors], Results]:
        return lambda t: tuple([rotate(t[x], t["cos"], t["sin"], x == INVERSE) for x in heads])

    return Case(
        op="rope",
        name=name,
        passes=passes,
        make=lambda device: make(tokens, heads, device),
        reference=call(reference),
        work=lambda pass_name, inplace: work(tokens, sum(heads.values()), pass_name, inplace),
        providers=tuple(
            Provider(p, call(r), p.startswith("dsv4"), p.endswith("inplace")) for p, r in rotations.items()
        ),
        wrt=tuple(heads),
        **more,
    )


def fresh_rotations(kernel: ModuleType) -> dict[str, Rotate]:
    """Ours and transformers' function, whose inverse takes a negated sine as its attention does."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    return {
        "dsv4": lambda x, cos, sin, inverse: kernel.apply_rotary_pos_emb(x, cos, sin, inverse=inverse),
        "eager": lambda x, cos, sin, inverse: apply_rotary_pos_emb(x, cos, -sin if inverse else sin),
    }


def inplace_rotation(kernel: ModuleType) -> Rotate:
    return lambda x, cos, sin, inverse: kernel.apply_rotary_pos_emb_(x, cos, sin, inverse=inverse)


def make(tokens: int, heads: dict[str, int], device: torch.device) -> Tensors:
    """bf16 views [1, heads, tokens, WIDTH] of [1, tokens, heads, WIDTH], as projections leave them, and bf16 tables.

    The tables are transformers': cos and sin of position * THETA^(-2i/ROTARY), one entry a pair, rounded to x's dtype.
    """
    tensors = {
        x: torch.randn(1, tokens, count, WIDTH, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for x, count in heads.items()
    }
    first = torch.randint(0, 60000, ()).item()
    positions = torch.arange(first, first + tokens, device=device, dtype=torch.float32)
    frequencies = THETA ** -(torch.arange(0, ROTARY, 2, device=device, dtype=torch.float32) / ROTARY)
    angles = positions[None, :, None] * frequencies
    return tensors | {"cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """(even + i odd) * (cos + i sin) on the trailing channels, in x's dtype (fp64)."""
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    even, odd = x[..., -ROTARY::2], x[..., 1 - ROTARY :: 2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-ROTARY], rotated), -1)


def work(tokens: int, heads: int, pass_name: str, inplace: bool) -> Work:
    """Bytes: 2 * tokens * heads * channels bf16 (read x or its gradient, write the other) + cos and sin once.

    In place only the ROTARY channels move. Flops: 4 products and 2 sums a pair. full = forward + backward.
    """
    channels = ROTARY if inplace else WIDTH
    tables = 2 * tokens * (ROTARY // 2) * 2
    once = Work(2 * tokens * heads * channels * 2 + tables, 6 * tokens * heads * (ROTARY // 2))
    return once + once if pass_name == "full" else once
