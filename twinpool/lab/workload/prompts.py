"""Real prompts out of a file, at drawn times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.arrivals import read_arrivals
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.lengths import read_lengths
from twinpool.lab.workload.traces.lines import read_lines, read_objects, whole_number

BYTES_PER_TOKEN = 4  # of English, about; used where nobody has counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Ends with its file, or goes round without end.

    The file is a prompt a line or, if it is called ``.jsonl``, an object a line: ``prompt``, and perhaps
    ``output_tokens`` and ``prompt_tokens``.  A ``prompt_tokens`` that is not given is an estimate: a request
    is sent as its text, and the server counts.
    """

    path: Path
    output: str = "128"  # of those that do not say, as ``lengths.read_lengths`` reads it
    arrival: str = "poisson(1)"
    repeat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        read_lengths(self.output, "workload.output")
        read_arrivals(self.arrival, "workload.arrival")

    @property
    def ends(self) -> bool:
        return not self.repeat

    @property
    def is_drawn(self) -> bool:
        return False

    def items(self) -> Iterator[WorkItem]:
        """Yield a request for each prompt of the file, in its order.

        Raises:
            ConfigError: The file cannot be read, has no prompt, or a line does not fit; it is named.
        """
        outputs, of_outputs = read_lengths(self.output, "output"), random.Random(f"{self.seed} output")
        times = read_arrivals(self.arrival, "arrival").times(random.Random(f"{self.seed} arrival"))
        rounds = itertools.count() if self.repeat else range(1)
        everything = itertools.chain.from_iterable(self._once() for _ in rounds)
        for index, ((text, prompt_tokens, output_tokens), arrival_s) in enumerate(
            zip(everything, times, strict=False)
        ):
            yield WorkItem(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompt_tokens or max(1, round(len(text.encode()) / BYTES_PER_TOKEN)),
                output_tokens=output_tokens or outputs.draw(of_outputs),
                text=text,
            )

    def _once(self) -> Iterator[tuple[str, int, int]]:
        """Yield text, prompt tokens and output tokens of each prompt; 0 is what the file does not say."""
        lines = self._objects() if self.path.suffix == ".jsonl" else self._texts()
        first = next(lines, None)
        if first is None:
            raise ConfigError(str(self.path), "has no prompt")
        yield first
        yield from lines

    def _texts(self) -> Iterator[tuple[str, int, int]]:
        return ((line, 0, 0) for _, line in read_lines(self.path))

    def _objects(self) -> Iterator[tuple[str, int, int]]:
        for where, line in read_objects(self.path):
            text = line.get("prompt")
            if not isinstance(text, str) or not text:
                raise ConfigError(f"{where} prompt", "is no text")
            counts = [
                whole_number(line.get(name, 0), f"{where} {name}", least=0)
                for name in ("prompt_tokens", "output_tokens")
            ]
            yield text, counts[0], counts[1]
