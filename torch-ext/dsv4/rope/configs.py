from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    rows: int  # heads of one or several tokens that one program rotates
    pairs: int  # channel pairs of a row that one program holds, a power of two
    num_warps: int


def choose_config(channels: int, element_size: int) -> RopeConfig:
    """Tile for rows of which `channels` channels are read and written."""
    pairs = 1 << max(0, (channels + 1) // 2 - 1).bit_length()
    # 4 KB a program is two 16-byte loads in flight for each of 128 threads.
    rows = max(1, 4096 // (2 * pairs * element_size))
    return RopeConfig(rows, pairs, num_warps=4)
