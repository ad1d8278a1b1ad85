"""For which prompts it is better to send KV whole, once it is all there, than layer by layer.

    python -m benchmarks.whole_or_streamed [--write]

``transfer.whole_below_tokens`` was chosen with it.  Two prefill workers that differ in nothing else answer in
turns; one decode worker takes their KV.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.document import provenance, table, write_section
from benchmarks.fleet import Fleet, fleet
from benchmarks.models import prompt, smollm2, wide_kv
from benchmarks.worker import WorkerSpec
from kv_transfer.config import TransferConfig
from twinpool.engine.config import EngineConfig

LENGTHS = (8, 16, 32, 64, 128, 256)
TRANSPORTS = ("shm", "tcp", "grpc")
_STREAMED, _WHOLE = "streamed", "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One length; medians of ``whole`` less those of ``streamed``: below 0 whole is better."""

    num_tokens: int
    streamed_s: float  # until the second token
    second_token_s: float
    cpu_s: float  # of both workers, for each answer


async def measure(model: Path, dtype: str, transport: str, *, repeat: int) -> list[Point]:
    """Return a point for each length."""
    streamed = WorkerSpec(
        worker_id=_STREAMED,
        model=model,
        dtype=dtype,
        transport=transport,
        num_tokens=2 * max(LENGTHS),
        engine=EngineConfig(prefix_cache=False),
        transfer=TransferConfig(whole_below_tokens=0),
    )
    whole = replace(streamed, worker_id=_WHOLE, transfer=TransferConfig(whole_below_tokens=1_000_000))
    async with fleet(streamed, whole, replace(streamed, worker_id="decode")) as running:
        numbers = itertools.count()
        for sender in (_STREAMED, _WHOLE):
            await running.answer(prompt(64, seed=next(numbers)), prefill=sender, decode="decode")
        return [await _point(running, length, numbers, repeat=repeat) for length in LENGTHS]


async def _point(running: Fleet, num_tokens: int, numbers: itertools.count[int], *, repeat: int) -> Point:
    times_s: dict[str, list[float]] = {_STREAMED: [], _WHOLE: []}
    cpus_s = dict.fromkeys(times_s, 0.0)
    for _ in range(repeat):
        for sender, found_s in times_s.items():
            before_s = running.cpu_s(sender, "decode")
            timing = await running.answer(
                prompt(num_tokens, seed=next(numbers)), prefill=sender, decode="decode"
            )
            found_s.append(timing.second_s)
            cpus_s[sender] += running.cpu_s(sender, "decode") - before_s
    medians_s = {sender: statistics.median(found) for sender, found in times_s.items()}
    return Point(
        num_tokens=num_tokens,
        streamed_s=medians_s[_STREAMED],
        second_token_s=medians_s[_WHOLE] - medians_s[_STREAMED],
        cpu_s=(cpus_s[_WHOLE] - cpus_s[_STREAMED]) / repeat,
    )


async def _measure_all(*, repeat: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "SmolLM2-135M, fp32": (smollm2(), "float32"),
            "made up, KV of an 8B model, bf16": (wide_kv(Path(folder)), "bfloat16"),
        }
        rows = []
        for name, (model, dtype) in models.items():
            for transport in TRANSPORTS:
                for point in await measure(model, dtype, transport, repeat=repeat):
                    rows.append([name, transport, *_cells(point)])
                    print(*rows[-1], sep="  ", flush=True)
    head = ["model", "transport", "tokens", "second token, streamed", "whole: ms later", "CPU ms more"]
    return table(head, rows)


def _cells(point: Point) -> list[str]:
    return [
        str(point.num_tokens),
        f"{point.streamed_s * 1e3:.1f} ms",
        f"{point.second_token_s * 1e3:+.1f}",
        f"{point.cpu_s * 1e3:+.1f}",
    ]


def main() -> None:
    """Print what was found, and keep it in the document if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    found = asyncio.run(_measure_all(repeat=args.repeat))
    text = f"{provenance('benchmarks.whole_or_streamed')}\n\n{found}"
    print(text)
    if args.write:
        write_section("whole or streamed", text)


if __name__ == "__main__":
    main()
