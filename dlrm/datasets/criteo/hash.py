"""Content hashes of files, from blocks that several processes can hash at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

HASH_BLOCK = 16 << 20  # bytes
PIECE = 1 << 20  # bytes read at a time


class BlockHash:
    """Content hash of bytes that arrive in pieces: xxh3_128 of the digests of blocks of 16 MiB.

    Blocks can be hashed by several processes at a time, in any order.
    """

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.block = xxhash.xxh3_128()
        self.room = HASH_BLOCK

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        while len(view) >= self.room:
            self.block.update(view[: self.room])
            view = view[self.room :]
            self.digests.append(self.block.digest())
            self.block.reset()
            self.room = HASH_BLOCK
        self.block.update(view)
        self.room -= len(view)

    def hexdigest(self) -> str:
        last = [] if self.room == HASH_BLOCK else [self.block.digest()]
        return hash_of_blocks(self.digests + last)


def hash_of_blocks(digests: list[bytes]) -> str:
    """The content hash, from the digests of the blocks in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def hash_file(path: str | os.PathLike[str], listen: Callable[[int], None] | None = None) -> str:
    """The content hash of a file, read at the disk's speed."""
    blocks = BlockHash()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            blocks.update(piece)
            if listen:
                listen(len(piece))
    return blocks.hexdigest()
