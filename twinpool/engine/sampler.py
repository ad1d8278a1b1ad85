"""Logits become tokens.  The result for a sequence depends on its own request and logits only.

Randomness is a function of (seed, position): Philox, keyed by the seed, counted by the position in the
answer; so a request gives the same tokens wherever and in whatever company it runs.

Shapes: R rows, one per sequence, V vocabulary, A token ids that have text (A <= V).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinpool.core.errors import InternalError
from twinpool.core.request import SamplingParams, TokenLogprob
from twinpool.engine.plan import ItemResult

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """What the choice of one token depends on, besides its logits."""

    sampling: SamplingParams
    token_ids: Sequence[int]  # prompt, then output
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """The place in the answer of the token to choose."""
        return len(self.token_ids) - self.num_prompt_tokens


class Sampler:
    """Chooses tokens of one model.

    Args:
        sampling_vocab_size: Ids from here on have no text and are never chosen.
        eos_ids: Cannot be chosen before ``min_tokens``, like a request's own stop tokens.
    """

    def __init__(self, *, sampling_vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._num_ids = sampling_vocab_size
        self._eos_ids = tuple(eos_ids)

    def sample(self, logits_RV: Tensor, sequences: Sequence[SampledSequence]) -> tuple[ItemResult, ...]:
        """Choose one token per row.

        Args:
            logits_RV: float32, raw.
            sequences: One per row.

        Returns:
            Token, and log-probabilities if asked for; or the error that ends this sequence alone.
        """
        best_R, best_ids_R = logits_RV[:, : self._num_ids].max(dim=-1)
        finite = torch.isfinite(best_R).tolist()
        best_ids = best_ids_R.tolist()
        results = []
        for row, sequence in enumerate(sequences):
            if not finite[row]:
                results.append(ItemResult(error=InternalError("the model's logits are not finite")))
            elif _is_plain_greedy(sequence):
                results.append(ItemResult(token_id=best_ids[row]))
            else:
                results.append(self._sample_alone(logits_RV[row], sequence))
        return tuple(results)

    def logprobs(
        self, logits_RV: Tensor, token_ids: Sequence[int], *, num_top: int
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probability of one token per row under the raw logits.

        Args:
            logits_RV: float32, raw.
            token_ids: The tokens, one per row.
            num_top: How many alternatives to list, best first.
        """
        totals_R1 = torch.logsumexp(logits_RV, dim=-1, keepdim=True)
        ids_R1 = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)[:, None]
        chosen_R1 = logits_RV.gather(1, ids_R1)
        spoken_RA = logits_RV[:, : self._num_ids]
        ranks = ((spoken_RA > chosen_R1).sum(dim=-1) + 1).tolist()
        top_RK, top_ids_RK = spoken_RA.topk(min(num_top, self._num_ids), dim=-1)
        chosen = (chosen_R1 - totals_R1)[:, 0].tolist()
        tops, top_ids = (top_RK - totals_R1).tolist(), top_ids_RK.tolist()
        return tuple(
            TokenLogprob(
                token_id,
                chosen[row],
                ranks[row],
                tuple(
                    sorted(zip(top_ids[row], tops[row], strict=True), key=lambda entry: (-entry[1], entry[0]))
                ),
            )
            for row, token_id in enumerate(token_ids)
        )

    def _sample_alone(self, logits_V: Tensor, sequence: SampledSequence) -> ItemResult:
        """Keep what goes wrong with one sequence's settings away from the others."""
        try:
            return self._sample_one(logits_V, sequence)
        except (ArithmeticError, LookupError, ValueError) as error:
            return ItemResult(error=InternalError(f"no token could be chosen: {error}"))

    def _sample_one(self, logits_V: Tensor, sequence: SampledSequence) -> ItemResult:
        params = sequence.sampling
        scores_A = logits_V[: self._num_ids].double().cpu().numpy()
        self._adjust(scores_A, sequence)
        best = int(scores_A.argmax())
        if not np.isfinite(scores_A[best]):
            return ItemResult(error=InternalError("no token can be chosen: all are masked"))
        token_id = best
        if params.temperature > 0.0:
            token_id = draw(scores_A, params, position=sequence.position)
        logprob = None
        if params.num_logprobs is not None:
            (logprob,) = self.logprobs(logits_V[None], [token_id], num_top=params.num_logprobs)
        return ItemResult(token_id=token_id, logprob=logprob)

    def _adjust(self, scores_A: Floats, sequence: SampledSequence) -> None:
        """Apply bias, penalties and masks in place; ids without text are left out."""
        params = sequence.sampling
        for token_id, bias in params.logit_bias:
            if 0 <= token_id < self._num_ids:
                scores_A[token_id] += bias
        if params.repetition_penalty != 1.0:
            ids = self._spoken(sequence.token_ids)
            seen = scores_A[ids]
            penalty = params.repetition_penalty
            scores_A[ids] = np.where(seen < 0.0, seen * penalty, seen / penalty)
        if params.presence_penalty or params.frequency_penalty:
            output = self._spoken(sequence.token_ids[sequence.num_prompt_tokens :])
            ids, counts = np.unique(output, return_counts=True)
            scores_A[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if sequence.position < params.min_tokens:
            scores_A[self._spoken((*self._eos_ids, *params.stop_token_ids))] = -np.inf

    def _spoken(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[ids < self._num_ids]


def draw(scores_A: Floats, params: SamplingParams, *, position: int) -> int:
    """Draw a token from adjusted scores: temperature, top_k, top_p, min_p, then the inverse of the sums.

    Args:
        scores_A: Logits after bias, penalties and masks; the largest is finite.
        params: Temperature above 0.
        position: The token's place in the answer.
    """
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to -inf
        weights_A = np.exp((scores_A - scores_A.max()) / params.temperature)
    ids = _kept(weights_A, params)
    sums = np.cumsum(weights_A if ids is None else weights_A[ids])
    point = uniform(params.seed, position) * sums[-1]
    # A weight of zero adds nothing to the sums, so that side="right" steps over it; rounding may go too far.
    place = min(int(np.searchsorted(sums, point, side="right")), int(np.searchsorted(sums, sums[-1])))
    return place if ids is None else int(ids[place])


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to one position of one seed."""
    generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=position)
    return float(np.random.Generator(generator).random())


def _is_plain_greedy(sequence: SampledSequence) -> bool:
    params = sequence.sampling
    return (
        params.temperature == 0.0
        and params.num_logprobs is None
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and sequence.position >= params.min_tokens
    )


def _kept(weights_A: Floats, params: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Return the ids that top_k, top_p and min_p leave, in rising order, never none; None is all."""
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    ids = np.flatnonzero(weights_A)
    if 0 < params.top_k < len(ids):
        ids = _largest(weights_A, ids, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(weights_A, ids, params.top_p)
    if params.min_p > 0.0:
        ids = ids[weights_A[ids] >= params.min_p * weights_A[ids].max()]
    return ids


def _largest(weights_A: Floats, ids: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the ``count`` ids of largest weight in rising order; of equals the lowest ids."""
    weights = weights_A[ids]
    limit = np.partition(weights, len(ids) - count)[len(ids) - count]
    above = ids[weights > limit]
    equal = ids[weights == limit]
    return np.sort(np.concatenate((above, equal[: count - len(above)])))


def _nucleus(weights_A: Floats, ids: npt.NDArray[np.int64], top_p: float) -> npt.NDArray[np.int64]:
    """Return the fewest ids that reach ``top_p`` of the total, largest first, then put in rising order."""
    wanted = top_p * weights_A[ids].sum()
    for count in (256, len(ids)):  # sorting a whole vocabulary is slow and seldom needed
        candidates = _largest(weights_A, ids, count) if count < len(ids) else ids
        ordered = candidates[np.argsort(-weights_A[candidates], kind="stable")]
        sums = np.cumsum(weights_A[ordered])
        if sums[-1] >= wanted:
            break
    return np.sort(ordered[: int(np.searchsorted(sums, wanted, side="left")) + 1])
