"""Traces: each format read as it is written, and mistakes named by file and line."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from tests.shared import SHARED
from twinpool.core.errors import ConfigError
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.traces.azure import read_azure
from twinpool.lab.workload.traces.own import read_own, write_own
from twinpool.lab.workload.workload import open_workload

# The first requests of Mooncake's trace, as the format's description shows them.
MOONCAKE = """\
{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0,1,2,3,4,5,6,7,8,9,10,11,12,13]}
{"timestamp":0,"input_length":7319,"output_length":490,"hash_ids":[0,14,15,16,17,18,19,20,21,22,23,24,25,26,27]}
{"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
"""


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "prompt_tokens", "output_tokens"),
    [  # counted by awk
        ("code", 8819, 3435.948056, 18059974, 245896),
        ("conv", 19366, 3501.721937, 22361870, 4088665),
    ],
)
def test_azures_traces_are_read_whole(
    name: str, requests: int, span_s: float, prompt_tokens: int, output_tokens: int
) -> None:
    path = SHARED / "traces" / f"AzureLLMInferenceTrace_{name}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here")

    items = list(open_workload({"kind": "trace", "path": str(path)}))

    assert len(items) == requests
    assert [item.index for item in items] == list(range(requests))
    assert items[0].arrival_s == 0.0
    assert items[-1].arrival_s == pytest.approx(span_s, abs=1e-6)
    assert sum(item.prompt_tokens for item in items) == prompt_tokens
    assert sum(item.output_tokens for item in items) == output_tokens


def test_an_azure_line_gives_a_time_and_two_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 23:59:59.5000000,374,44\r\n"
        b"2023-11-17 00:00:01.2500000,396,109\r\n"  # the day after
    )

    assert list(read_azure(path)) == [
        WorkItem(index=0, arrival_s=0.0, prompt_tokens=374, output_tokens=44),
        WorkItem(index=1, arrival_s=1.75, prompt_tokens=396, output_tokens=109),
    ]


def test_the_azure_traces_of_2024_say_the_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:00.017335+00:00,2399,6\n"
    )

    assert [item.arrival_s for item in read_azure(path)] == [0.0, pytest.approx(0.007405)]


def test_mooncakes_ids_are_blocks_of_512_tokens_with_shared_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(MOONCAKE)

    first, second, third = open_workload(f"trace:path={path}")

    assert (first.arrival_s, third.arrival_s) == (0.0, 3.052)
    assert (first.prompt_tokens, first.output_tokens, first.block_tokens) == (6755, 500, 512)
    assert len(first.blocks) == 14  # 13 whole ones and 99 tokens
    assert len(second.blocks) == 15
    assert first.blocks[0] == second.blocks[0] == third.blocks[0] == 0


def test_any_workload_can_be_written_and_read_again(tmp_path: Path) -> None:
    items = list(open_workload("sharegpt:count=40,seed=3,block_tokens=32"))
    path = tmp_path / "own.jsonl"
    with path.open("w") as file:
        assert write_own(items, file) == 40

    assert list(read_own(path)) == items
    assert list(open_workload(f"trace:path={path}")) == items


def test_a_line_of_ours_leaves_out_what_has_its_default() -> None:
    file = io.StringIO()
    write_own([WorkItem(index=0, arrival_s=0.5, prompt_tokens=3, output_tokens=2)], file)

    assert json.loads(file.getvalue()) == {
        "index": 0,
        "arrival_s": 0.5,
        "prompt_tokens": 3,
        "output_tokens": 2,
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "time,in,out\n", r"a\.csv:1.*"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12\n", r"a\.csv:2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,12,3\n", r"a\.csv:2"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,3\n",
            r"a\.csv:2: 0 is less than 1",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46,9,3\n"
            "2023-11-16 18:15:47+00:00,9,3\n",
            r"a\.csv:3: 2023-11-16 18:15:47\+00:00: some times have an offset, and some have none",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1_000,3\n", r"a\.csv:2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,\u0663,3\n", r"a\.csv:2"),
        (
            "m.jsonl",
            '{"timestamp": 1' + "0" * 400 + ', "input_length": 512, "output_length": 1}\n',
            r"m\.jsonl:1 timestamp: 10+ is no time in milliseconds",
        ),
        (
            "m.jsonl",
            '{"timestamp": 0, "input_length": 1' + "0" * 400 + ', "output_length": 1}\n',
            r"m\.jsonl:1 input_length: is more than 1,000,000,000",
        ),
        (
            "o.jsonl",
            '{"arrival_s": 1' + "0" * 400 + ', "prompt_tokens": 5, "output_tokens": 1}\n',
            r"o\.jsonl:1\.arrival_s: inf is not finite",
        ),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5}\n', r"m\.jsonl:1 output_length: is missing"),
        (
            "m.jsonl",
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n',
            r"m\.jsonl:1 hash_ids: 2 are too many for 512 tokens",
        ),
        (
            "m.jsonl",
            '{"timestamp": true, "input_length": 512, "output_length": 1}\n',
            r"timestamp: True is no time in milliseconds",
        ),
        ("o.jsonl", '{"arrival_s": 0, "prompt_tokens": 5}\n', r"o\.jsonl:1\.output_tokens: is missing"),
        (
            "o.jsonl",
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "promt": 1}\n',
            r"o\.jsonl:1\.promt: is none of",
        ),
        (
            "o.jsonl",
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 0}\n',
            r"output_tokens: 0 is less",
        ),
        ("o.jsonl", "{}\n[1]\n", r"o\.jsonl:1\.arrival_s: is missing"),
        ("o.jsonl", "[1]\n", r"o\.jsonl:1: is not a JSON object"),
        ("o.jsonl", "{nonsense\n", r"o\.jsonl:1: is not JSON"),
        (
            "o.jsonl",
            '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 1}\n'
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 1}\n',
            r"request 1 comes at 1\.0 s, before the one that precedes it",
        ),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    formats = {"a.csv": "azure", "m.jsonl": "mooncake", "o.jsonl": "own"}

    with pytest.raises(ConfigError, match=message):
        list(open_workload(f"trace:path={path},format={formats[name]}"))


def test_a_byte_order_mark_before_a_trace_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n", encoding="utf-8-sig"
    )

    assert [item.prompt_tokens for item in open_workload(f"trace:path={path}")] == [374]


def test_a_first_line_of_no_known_format_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"TIMESTAMP","ContextTokens"\n')

    with pytest.raises(ConfigError, match=r"a\.csv:1: .* is neither an object of JSON nor TIMESTAMP,Con"):
        list(open_workload(f"trace:path={path}"))


def test_a_pipe_is_refused_since_it_can_be_read_only_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(ConfigError, match=r"pipe: is not a regular file"):
        list(open_workload(f"trace:path={path}"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        list(open_workload(f"trace:path={tmp_path / 'none.csv'}"))
