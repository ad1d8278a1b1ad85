"""How much of a transfer is hidden behind the prefill, with a real engine, two processes and a shaped link.

    python -m benchmarks.overlap [--write]

What is told is relative to the first token of the same answer, so the noise of the prefill is not in it:
how long after it the last KV came, and the second token.  An answer whose KV was there already says what the
second token costs without any transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.document import provenance, table, write_section
from benchmarks.fleet import Fleet, Timing, fleet
from benchmarks.models import prompt, smollm2
from benchmarks.worker import WorkerSpec
from kv_transfer.config import TransferConfig
from twinpool.engine.config import EngineConfig
from twinpool.lab.shaper import LinkShape

TOKENS, CHUNK_TOKENS, LAYERS = 1024, EngineConfig().max_chunk_tokens, 30  # SmolLM2 has 30 layers
ARMS = ("nothing to send", "streamed", "whole", "streamed, slow link", "whole, slow link")
STREAMED = TransferConfig(whole_below_tokens=0)
WHOLE = TransferConfig(whole_below_tokens=1_000_000)


async def measure(*, transport: str, repeat: int) -> tuple[float, dict[str, list[Timing]], float]:
    """Return the prefill alone, the answers of each arm, and the bandwidth of the slow link."""
    numbers = itertools.count(1)
    prefill = WorkerSpec(
        worker_id="streamed",
        model=smollm2(),
        transport=transport,
        num_tokens=2 * TOKENS,
        engine=EngineConfig(prefix_cache=False),
        transfer=STREAMED,
    )
    decode = replace(prefill, worker_id="decode", num_tokens=4 * TOKENS, engine=EngineConfig())
    async with fleet(prefill) as alone:
        times_s = [
            await alone.prefill_s(prompt(TOKENS, seed=next(numbers)), prefill="streamed") for _ in range(5)
        ]
        prefill_s = statistics.median(times_s)
        link = LinkShape(bandwidth_bytes_s=TOKENS * alone.token_bytes / prefill_s)
    senders = (
        prefill,
        replace(prefill, worker_id="whole", transfer=WHOLE),
        replace(prefill, worker_id="streamed, slow link", link=link),
        replace(prefill, worker_id="whole, slow link", transfer=WHOLE, link=link),
    )
    timings: dict[str, list[Timing]] = {arm: [] for arm in ARMS}
    async with fleet(decode, *senders) as running:
        for sender in senders:
            await running.answer(
                prompt(TOKENS, seed=next(numbers)), prefill=sender.worker_id, decode="decode"
            )
        for _ in range(repeat):
            await _one_round(running, [sender.worker_id for sender in senders], numbers, timings)
    return prefill_s, timings, link.bandwidth_bytes_s


async def _one_round(
    running: Fleet, senders: Sequence[str], numbers: itertools.count[int], timings: dict[str, list[Timing]]
) -> None:
    for sender in senders:
        ids = prompt(TOKENS, seed=next(numbers))
        timings[sender].append(await running.answer(ids, prefill=sender, decode="decode"))
    known = await running.answer(ids, prefill="streamed", decode="decode")
    assert known.report.cached_tokens == TOKENS, "the last prompt is still there"
    timings["nothing to send"].append(known)


def describe(prefill_s: float, timings: dict[str, list[Timing]], bandwidth_bytes_s: float) -> str:
    """Return the numbers as Markdown."""
    median = _Medians(timings)
    idle_s = median("nothing to send", _second_after_first)
    rows = [[ARMS[0], _ms(median(ARMS[0], _first)), "-", "-", _ms(idle_s)]]
    for arm in ARMS[1:]:
        values = (_first, _transfer, _tail, _second_after_first)
        rows.append([arm, *(_ms(median(arm, value)) for value in values)])
    hidden = 1 - max(0.0, median("streamed", _tail)) / median("whole", _transfer)
    unit_s = prefill_s / LAYERS / (TOKENS // CHUNK_TOKENS)
    link_s = median("whole, slow link", lambda timing: timing.report.kv_bytes) / bandwidth_bytes_s

    def late_s(timing: Timing) -> float:
        """What the second token took beyond the longer of prefill and transfer, and a decode step."""
        return timing.second_s - idle_s - max(timing.first_s, timing.reserved_s + link_s)

    head = ["ms, medians", "first token", "KV under way", "last KV after it", "second token after it"]
    return "\n\n".join(
        [
            table(head, rows),
            f"{TOKENS} tokens in chunks of {CHUNK_TOKENS} took {_ms(prefill_s)} ms alone, so a unit (a layer "
            f"of a chunk) {_ms(unit_s)} ms. The slow link has {bandwidth_bytes_s / 1e6:.1f} MB/s, so the KV "
            f"needs {_ms(link_s)} ms.",
            f"- Loopback: {hidden:.0%} of the transfer is over when the first token comes (target: 90 %).\n"
            "- Slow link: beyond the longer of prefill and transfer, and a decode step, the second token "
            f"takes {_ms(median('streamed, slow link', late_s))} ms (target: 1.3 units + 20 ms = "
            f"{_ms(1.3 * unit_s + 0.020)} ms); sent whole, {_ms(median('whole, slow link', late_s))} ms.",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _first(timing: Timing) -> float:
    return timing.first_s


def _transfer(timing: Timing) -> float:
    return timing.transfer_s


def _tail(timing: Timing) -> float:
    return timing.tail_s


def _second_after_first(timing: Timing) -> float:
    return timing.second_s - timing.first_s


class _Medians:
    def __init__(self, timings: dict[str, list[Timing]]) -> None:
        self._timings = timings

    def __call__(self, arm: str, value: Callable[[Timing], float]) -> float:
        return statistics.median(map(value, self._timings[arm]))


def main() -> None:
    """Print what was found, and keep it in the document if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    found = asyncio.run(measure(transport=args.transport, repeat=args.repeat))
    text = f"{provenance('benchmarks.overlap')}\n\n{describe(*found)}"
    print(text)
    if args.write:
        write_section("overlap", text)


if __name__ == "__main__":
    main()
