"""A file of records: what is written is read again, to the microsecond."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.core.errors import ConfigError
from twinpool.lab.record import Record
from twinpool.lab.records import read_records, record_line

ANSWERED = Record(
    index=0,
    due_s=0.5,
    sent_s=0.500123,
    first_token_s=0.75,
    last_token_s=1.25,
    gaps_s=(0.25, 0.25),
    end_s=1.3,
    prompt_tokens=9,
    cached_tokens=3,
    output_tokens=3,
    queue_s=0.01,
    kv_bytes=1234,
    path="disaggregated",
)
FAILED = Record(index=1, due_s=1.0, sent_s=1.0, error="timeout")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{record_line(ANSWERED)}\n{record_line(FAILED)}\n")

    assert list(read_records(path)) == [ANSWERED, FAILED]


def test_a_line_leaves_out_what_never_happened() -> None:
    assert record_line(FAILED) == '{"index":1,"due_s":1.0,"sent_s":1.0,"error":"timeout"}'


def test_a_torn_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(record_line(ANSWERED) + "\n" + record_line(FAILED)[:20])

    with pytest.raises(ConfigError, match=r"requests\.jsonl:2: is not JSON"):
        list(read_records(path))
