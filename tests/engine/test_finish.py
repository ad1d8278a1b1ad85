"""finish_reason: end and stop tokens, min_tokens and max_tokens against each other."""

from __future__ import annotations

import pytest

from twinpool.core.request import FinishReason, SamplingParams
from twinpool.engine.finish import finish_reason

EOS = 9
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token_id", "num_output_tokens", "sampling", "expected"),
    [
        (5, 1, SamplingParams(seed=0, max_tokens=3), None),
        (5, 3, SamplingParams(seed=0, max_tokens=3), LENGTH),
        (EOS, 1, SamplingParams(seed=0, max_tokens=3), STOP),
        (EOS, 3, SamplingParams(seed=0, max_tokens=3), STOP),
        (EOS, 1, SamplingParams(seed=0, max_tokens=3, ignore_eos=True), None),
        (EOS, 3, SamplingParams(seed=0, max_tokens=3, ignore_eos=True), LENGTH),
        (EOS, 1, SamplingParams(seed=0, max_tokens=3, min_tokens=2), None),
        (EOS, 2, SamplingParams(seed=0, max_tokens=3, min_tokens=2), STOP),
        (5, 1, SamplingParams(seed=0, max_tokens=3, stop_token_ids=(4, 5)), STOP),
        (5, 1, SamplingParams(seed=0, max_tokens=3, stop_token_ids=(5,), ignore_eos=True), STOP),
        (5, 1, SamplingParams(seed=0, max_tokens=3, stop_token_ids=(5,), min_tokens=2), None),
        (EOS, 3, SamplingParams(seed=0, max_tokens=3, min_tokens=9), LENGTH),
    ],
)
def test_why_an_answer_ends(
    token_id: int, num_output_tokens: int, sampling: SamplingParams, expected: FinishReason | None
) -> None:
    reason = finish_reason(
        token_id, num_output_tokens=num_output_tokens, sampling=sampling, eos_ids=frozenset({EOS})
    )

    assert reason is expected
