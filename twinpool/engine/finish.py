"""When an answer ends: the rules over token ids.  Stop strings are the router's."""

from __future__ import annotations

from collections.abc import Set

from twinpool.core.request import FinishReason, SamplingParams


def finish_reason(
    token_id: int, *, num_output_tokens: int, sampling: SamplingParams, eos_ids: Set[int]
) -> FinishReason | None:
    """Return why the answer ends with ``token_id``, or None if it goes on.

    An end or stop token counts only once ``min_tokens`` are reached (the sampler masks it before),
    and it wins over ``max_tokens`` when both are met by one token.

    Args:
        num_output_tokens: Tokens of the answer, this one and those of earlier attempts included.
        eos_ids: The model's own end tokens.
    """
    if num_output_tokens >= sampling.min_tokens:
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_ids and not sampling.ignore_eos:
            return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
