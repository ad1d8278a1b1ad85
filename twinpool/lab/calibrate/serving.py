"""Measures what a request meets beside the steps of its engine, at a running server of colocated workers.

One request alone shows what router, network and streams add.  Then one on each of two workers, of three and
so on, which prefill at once and then decode at once; and again one after the other, so that each prompt is
computed while those before it decode.  They share the cores of this machine with each other and with the
router, and how much longer each takes is all that a profile says of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from twinpool.core.errors import Unavailable
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.bench.run import run_bench
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.steps import Progress
from twinpool.lab.record import Record
from twinpool.lab.workload.workload import open_workload

_OUTPUT_TOKENS = 24
_WARM_EACH = 2  # requests for each worker
_APART = 1.25  # times of a prompt, from one request to the next: the one before decodes by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Medians over all requests; of ``k`` requests at once, one on each worker, at index ``k - 1``.

    Attributes:
        short_tokens, short_ttft_s: A prompt that takes one short step, alone.
        prompt_tokens, output_tokens: Of the others.
        ttft_s, gap_s: Time to their first token, and from one token to the next.
        beside_s: Time to the first token of one, while ``k - 1`` others decode.
    """

    short_tokens: int
    short_ttft_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: tuple[float, ...]
    gap_s: tuple[float, ...]
    beside_s: tuple[float, ...]


def measure_serving(config: CalibrateConfig, url: str, *, progress: Progress) -> Served:
    """Ask a server that nobody else asks.

    Args:
        config: Of the calibration; the server has ``config.workers`` colocated workers, set as it says.
        url: Of the server.
        progress: Told of each turn.

    Raises:
        Unavailable: A request was not answered.
    """
    short, prompt = config.prompts[0], config.middle_prompt
    short_s: list[float] = []
    ttft_s: list[list[float]] = [[] for _ in range(config.workers)]
    gap_s: list[list[float]] = [[] for _ in range(config.workers)]
    beside_s: list[list[float]] = [[] for _ in range(config.workers)]
    ask = _Client(url).ask
    progress("serving: warm-up", 0, config.repeats)
    ask(_WARM_EACH * config.workers, prompt, _OUTPUT_TOKENS)
    for turn in range(config.repeats):
        progress(f"serving: 1 to {config.workers} requests at once", turn, config.repeats)
        short_s += _values(ask(1, short, 2), lambda record: record.ttft_s)
        for number in range(config.workers):
            records = ask(number + 1, prompt, _OUTPUT_TOKENS)
            ttft_s[number] += _values(records, lambda record: record.ttft_s)
            gap_s[number] += _values(records, lambda record: record.tpot_s)
        every_s = _APART * max(map(statistics.median, ttft_s))
        lasting = ceil(config.workers * every_s / statistics.median(gap_s[0]))
        for number, record in enumerate(ask(config.workers, prompt, lasting, every_s=every_s)):
            beside_s[number] += _values([record], lambda record: record.ttft_s)
    return Served(
        short_tokens=short,
        short_ttft_s=statistics.median(short_s),
        prompt_tokens=prompt,
        output_tokens=_OUTPUT_TOKENS,
        ttft_s=tuple(map(statistics.median, ttft_s)),
        gap_s=tuple(map(statistics.median, gap_s)),
        beside_s=tuple(map(statistics.median, beside_s)),
    )


class _Client:
    """Asks with other prompts each time, so that none is found in a cache."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seed = 0

    def ask(
        self, count: int, prompt_tokens: int, output_tokens: int, *, every_s: float = 0.0
    ) -> Sequence[Record]:
        """Return the records in the order in which requests were sent: at once, or every ``every_s``."""
        self._seed += 1
        arrival = f"constant({1.0 / every_s})" if every_s else "at_once"
        workload = open_workload(
            f"synthetic:prompt={prompt_tokens},output={output_tokens},arrival={arrival},count={count}"
        )
        records: list[Record] = []
        run_bench(workload, BenchConfig(url=self._url, warmup=0, seed=self._seed), on_record=records.append)
        for record in records:
            if record.error:
                raise Unavailable(f"a request of the calibration was not answered: {record.error}")
        return sorted(records, key=lambda record: record.index)


def _values(records: Sequence[Record], value: Callable[[Record], float | None]) -> list[float]:
    return [number for record in records if (number := value(record)) is not None]
