"""Mooncake's traces: a line of JSON for each request, with ids that say which prompts begin alike.

Source:
    github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``: ``timestamp`` in milliseconds,
    ``input_length``, ``output_length``, and one of ``hash_ids`` for each 512 tokens of the prompt and one for
    what is left.  An id stands for a block and all before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.lines import MOST_TOKENS, read_objects, whole_number

BLOCK_TOKENS = 512
_MOST_MS = 10**15


def read_mooncake(path: Path) -> Iterator[WorkItem]:
    """Yield the requests of a trace at the times it says.

    Raises:
        ConfigError: A line lacks a field, or a field does not fit; both are named.
    """
    for index, (where, line) in enumerate(read_objects(path)):
        for name in ("timestamp", "input_length", "output_length"):
            if name not in line:
                raise ConfigError(f"{where} {name}", "is missing")
        at_ms, ids = line["timestamp"], line.get("hash_ids", [])
        if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms <= _MOST_MS:
            raise ConfigError(f"{where} timestamp", f"{at_ms!r} is no time in milliseconds")
        if not isinstance(ids, list):
            raise ConfigError(f"{where} hash_ids", "is not a list")
        tokens = whole_number(line["input_length"], f"{where} input_length", least=1, most=MOST_TOKENS)
        blocks = tuple(whole_number(block, f"{where} hash_ids", least=0) for block in ids)
        if len(blocks) > math.ceil(tokens / BLOCK_TOKENS):
            raise ConfigError(f"{where} hash_ids", f"{len(blocks)} are too many for {tokens} tokens")
        yield WorkItem(
            index=index,
            arrival_s=at_ms / 1000,
            prompt_tokens=tokens,
            output_tokens=whole_number(
                line["output_length"], f"{where} output_length", least=1, most=MOST_TOKENS
            ),
            blocks=blocks,
            block_tokens=BLOCK_TOKENS if blocks else 0,
        )
