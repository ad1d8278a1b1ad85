"""Limits of one worker's engine."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one worker's engine; the defaults suit one 80 GB GPU and an 8B model."""

    block_tokens: int = 16  # workers of one model may differ in it
    max_batch_tokens: int = 2048  # most tokens one step computes, prompts and decodes together
    max_chunk_tokens: int = (
        512  # most prompt tokens of one sequence in one step; 0 takes what the batch allows
    )
    max_sequences: int = 64  # most sequences one step touches
    max_waiting: int = 256  # most sequences that may wait for their first step
    policy: str = "decode_first"  # a file name in twinpool/engine/policies
    prefix_cache: bool = True  # keep the KV of ended sequences while there is room, and use it again

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError("engine.block_tokens", f"{self.block_tokens} is less than 1")
        if self.max_chunk_tokens < 0:
            raise ConfigError("engine.max_chunk_tokens", f"{self.max_chunk_tokens} is less than 0")
        if self.max_sequences < 1:
            raise ConfigError("engine.max_sequences", f"{self.max_sequences} is less than 1")
        if self.max_waiting < 1:
            raise ConfigError("engine.max_waiting", f"{self.max_waiting} is less than 1")
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigError(
                "engine.max_batch_tokens",
                f"{self.max_batch_tokens} cannot give {self.max_sequences} sequences a token each",
            )
