"""Azure's LLM inference traces: a CSV of time, prompt length and answer length.

Source:
    github.com/Azure/AzurePublicDataset, ``AzureLLMInferenceDataset2023.md`` and ``...2024.md``: the columns
    ``TIMESTAMP,ContextTokens,GeneratedTokens``; times are dates with fractions of a second.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.lines import read_lines

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read_azure(path: Path) -> Iterator[WorkItem]:
    """Yield the requests of a trace; the first one comes at 0.

    Raises:
        ConfigError: The file has other columns, or a line does not fit them; it is named.
    """
    lines = read_lines(path)
    number, header = next(lines, (1, ""))
    if header.strip() != HEADER:
        raise ConfigError(f"{path}:{number}", f"{header!r} is not {HEADER}")
    start: datetime.datetime | None = None
    for index, (number, line) in enumerate(lines):
        try:
            moment, prompt, output = line.split(",")
            at = datetime.datetime.fromisoformat(moment)
            tokens = int(prompt), int(output)
        except ValueError:
            raise ConfigError(f"{path}:{number}", f"{line!r} is not {HEADER}") from None
        if min(tokens) < 1:
            raise ConfigError(f"{path}:{number}", f"{min(tokens)} is less than 1 token")
        start = start or at
        yield WorkItem(
            index=index,
            arrival_s=(at - start).total_seconds(),
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
        )
