from dataclasses import dataclass

MAX_K = 2048  # a row's selection is sorted by one program
TILE = 16384  # entries that one program holds in registers, 32 for each thread of 16 warps


@dataclass(frozen=True)
class SelectConfig:
    """One pass of the selection: each program brings a chunk of a row down to its k best entries."""

    chunks: int  # programs a row
    per_thread: int  # entries of a chunk that a thread keeps
    threads: int  # columns of the tile, one for each thread: a count over the tile is then a count in each thread first
    groups: int  # >= k: the largest entries of so many groups bound the k-th largest from below

    @property
    def num_warps(self) -> int:
        return max(1, self.threads // 32)


@dataclass(frozen=True)
class SortConfig:
    width: int  # entries of a row, a power of two >= k
    num_warps: int


def choose_select_configs(columns: int, k: int) -> tuple[SelectConfig, ...]:
    """Passes over rows of `columns` entries: chunks first, then what is left of them, until one chunk holds the row.

    A row that fits is read once and stays in registers; a longer one is read once, and k / 16384 of it again.
    """
    passes = []
    while True:
        width = min(TILE, _power_of_two(max(columns, k)))
        threads = min(width, max(32, width // 32))
        chunks = -(-columns // width)
        passes.append(SelectConfig(chunks, width // threads, threads, groups=max(threads, _power_of_two(k))))
        if chunks == 1:
            return tuple(passes)
        columns = chunks * k


def choose_sort_config(k: int) -> SortConfig:
    """8 entries a thread: up to 256 of them lie within one warp and need no barrier."""
    width = _power_of_two(k)
    return SortConfig(width, num_warps=max(1, width // 256))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
