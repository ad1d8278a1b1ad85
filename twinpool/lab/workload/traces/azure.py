"""Azure's LLM inference traces: a CSV of time, prompt length and answer length.

Source:
    github.com/Azure/AzurePublicDataset, ``AzureLLMInferenceDataset2023.md`` and ``...2024.md``: the columns
    ``TIMESTAMP,ContextTokens,GeneratedTokens``; times are dates with fractions of a second.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.lines import MOST_TOKENS, read_lines, whole_number

_NUMBER = re.compile(r" *[0-9]{1,18} *")
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
            tokens = _digits(prompt), _digits(output)
        except ValueError:
            raise ConfigError(f"{path}:{number}", f"{line!r} is not {HEADER}") from None
        for count in tokens:
            whole_number(count, f"{path}:{number}", least=1, most=MOST_TOKENS)
        start = start or at
        if (start.tzinfo is None) is not (at.tzinfo is None):
            raise ConfigError(f"{path}:{number}", f"{moment}: some times have an offset, and some have none")
        yield WorkItem(
            index=index,
            arrival_s=(at - start).total_seconds(),
            prompt_tokens=tokens[0],
            output_tokens=tokens[1],
        )


def _digits(text: str) -> int:
    """Read a number of tokens; Python would also take ``1_000`` and the digits of other scripts."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return int(text)
