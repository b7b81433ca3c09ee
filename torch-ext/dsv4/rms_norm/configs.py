from dataclasses import dataclass

MAX_WIDTH = 32768  # one program holds a whole row in registers; V4-Pro's widest row is 4 streams x 7168


@dataclass(frozen=True)
class RmsNormConfig:
    rows: int  # rows a tile holds
    width: int  # columns a tile holds, a power of two >= the row's
    num_warps: int
    programs: int  # backward: programs that walk the rows, each with its own partial weight gradient


def choose_config(rows: int, width: int, backward: bool = False) -> RmsNormConfig:
    """Tile for `rows` rows of `width` channels; the same on every device, so results don't depend on the card."""
    block = 1 << (width - 1).bit_length()
    tile = 2048 if backward else 4096
    tile_rows = max(1, tile // block)
    num_warps = min(16, max(4, tile_rows * block // 512))
    # Partials cost 4 bytes a channel and program, x and dout 4 bytes a channel and row: at most 1/8 of the traffic.
    programs = max(1, min(512, rows // (8 * tile_rows)))
    return RmsNormConfig(tile_rows, block, num_warps, programs)
