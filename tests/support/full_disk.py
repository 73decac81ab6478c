"""Write nodes to a disk with room for a few: `python full_disk.py DIRECTORY TOKENS...`.

Prints the numbers of the nodes that the disk holds in the end, as a JSON list.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx

from backend.cache.disk_tier import NodeDirectory, StoredNode
from backend.cache.kv import Block, Segment, evaluate, to_plain
from backend.cache.radix import TokenKey

BUDGET_BYTES = 2**30


def node(number: int, tokens: int) -> StoredNode:
    """The beginning of a conversation of its own, 512 bytes a token."""
    keys = mx.zeros((1, 1, tokens, 128), mx.float32)
    segment = Segment((Block(tokens, ((keys,),)),), None)
    evaluate([segment])
    ids = range(1000 * number, 1000 * number + tokens)
    return StoredNode(TokenKey.from_ids(ids), 0, to_plain(segment))


def main() -> None:
    """Write all nodes; an `OSError` ends the program."""
    directory = NodeDirectory(Path(sys.argv[1]), "0123456789abcdef01234567", BUDGET_BYTES)
    nodes = [node(number, int(tokens)) for number, tokens in enumerate(sys.argv[2:])]
    for each in nodes:
        directory.write(each)
    held = [
        number
        for number, each in enumerate(nodes)
        if directory.read(each.key, 0, ends_at_snapshot=False)
    ]
    sys.stdout.write(json.dumps(held))


if __name__ == "__main__":
    main()
