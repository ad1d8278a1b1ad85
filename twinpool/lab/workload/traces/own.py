"""Our own traces: a line of JSON for each request, with the fields of ``WorkItem``.

Any workload can be kept so.  Tokens behind the last of ``blocks`` are like no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TextIO

from twinpool.core.config import bind
from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.lines import MOST_TOKENS, read_objects, whole_number


def read_own(path: Path) -> Iterator[WorkItem]:
    """Yield the requests of a file that ``write_own`` wrote, or that looks like it.

    Raises:
        ConfigError: A line has an unknown field, lacks one, or one does not fit; line and field are named.
    """
    for index, (where, line) in enumerate(read_objects(path)):
        item = bind(WorkItem, {"index": index} | dict(line), where)
        for name in ("prompt_tokens", "output_tokens"):
            whole_number(getattr(item, name), f"{where}.{name}", least=1, most=MOST_TOKENS)
        if item.blocks and item.block_tokens * (len(item.blocks) - 1) >= item.prompt_tokens:
            raise ConfigError(
                f"{where}.blocks",
                f"{len(item.blocks)} of {item.block_tokens} tokens are too many for {item.prompt_tokens}",
            )
        if item.blocks and item.block_tokens < 1:
            raise ConfigError(f"{where}.block_tokens", f"{item.block_tokens} is less than 1")
        yield item


def write_own(items: Iterable[WorkItem], file: TextIO) -> int:
    """Write a line for each request, without what has its default; return how many."""
    return sum(1 for item in items if file.write(to_line(item) + "\n"))


def to_line(item: WorkItem) -> str:
    """Return one request as JSON: equal requests give equal bytes."""
    told: dict[str, Any] = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if field.default is MISSING or value != field.default:
            told[field.name] = value
    return json.dumps(told, separators=(",", ":"))
