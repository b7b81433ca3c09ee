from dataclasses import dataclass

MAX_WIDTH = 4096  # one program holds a whole row in registers; V4's indexer transforms rows of 128


@dataclass(frozen=True)
class HadamardConfig:
    rows: int  # rows of a tile
    num_warps: int


def choose_config(width: int) -> HadamardConfig:
    """Tile for rows of `width` channels: at least 2048 channels, 64 a thread, as in rms_norm's forward.

    Rows of up to 2048 channels then lie within one warp, where a butterfly is a shuffle or a move between registers;
    a row of 4096 crosses two warps in one of its 12 butterflies.
    """
    rows = max(1, 2048 // width)
    return HadamardConfig(rows, num_warps=rows * width // 2048)
