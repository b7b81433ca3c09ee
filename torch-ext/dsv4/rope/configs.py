"""Tiles of the rotary embedding."""

from dataclasses import dataclass

MAX_WIDTH = 32768  # one program holds a whole row


@dataclass(frozen=True)
class RopeConfig:
    tokens: int  # tokens of a tile
    heads: int  # heads of a tile
    pairs: int  # channel pairs of a tile, a power of two
    num_warps: int


def choose_config(heads: int, channels: int, element_size: int) -> RopeConfig:
    """Tile for tokens of `heads` heads, of which `channels` channels are read and written.

    4 KB a tile and 128 threads: two 16-byte loads in flight for each thread, see benchmarks/NOTES.md.
    """
    pairs = 1 << max(0, (channels + 1) // 2 - 1).bit_length()
    rows = max(1, 4096 // (2 * pairs * element_size))
    tile_heads = min(rows, 1 << (heads - 1).bit_length())
    return RopeConfig(rows // tile_heads, tile_heads, pairs, num_warps=4)
