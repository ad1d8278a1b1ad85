"""One step as every rank of a worker needs to know it: numbers only, no request and no sampling settings.

Rank 0 makes it from the engine's plan; the other ranks read it from bytes.  Knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinpool.engine.plan import BatchItem
from twinpool.pb import rank_plan_pb2 as pb

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankItem:
    """Tokens of one sequence."""

    first_token: int
    token_ids: Ints  # of the tokens to compute, from first_token on
    blocks: Ints  # of all its tokens up to the last of these, by position
    samples: bool  # the logits of the last token are needed
    num_prompt_logits: int  # so are those of this many tokens from the first on
    request_id: str  # empty unless its KV is sent to another worker

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end_token(self) -> int:
        """How many tokens of the sequence are in the cache after the step."""
        return self.first_token + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One step's batch; at least one item."""

    items: tuple[RankItem, ...]

    def encode(self) -> bytes:
        """Return it as a serialised ``rank_plan.proto`` message; never empty."""
        return pb.RankPlan(
            items=[
                pb.RankItem(
                    first_token=item.first_token,
                    token_ids=item.token_ids.astype("<i4", copy=False).tobytes(),
                    blocks=item.blocks.astype("<i4", copy=False).tobytes(),
                    samples=item.samples,
                    num_prompt_logits=item.num_prompt_logits,
                    request_id=item.request_id,
                )
                for item in self.items
            ]
        ).SerializeToString()


def rank_plan(items: Sequence[BatchItem], *, block_tokens: int) -> RankPlan:
    """Take from the engine's items what all ranks need to know."""
    return RankPlan(tuple(_rank_item(item, block_tokens) for item in items))


def decode(data: bytes) -> RankPlan:
    """Read what ``RankPlan.encode`` wrote."""
    message = pb.RankPlan.FromString(data)
    return RankPlan(
        tuple(
            RankItem(
                first_token=item.first_token,
                token_ids=np.frombuffer(item.token_ids, "<i4"),
                blocks=np.frombuffer(item.blocks, "<i4"),
                samples=item.samples,
                num_prompt_logits=item.num_prompt_logits,
                request_id=item.request_id,
            )
            for item in message.items
        )
    )


def _rank_item(item: BatchItem, block_tokens: int) -> RankItem:
    sequence = item.sequence
    end = item.first_token + item.num_tokens
    num_blocks = -(-end // block_tokens)
    blocks = np.asarray(sequence.blocks[:num_blocks], dtype=np.int32)
    assert len(blocks) == num_blocks, f"{end} tokens need {num_blocks} blocks, {len(blocks)} are owned"
    wants_logprobs = sequence.request.sampling.num_prompt_logprobs is not None
    num_followed = sequence.num_prompt_tokens - 1 - item.first_token  # by another token of the prompt
    return RankItem(
        first_token=item.first_token,
        token_ids=np.asarray(sequence.token_ids[item.first_token : end], dtype=np.int32),
        blocks=blocks,
        samples=item.samples,
        num_prompt_logits=max(0, min(item.num_tokens, num_followed)) if wants_logprobs else 0,
        request_id=sequence.request.request_id if sequence.has_destination else "",
    )
