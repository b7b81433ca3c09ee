"""RMSNorm: rows x width of V4's norms, from one decoded token to a prefill's heads."""

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import torch

from .harness import Case, Provider, Results, Tensors, Work

# (rows, width): hidden states of 4096 tokens, 64 heads of 4096 tokens, one and 64 decoded tokens, a wider hidden state
SHAPES = ((4096, 4096), (4096 * 64, 512), (1, 4096), (64, 4096), (4096, 7168))
UNWEIGHTED = ((4096 * 64, 512),)
EPS = 1e-6

Norm = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x, weight)


def cases(kernel: ModuleType, tiny: bool = False) -> list[Case]:
    """<rows>x<width> with an fp32 weight, <rows>x<width>_unweighted without. `tiny` gives sizes for a dry run."""
    weighted, unweighted = (((8, 64),), ((8, 32),)) if tiny else (SHAPES, UNWEIGHTED)
    return [
        *(case(f"{rows}x{width}", rows, width, weighted_norms(kernel, width)) for rows, width in weighted),
        *(case(f"{rows}x{width}_unweighted", rows, width, plain_norms(kernel), False) for rows, width in unweighted),
        case("host_tiny", 1, 64, host_norms(kernel), passes=("step",), timer="host"),
    ]


def case(
    name: str,
    rows: int,
    width: int,
    norms: dict[str, Norm],
    weighted: bool = True,
    passes: tuple[str, ...] = ("forward", "backward", "full"),
    **more,
) -> Case:
    """One call on bf16 x [rows, width]."""

    def call(norm: Norm) -> Callable[[Tensors], Results]:
        return lambda t: (norm(t["x"], t.get("weight")),)

    out_size = 4 if weighted and rounding() == "normalized" else 2
    return Case(
        op="rms_norm",
        name=name,
        passes=passes,
        make=lambda device: make(rows, width, weighted, device),
        reference=call(reference),
        work=lambda pass_name, inplace: work(rows, width, weighted, out_size, pass_name),
        providers=tuple(Provider(p, call(norm), p.startswith("dsv4")) for p, norm in norms.items()),
        wrt=("x", "weight") if weighted else ("x",),
        **more,
    )


def rounding() -> str:
    """What the installed transformers rounds: before 5.20 the normalized x, where an fp32 weight widens the result."""
    import transformers

    major, minor = transformers.__version__.split(".")[:2]
    return "once" if (int(major), int(minor)) >= (5, 20) else "normalized"


def host_norms(kernel: ModuleType) -> dict[str, Norm]:
    norms = weighted_norms(kernel, 64)
    return {name: norms[name] for name in ("dsv4", "eager")}


def weighted_norms(kernel: ModuleType, width: int) -> dict[str, Norm]:
    """Ours and DeepseekV4RMSNorm's, both rounding as the installed transformers does, and Liger's where installed."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

    module, order = DeepseekV4RMSNorm(width, eps=EPS), rounding()

    def with_weight(run: Callable[[torch.Tensor], torch.Tensor]) -> Norm:
        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            module._parameters["weight"] = weight  # the case owns the weights: they rotate with x
            return run(x)

        return norm

    norms = {
        "dsv4": lambda x, weight: kernel.rms_norm(x, weight, EPS, rounding=order),
        "eager": with_weight(module),
        "compile": with_weight(torch.compile(module, fullgraph=True, dynamic=False)),
    }
    return norms | liger_norm()


def liger_norm() -> dict[str, Norm]:
    """Liger's with the mode that is fp32 until one last cast; it is left out by the check where transformers widens."""
    if find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.transformers.functional import liger_rms_norm

    return {"liger": lambda x, weight: liger_rms_norm(x, weight, EPS, 0.0, "gemma", False)}


def plain_norms(kernel: ModuleType) -> dict[str, Norm]:
    """Ours and DeepseekV4UnweightedRMSNorm's: rsqrt rounded to x's dtype, then the product."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4UnweightedRMSNorm

    module = DeepseekV4UnweightedRMSNorm(eps=EPS)
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    return {
        "dsv4": lambda x, _: kernel.rms_norm(x, None, EPS, rounding="scale"),
        "eager": lambda x, _: module(x),
        "compile": lambda x, _: compiled(x),
    }


def make(rows: int, width: int, weighted: bool, device: torch.device) -> Tensors:
    tensors = {"x": torch.randn(rows, width, device=device, dtype=torch.bfloat16)}
    if weighted:
        tensors["weight"] = 1 + 0.1 * torch.randn(width, device=device)
    return tensors


def reference(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, in x's dtype (fp64), nothing rounded."""
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return normalized if weight is None else normalized * weight


def work(rows: int, width: int, weighted: bool, out_size: int, pass_name: str) -> Work:
    """Forward: read x, write y, read w. Backward: read x and dy, write dx, read w, write dw. full = forward + backward.

    x is bf16, w fp32, y and dy have out_size bytes an element. Flops an element, with r = rsqrt(mean(x^2) + eps):
    forward 2 (sum of squares) + 1 (scale by r) + 1 (weight); backward 2 (dot of w dy and x) + 3 (dx = r (w dy - c x)),
    and with a weight 1 (w dy) + 3 (dw += r x dy).
    """
    elements, weight_bytes = rows * width, 4 * width if weighted else 0
    forward = Work(elements * (2 + out_size) + weight_bytes, elements * (4 if weighted else 3))
    backward = Work(elements * (4 + out_size) + 2 * weight_bytes, elements * (9 if weighted else 5))
    return {"forward": forward, "step": forward, "backward": backward, "full": forward + backward}[pass_name]
