"""One step's tokens as tensors: every sequence's share side by side in one ragged dimension.

Built once per step; what layers need is computed here and not again in each layer.
A slot is a token's place in the cache: block number x block_tokens + offset.

Shapes: T tokens in the batch, E tokens of one sequence up to the end of its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinpool.engine.rank_plan import RankItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One sequence's share of a batch."""

    offset: int  # of its first token in T
    first_token: int
    num_tokens: int
    slots_E: npt.NDArray[np.int64]  # of all its tokens, from position 0 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of one step, on the model's device; spans lie in T one after the other."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    spans: tuple[Span, ...]


def build_batch(items: Sequence[RankItem], *, block_tokens: int, device: torch.device) -> Batch:
    """Lay the items' tokens side by side, in the order given."""
    spans, positions, slots = [], [], []
    offset = 0
    for item in items:
        blocks = item.blocks.astype(np.int64)
        slots_E = (blocks[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)[: item.end_token]
        spans.append(
            Span(offset=offset, first_token=item.first_token, num_tokens=item.num_tokens, slots_E=slots_E)
        )
        positions.append(np.arange(item.first_token, item.end_token))
        slots.append(slots_E[item.first_token :])
        offset += item.num_tokens
    return Batch(
        token_ids_T=_tensor([item.token_ids.astype(np.int64) for item in items], device),
        positions_T=_tensor(positions, device),
        slots_T=_tensor(slots, device),
        spans=tuple(spans),
    )


def _tensor(parts: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
