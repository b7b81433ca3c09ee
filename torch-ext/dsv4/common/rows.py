"""Tensors as rows: leading dimensions merged as far as their strides allow, so that kernels read any layout."""

import functools

MAX_DIMS = 3  # what a row kernel indexes; a model's [B, H, T, D] views need at most three


@functools.lru_cache(maxsize=4096)
def merge_rows(shape, *strides):
    """Merge leading dimensions whose strides nest in every tensor alike.

    Args:
        shape: the leading sizes, shared by all tensors.
        strides: for each tensor its strides over those dimensions.

    Returns:
        lists of sizes, then for each tensor its strides; outermost dimension of the first tensor first, no dimension of size 1.
        The order of rows may differ from the logical one, alike for all tensors.
    """
    dims = [(size, *steps) for size, *steps in zip(shape, *strides) if size != 1]
    dims.sort(key=lambda dim: dim[1], reverse=True)
    merged = []
    for size, *steps in dims:
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], steps)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return [list(column) for column in zip(*merged)] or [[] for _ in range(1 + len(strides))]


def pad_dims(values, fill):
    """Exactly MAX_DIMS values, filled at the front."""
    return [fill] * (MAX_DIMS - len(values)) + values
