"""Tiles of RMSNorm, forward and backward."""

from dataclasses import dataclass

MAX_WIDTH = 32768  # one program holds a whole row in registers; V4-Pro's widest row is 4 streams x 7168



@dataclass(frozen=True)
class RmsNormConfig:
    rows: int  # rows of a tile
    width: int  # columns of a tile, a power of two >= the row's
    num_warps: int


@dataclass(frozen=True)
class RmsNormBackwardConfig(RmsNormConfig):
    programs: int  # with a weight: so many programs walk the tiles, each with its own partial weight gradient
    stages: int  # tiles in flight for each program


# Tiles and programs are the same on every device and for every number of rows: a row's result depends on the row alone.
# Figures: benchmarks/NOTES.md.


def choose_config(width: int) -> RmsNormConfig:
    """Forward tile for rows of `width` channels: one tile a program, 64 channels a thread."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, 2048 // block)
    return RmsNormConfig(rows, block, num_warps=min(16, rows * block // 2048))


def choose_backward_config(width: int, element_size: int, shared_memory: int) -> RmsNormBackwardConfig:
    """Backward tile: 32 channels a thread, and as many tiles in flight as `shared_memory` bytes hold, at most 4."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, 1024 // block)
    num_warps = min(16, rows * block // 1024)
    stages = max(1, min(4, shared_memory // (2 * rows * block * element_size)))
    # 8 warps for each of an H200's 132 multiprocessors: more programs write more partials, fewer don't fill the card.
    return RmsNormBackwardConfig(rows, block, num_warps, 1056 // num_warps, stages)
