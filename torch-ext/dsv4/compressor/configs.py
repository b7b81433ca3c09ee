"""Tiles of compress_kv, forward and backward."""

from dataclasses import dataclass

MAX_SLOTS = 1024  # a program holds all slots of a window; V4's windows have 128 (HCA) and 2 x 4 (CSA)
MAX_WIDTH = 8192  # the norm's program holds a whole entry; V4's entries have 512 and 128 channels


@dataclass(frozen=True)
class PoolConfig:
    slots: int  # slots of a tile, a power of two >= the window's
    channels: int  # channels of a tile
    blocks: int  # tiles that an entry's channels take
    groups: int  # so many programs for each block walk the windows
    num_warps: int
    stages: int  # windows in flight for each program


@dataclass(frozen=True)
class NormConfig:
    rows: int  # entries of a tile
    width: int  # channels of a tile, a power of two >= the entry's
    num_warps: int
    programs: int  # the backward's programs walk the tiles, each with its own partial weight gradient


# Tiles are the same on every device and for every number of windows: an entry depends on its window alone.


def choose_pool_config(
    rows: int, slots: int, width: int, slot_bytes: int, shared_memory: int, backward: bool
) -> PoolConfig:
    """Tile for `rows` windows of `slots` slots and entries of `width` channels: all slots, and as many channels as fit.

    A thread holds 32 elements of kv and as many logits and biases; the backward's 16, for it holds twice the tiles.
    Windows in flight are as many as `shared_memory` bytes hold, at most 3, at `slot_bytes` bytes read for a slot's channel;
    a program with one window has no use for more.
    """
    tile_slots, block = _power_of_two(slots), max(2, _power_of_two(width))
    channels = min(block, max(2, 8192 // tile_slots))
    size, blocks = tile_slots * channels, -(-width // channels)
    num_warps = max(1, min(16, size // (512 if backward else 1024)))
    # 8 warps for each of an H200's 132 multiprocessors, as in rms_norm.
    groups = min(rows, max(1, max(66, 1056 // num_warps) // blocks))
    stages = 1 if groups == rows else max(1, min(3, shared_memory // (size * slot_bytes)))
    return PoolConfig(tile_slots, channels, blocks, groups, num_warps, stages)


def choose_norm_config(width: int) -> NormConfig:
    """Tile for entries of `width` channels: 32 channels a thread."""
    block = max(2, _power_of_two(width))
    rows = max(1, 1024 // block)
    num_warps = max(1, min(16, rows * block // 1024))
    return NormConfig(rows, block, num_warps, 1056 // num_warps)


def _power_of_two(value):
    return 1 << (value - 1).bit_length()
