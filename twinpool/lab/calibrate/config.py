"""What is measured of a machine, and how often; model and engine are set as those of `twinpool serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from twinpool.core.errors import ConfigError
from twinpool.engine.config import EngineConfig

_POINTS = ("prompts", "cached", "prompt_batches", "decode_batches", "contexts", "transfer_tokens")
_LEAST = {"contexts": 3}  # a token that is decoded attends to a prompt, its first token, and itself


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Points of the tables that are measured, each ``repeats`` times, in turns.

    Attributes:
        prompts: Tokens of a prompt in one step; the middle one is that of batches and cached prompts.
        cached: Tokens before it that need not be computed.
        prompt_batches: How many such prompts in one step.
        decode_batches, contexts: How many sequences decode, and to how many tokens each attends.
        transports: Of KV; none: all that work here.
        transfer_tokens: Tokens of the KV that is moved: the first and the last make the link.
        workers: Of the machine: one of them computes alone, then two, and so on, and how they slow each
            other down is written down too.  0: no server is asked, and steps and transfers are all there is.
    """

    model: str = "smollm2-135m-instruct"
    device: str = "cpu"
    dtype: str = "auto"
    kv_memory: str | None = None  # of each worker, as in 512MiB; None: what a worker would take now
    threads: int | None = None  # of each worker on a CPU; None: its share of the cores
    engine: EngineConfig = field(default_factory=EngineConfig)
    repeats: int = 5
    prompts: tuple[int, ...] = (8, 32, 128, 256, 512)
    cached: tuple[int, ...] = (256, 512)
    prompt_batches: tuple[int, ...] = (2, 4)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (32, 256, 512)
    transports: tuple[str, ...] = ()
    transfer_tokens: tuple[int, ...] = (16, 128, 512)
    workers: int = 1

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"calibrate.{name}", f"{getattr(self, name)} is less than {least}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("calibrate.threads", f"{self.threads} is less than 1")
        for name in _POINTS:
            values, least = getattr(self, name), _LEAST.get(name, 1)
            if list(values) != sorted(set(values)) or min(values, default=least) < least:
                raise ConfigError(f"calibrate.{name}", f"{list(values)} do not grow from {least} or more")
        for name in ("prompts", "transfer_tokens"):
            if len(getattr(self, name)) < 2:
                raise ConfigError(f"calibrate.{name}", "are less than two, and a line needs two")
        for name in ("decode_batches", "contexts"):
            if not getattr(self, name):
                raise ConfigError(f"calibrate.{name}", "are missing")
        self._check_steps()

    def _check_steps(self) -> None:
        """Check that the scheduler makes each of them in one step."""
        engine = self.engine
        chunk = min(engine.max_chunk_tokens or engine.max_batch_tokens, engine.max_batch_tokens)
        if self.prompts[-1] > chunk:
            raise ConfigError("calibrate.prompts", f"{self.prompts[-1]} are more than the {chunk} of a step")
        most = max(self.prompt_batches, default=1)
        if most * self.middle_prompt > engine.max_batch_tokens or most > engine.max_sequences:
            raise ConfigError(
                "calibrate.prompt_batches",
                f"{most} prompts of {self.middle_prompt} are more than a step of "
                f"{engine.max_batch_tokens} tokens and {engine.max_sequences} sequences",
            )
        if self.decode_batches[-1] >= engine.max_sequences:
            raise ConfigError(
                "calibrate.decode_batches",
                f"{self.decode_batches[-1]} leave no room in the {engine.max_sequences} of a step",
            )
        for tokens in self.cached:
            if tokens % engine.block_tokens:
                raise ConfigError(
                    "calibrate.cached", f"{tokens} are no whole blocks of {engine.block_tokens}"
                )

    @property
    def middle_prompt(self) -> int:
        """Tokens of the prompts that are measured in batches and after cached tokens."""
        return self.prompts[len(self.prompts) // 2]

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // max(1, self.workers))
