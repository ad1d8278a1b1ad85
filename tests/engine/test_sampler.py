"""Sampler: each setting against a result worked out by hand, and draws against their probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.toys import request
from twinpool.core.errors import InternalError
from twinpool.core.request import SamplingParams
from twinpool.engine.plan import ItemResult
from twinpool.engine.sampler import SampledSequence, Sampler, draw, uniform

NEVER = -math.inf


def params(**fields: object) -> SamplingParams:
    return request(**fields).sampling  # type: ignore[arg-type]


def sequence(
    *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **fields: object
) -> SampledSequence:
    return SampledSequence(
        sampling=params(**{"max_tokens": 1000, **fields}),
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
    )


def sampler(*, num_ids: int = 8, eos_ids: Sequence[int] = ()) -> Sampler:
    return Sampler(sampling_vocab_size=num_ids, eos_ids=eos_ids)


def choose(logits: Sequence[float], chooser: Sampler | None = None, **fields: object) -> ItemResult:
    chooser = chooser or sampler(num_ids=len(logits))
    (result,) = chooser.sample(torch.tensor([logits]), [sequence(**fields)])  # type: ignore[arg-type]
    return result


def shares(logits: Sequence[float], *, num_draws: int = 4000, **fields: object) -> list[float]:
    """Draw at many positions of one seed; return each id's share."""
    drawn = Counter(
        draw(np.array(logits), params(seed=11, **{"temperature": 1.0, **fields}), position=position)
        for position in range(num_draws)
    )
    return [drawn[token_id] / num_draws for token_id in range(len(logits))]


def assert_drawn_as(probabilities: Sequence[float], logits: Sequence[float], **fields: object) -> None:
    """Chi-square with a limit that a right sampler passes with 99.99 %; the draws are fixed by their seed."""
    num_draws = 4000
    observed = shares(logits, num_draws=num_draws, **fields)
    assert sum(probabilities) == pytest.approx(1.0)
    for share, probability in zip(observed, probabilities, strict=True):
        assert (share == 0.0) == (probability == 0.0)
    chi_square = sum(
        num_draws * (share - probability) ** 2 / probability
        for share, probability in zip(observed, probabilities, strict=True)
        if probability
    )
    degrees = sum(probability > 0 for probability in probabilities) - 1
    assert chi_square < degrees + 4.0 * math.sqrt(2.0 * degrees) + 8.0


LOGITS = [math.log(p) for p in (0.05, 0.4, 0.1, 0.3, 0.15)]


def test_draws_follow_the_softmax() -> None:
    assert_drawn_as([0.05, 0.4, 0.1, 0.3, 0.15], LOGITS)


def test_temperature_2_takes_square_roots() -> None:
    roots = [math.sqrt(p) for p in (0.05, 0.4, 0.1, 0.3, 0.15)]

    assert_drawn_as([root / sum(roots) for root in roots], LOGITS, temperature=2.0)


def test_top_k_keeps_the_k_best() -> None:
    assert_drawn_as([0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], LOGITS, top_k=3)


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    assert_drawn_as([0.5, 0.5, 0, 0], [1.0, 1.0, 1.0, 1.0], top_k=2)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.99, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: list[int]) -> None:
    probabilities = [0.05, 0.4, 0.1, 0.3, 0.15]
    total = sum(probabilities[token_id] for token_id in kept)

    assert_drawn_as([p / total if i in kept else 0 for i, p in enumerate(probabilities)], LOGITS, top_p=top_p)


def test_top_p_counts_what_top_k_left() -> None:
    # Of the three left 0.47 + 0.35 reach 0.8; of all five it would take three.
    assert_drawn_as([0, 4 / 7, 0, 3 / 7, 0], LOGITS, top_k=3, top_p=0.8)


def test_top_p_over_a_wide_vocabulary_equals_a_full_sort() -> None:
    logits = np.random.default_rng(0).normal(size=3000)
    for top_p in (0.05, 0.5, 0.9, 0.999):
        weights = np.exp(logits - logits.max())
        order = np.argsort(-weights, kind="stable")
        kept = set(
            order[: int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1].tolist()
        )

        drawn = {
            draw(logits, params(seed=2, temperature=1.0, top_p=top_p), position=position)
            for position in range(500)
        }

        assert drawn <= kept
        assert len(drawn) > min(len(kept), 500) // 3


def test_min_p_is_a_share_of_the_best() -> None:
    assert_drawn_as([0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], LOGITS, min_p=0.3)


def test_temperature_comes_before_top_p() -> None:
    # Square roots: 0.632 and 0.548 of 2.119 in all; together 0.557.
    roots = [0.0, math.sqrt(0.4), 0.0, math.sqrt(0.3), 0.0]

    assert_drawn_as([root / sum(roots) for root in roots], LOGITS, temperature=2.0, top_p=0.55)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert choose([1.0, 3.0, 2.0], temperature=temperature).token_id == 1


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    assert choose([1.0, 3.0, 3.0, 2.0]).token_id == 1
    assert choose([1.0, 3.0, 3.0, 2.0], num_logprobs=0).token_id == 1
    assert choose([1.0, 3.0, 3.0, 2.0], temperature=1.0, top_k=1).token_id == 1


def test_logit_bias_is_added() -> None:
    assert choose([1.0, 3.0, 2.0], logit_bias=((2, 1.5),)).token_id == 2
    assert choose([1.0, 3.0, 2.0], logit_bias=((1, -100.0), (2, -0.5))).token_id == 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    # 4 / 2 = 2 loses against 3; token 0 appears twice but pays once: 5.9 / 2 = 2.95 < 3.
    assert choose([5.9, 4.0, 3.0], prompt=(0, 0), output=(1,), repetition_penalty=2.0).token_id == 2
    # -1 x 2 = -2 loses against -1.5.
    assert choose([-1.0, -1.5, -9.0], prompt=(0,), repetition_penalty=2.0).token_id == 1


def test_presence_penalty_is_paid_once_and_for_output_only() -> None:
    assert choose([3.0, 2.0], prompt=(0,), presence_penalty=1.5).token_id == 0
    assert choose([3.0, 2.0], output=(0, 0, 0), presence_penalty=0.9).token_id == 0
    assert choose([3.0, 2.0], output=(0,), presence_penalty=1.1).token_id == 1


def test_frequency_penalty_is_paid_per_appearance_in_the_output() -> None:
    assert choose([3.0, 2.0], prompt=(0, 0, 0), frequency_penalty=0.4).token_id == 0
    assert choose([3.0, 2.0], output=(0, 0), frequency_penalty=0.4).token_id == 0
    assert choose([3.0, 2.0], output=(0, 0, 0), frequency_penalty=0.4).token_id == 1


def test_negative_penalties_attract() -> None:
    assert choose([3.0, 2.9], output=(1, 1), frequency_penalty=-0.1).token_id == 1
    assert choose([3.0, 2.9], output=(1,), presence_penalty=-0.2).token_id == 1


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    chooser = sampler(num_ids=4, eos_ids=[3])
    logits = [1.0, 2.0, 3.0, 4.0]
    fields: dict[str, object] = {"min_tokens": 2, "stop_token_ids": (2,)}

    assert choose(logits, chooser, **fields).token_id == 1
    assert choose(logits, chooser, output=(0,), **fields).token_id == 1
    assert choose(logits, chooser, output=(0, 0), **fields).token_id == 3
    assert choose(logits, chooser, output=(0, 0), num_logprobs=0, **fields).token_id == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_tokenizer_are_never_chosen(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 50.0, 60.0]])
    chooser = sampler(num_ids=2)

    for seed in range(50):
        fields: dict[str, object] = {"temperature": temperature, "seed": seed, "num_logprobs": 3}
        (result,) = chooser.sample(logits, [sequence(logit_bias=((3, 100.0),), **fields)])
        assert result.token_id in (0, 1)
        assert result.logprob is not None
        assert {token_id for token_id, _ in result.logprob.top} == {0, 1}


def test_logprobs_are_of_the_raw_logits() -> None:
    result = choose(LOGITS, logit_bias=((0, 100.0),), temperature=0.3, num_logprobs=2, repetition_penalty=1.5)

    assert result.token_id == 0
    assert result.logprob is not None
    assert result.logprob.token_id == 0
    assert result.logprob.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert result.logprob.rank == 5
    assert [token_id for token_id, _ in result.logprob.top] == [1, 3]
    assert [value for _, value in result.logprob.top] == pytest.approx(
        [math.log(0.4), math.log(0.3)], abs=1e-5
    )


def test_zero_alternatives_give_the_chosen_token_alone() -> None:
    result = choose(LOGITS, num_logprobs=0)

    assert result.logprob is not None
    assert (result.logprob.token_id, result.logprob.rank, result.logprob.top) == (1, 1, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [1.0, bad, 0.0], [3.0, 2.0, NEVER]])

    good, failed, masked = sampler(num_ids=3).sample(logits, [sequence(temperature=temperature, top_k=1)] * 3)

    assert (good.token_id, masked.token_id) == (1, 0)
    assert isinstance(failed.error, InternalError)
    assert failed.token_id is None


def test_a_row_of_nothing_but_masks_fails_alone() -> None:
    chooser = sampler(num_ids=2, eos_ids=[0, 1])

    failed, good = chooser.sample(torch.zeros(2, 2), [sequence(min_tokens=1), sequence()])

    assert isinstance(failed.error, InternalError)
    assert good.token_id == 0


def test_settings_that_cannot_be_computed_fail_alone() -> None:
    failed, good = sampler(num_ids=2).sample(
        torch.zeros(2, 2), [sequence(temperature=1.0, seed=-1), sequence(temperature=1.0)]
    )

    assert isinstance(failed.error, InternalError)
    assert good.token_id in (0, 1)


def test_fifty_seeds_on_a_flat_distribution_differ() -> None:
    flat = [0.0] * 5000

    drawn = {choose(flat, temperature=1.0, seed=seed).token_id for seed in range(50)}

    assert len(drawn) >= 45


def test_a_position_of_a_seed_is_one_number_and_all_differ() -> None:
    numbers = {
        (seed, position): uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(1000)
    }

    assert len(set(numbers.values())) == 3000
    assert numbers == {key: uniform(*key) for key in numbers}
    assert min(numbers.values()) >= 0.0
    assert max(numbers.values()) < 1.0
    assert np.mean(list(numbers.values())) == pytest.approx(0.5, abs=0.02)


def test_the_numbers_of_a_seed_never_change() -> None:
    # A request continued by another release, or on another host, must go on with the same tokens.
    numbers = [round(uniform(7, position), 12) for position in range(3)]

    assert numbers == [0.87207345482, 0.082842687027, 0.014107696329]


def test_the_choice_depends_on_the_position_in_the_answer_not_on_the_attempt() -> None:
    flat = [0.0] * 1000
    fresh = [
        choose(flat, prompt=(1, 2), output=[5] * position, temperature=1.0, seed=3).token_id
        for position in range(9)
    ]

    assert len(set(fresh)) > 7
    assert fresh[6] == choose(flat, prompt=(9,) * 50, output=[8] * 6, temperature=1.0, seed=3).token_id


def test_neighbours_and_their_order_change_nothing() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(6, 50)).astype(np.float32)) * 2
    company = [
        sequence(temperature=1.0, seed=5),
        sequence(temperature=1.0, repetition_penalty=2.0, prompt=(3, 4, 5), output=(7, 7)),
        sequence(temperature=1.0, top_k=1, seed=99),
        sequence(presence_penalty=2.0, output=(1, 2, 3)),
        sequence(),
        sequence(temperature=0.7, top_p=0.8, min_p=0.01, logit_bias=((4, 2.0),), seed=6, num_logprobs=2),
    ]
    chooser = sampler(num_ids=50)
    alone = [chooser.sample(logits[i : i + 1], [company[i]])[0] for i in range(6)]

    for order in (list(range(6)), [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        together = chooser.sample(logits[order], [company[i] for i in order])
        for i, result in zip(order, together, strict=True):
            assert result == alone[i]
