"""What `twinpool bench` costs, how true its times are, and whether a stall can hide from it.

    python -m benchmarks.load_generator [--write]

The server is `tests/lab/bench/server.py`: a process of its own, which answers at known times and writes down
when it wrote each token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.document import provenance, table, write_section
from tests.lab.bench.server import Times, serving
from twinpool.lab import BenchConfig, BenchResult, Record, WorkItem, open_workload, run_bench
from twinpool.lab.bench.loop import precise_loop
from twinpool.lab.bench.target import read_target

_RATE, _COUNT = 200, 1200
_TTFT_S, _GAP_S = 0.05, 0.02


def main() -> None:
    """Measure, print, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    parts = [_truth(), _cost(), _stall()]
    text = "\n\n".join([provenance("benchmarks.load_generator"), *parts])
    print(text)
    if args.write:
        write_section("load generator", text)


def _truth() -> str:
    with serving(Times(ttft_s=_TTFT_S, gap_s=_GAP_S)) as url:
        result, records = _run(url, "synthetic:prompt=100,output=8,arrival=constant(50),count=300")
        with urllib.request.urlopen(f"{url}/log", timeout=10) as reply:
            log: dict[str, Any] = json.loads(reply.read())["times"]
    from_due, from_sent, gaps = [], [], []
    for record in records:
        arrived_s, *written = log[f"{result.run_id}-{record.index}"]
        assert record.ttft_s is not None and record.first_token_s is not None, "the server answers all"
        from_due.append(record.ttft_s - _TTFT_S)
        from_sent.append(record.first_token_s - record.sent_s - (written[0] - arrived_s))
        true = [later - earlier for earlier, later in pairwise(written)]
        gaps += [abs(gap - other) for gap, other in zip(record.gaps_s, true, strict=True)]
    rows = [
        [name, *(f"{1e3 * value:.2f}" for value in _quantiles(off))]
        for name, off in (
            (f"TTFT, less the {_TTFT_S * 1e3:g} ms that the server is to wait", from_due),
            ("TTFT from sending, less what the server took by its own clock", from_sent),
            ("ITL, off the server's own, either way", gaps),
        )
    ]
    return "Off, in ms, at 50 requests/s of 8 tokens:\n\n" + table(("what", "p10", "p50", "p90"), rows)


def _cost() -> str:
    rows = []
    for tokens in (1, 4, 8, 16, 64):
        spec = f"synthetic:prompt=100,output={tokens},arrival=poisson({_RATE}),count={_COUNT}"
        with serving(Times(ttft_s=_TTFT_S, gap_s=_GAP_S)) as url:
            result, _ = _run(url, spec)
        with (
            serving(Times(ttft_s=_TTFT_S, gap_s=_GAP_S)) as url,
            asyncio.Runner(loop_factory=precise_loop) as runner,
        ):
            bare_share = runner.run(_bare_share(url, list(open_workload(spec))))
        late_ms = [1e3 * (late or 0.0) for late in result.summary.late_s.percentiles((50, 99))]
        rows.append(
            [
                str(tokens),
                f"{result.cpu_share:.1%}",
                f"{bare_share:.1%}",
                f"{1e6 * result.cpu_s / result.num_sent:.0f}",
                *(f"{late:.2f}" for late in late_ms),
            ]
        )
    head = ("tokens each", "of a core", "bare", "us a request", "late p50, ms", "late p99, ms")
    text = f"Cost at {_RATE} requests/s, each token a chunk; bare is to send bytes and drop what comes:"
    return text + "\n\n" + table(head, rows)


class _Bare(asyncio.Protocol):
    """Drops what comes, but for the end of an answer."""

    def __init__(self, free: list[_Bare]) -> None:
        self._free = free

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self._free.append(self)


async def _bare_share(url: str, items: Sequence[WorkItem]) -> float:
    """Send the same requests at the same times, ready beforehand, and return what share of a core it took."""
    loop, target, free = asyncio.get_running_loop(), read_target(url, api_key=None), list[_Bare]()
    most = 10 + int(4 * _RATE * (_TTFT_S + _GAP_S * items[0].output_tokens))
    for _ in range(most):
        free.append((await loop.create_connection(lambda: _Bare(free), target.host, target.port))[1])
    body = {"prompt": list(range(100, 200)), "max_tokens": items[0].output_tokens}
    request = target.request("POST", "/v1/completions", json.dumps(body).encode())
    start_s, cpu_s = loop.time(), time.process_time()
    for item in items:
        woken = loop.create_future()
        loop.call_at(start_s + item.arrival_s, woken.set_result, None)
        await woken
        free.pop().transport.write(request)
    while len(free) < most:  # noqa: ASYNC110  # an event would cost what is to be measured
        await asyncio.sleep(0.05)
    share = (time.process_time() - cpu_s) / (loop.time() - start_s)
    for connection in free:
        connection.transport.abort()
    return share


def _stall() -> str:
    with serving(Times(freeze_after=100, freeze_s=2.0)) as url:
        result, _ = _run(url, "synthetic:prompt=20,output=2,arrival=constant(100),count=400", warmup=0)
    told = [
        f"{value:.2f}" for value in result.summary.ttft_s.percentiles((50, 75, 90, 99)) if value is not None
    ]
    expected = ["0.00", "1.00", "1.60", "1.96"]
    head = ("TTFT, s", "p50", "p75", "p90", "p99")
    rows = [["measured", *told], ["a hand finds", *expected]]
    return "A server that stands still for 2 s of 4, at 100 requests/s:\n\n" + table(head, rows)


def _run(url: str, spec: str, **settings: Any) -> tuple[BenchResult, list[Record]]:
    records: list[Record] = []
    result = run_bench(open_workload(spec), BenchConfig(url=url, **settings), on_record=records.append)
    return result, records


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], tenths[4], tenths[8]


if __name__ == "__main__":
    main()
