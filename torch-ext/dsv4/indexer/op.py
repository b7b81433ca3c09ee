"""Top-k of index scores: public function and registered op."""

import torch

from .._ops import add_op_namespace_prefix, ops
from ..common.checks import check_same_device
from ..common.dispatch import Backends
from ..common.eager import is_eager
from .configs import MAX_K

BACKENDS = Backends(__package__, "triton", "reference")
SCORES = (torch.float16, torch.bfloat16, torch.float32)
LENGTHS = (torch.int32, torch.int64)


def topk(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest scores of each row, exactly, sorted, the same on every run.

    Larger scores stand first and equal ones by their index, the lower first, also where they compete for the last slot;
    0.0 and -0.0 are equal. NaN is the lowest score of all, below -inf: it is selected only where fewer than k others
    are visible. A row's result depends on the row alone. Has no gradient: both results are detached from `scores`; gather
    with the indices where the values' gradient is wanted.

    Args:
        scores: [..., N], float16, bfloat16 or float32, any strides, N from 0.
        k: from 0 to 2048; may exceed N.
        lengths: [...], int32 or int64, or None: in each row the entries at or past it don't exist. Below 0 counts as 0
            and above N as N.

    Returns:
        values [..., k] in scores' dtype and indices [..., k] in int32, both contiguous. Slots beyond what is visible
        hold -inf and -1; a visible -inf keeps its index.

    Raises:
        TypeError: scores or lengths of another dtype, or k no int.
        ValueError: scores without dimensions, k out of range, or lengths of another shape than scores' rows or on another
            device.
        NotImplementedError: no backend covers the call; says why for each.

    Source: DeepSeek-V4 inference code `Indexer` (`torch.topk`, whose order of equal scores is not specified).
    """
    if not (is_eager(scores) if lengths is None else is_eager(scores, lengths)):
        _check(scores, k, lengths)
        return ops.topk(scores.detach(), k, lengths)
    return _topk(scores.detach() if scores.requires_grad else scores, k, lengths)


def _check(scores, k, lengths):
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if scores.dtype not in SCORES:
        raise TypeError(f"scores must be float16, bfloat16 or float32, got {scores.dtype}")
    if scores.dim() == 0:
        raise ValueError("scores must have at least one dimension, got a scalar")
    if not isinstance(k, (int, torch.SymInt)) or isinstance(k, bool):
        raise TypeError(f"k must be an int, got {type(k).__name__}")
    if not 0 <= k <= MAX_K:
        raise ValueError(f"k must be from 0 to {MAX_K}, got {k}")
    if lengths is None:
        return
    if not isinstance(lengths, torch.Tensor):
        raise TypeError(f"lengths must be a torch.Tensor or None, got {type(lengths).__name__}")
    if lengths.dtype not in LENGTHS:
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
    check_same_device("lengths", lengths, "scores", scores)
    if lengths.shape != scores.shape[:-1]:
        raise ValueError(f"lengths must have shape {tuple(scores.shape[:-1])}, one for each row of scores, got {tuple(lengths.shape)}")


def _topk(scores, k, lengths):
    key = _key(scores, k, lengths)
    launch = BACKENDS.prepared.get(key)
    if launch is None:
        _check(scores, k, lengths)
        values, indices = _empty(scores, k)
        backend = BACKENDS.choose(scores, values, lengths)
        launch = BACKENDS.remember(key, backend.prepare_topk(scores, lengths, values, indices))
    values, indices = _empty(scores, k)
    launch(scores, lengths, values, indices)
    return values, indices


def _key(scores, k, lengths):
    """All that the checks and the launch depend on but the data and its alignment. k's type: True would equal 1."""
    key = (scores.shape, scores.stride(), scores.dtype, scores.get_device(), k, type(k))
    if lengths is None:
        return key
    return (*key, lengths.shape, lengths.stride(), lengths.dtype, lengths.get_device())


def _empty(scores, k):
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int32)


torch.library.define(add_op_namespace_prefix("topk"), "(Tensor scores, int k, Tensor? lengths) -> (Tensor, Tensor)")
torch.library.impl(add_op_namespace_prefix("topk"), ("cpu", "cuda", "xpu"), _topk)
torch.library.register_fake(add_op_namespace_prefix("topk"), lambda scores, k, lengths: _empty(scores, k))
