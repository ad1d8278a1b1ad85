"""Attention by torch's scaled_dot_product_attention over keys and values gathered from the cache.

Sequences that compute one token go together, padded to the longest; a longer share goes alone.  Padding
repeats a slot of the sequence itself, and no slot beyond a sequence's tokens is ever read: what an
earlier owner left in a block, NaN included, cannot reach the next one.

Shapes: T tokens in the batch, C tokens of one share, B sequences, S gathered tokens, H query heads,
K KV heads, G = H / K queries per KV head, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from twinpool.engine.attention_kernel import AttentionKernel, PreparedAttention
from twinpool.engine.batch import Batch, Span


class TorchSDPA:
    """Works on every device that torch knows.

    Args:
        num_kv_heads: Of the model.
    """

    def __init__(self, *, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads

    def prepare(self, batch: Batch, *, window: int | None) -> PreparedAttention:
        device = batch.slots_T.device
        parts: list[_Singles | _Chunk] = []
        # Of two sequences padded to one length the longer is less than twice the shorter: bounded waste.
        for size, group in itertools.groupby(batch.spans, key=_size_class):
            spans = list(group)
            if size:
                parts.append(_singles(spans, window=window, device=device))
            else:
                parts.extend(_chunk(span, window=window, device=device) for span in spans)
        return _Prepared(tuple(parts), self._num_kv_heads)


def create(*, num_kv_heads: int) -> AttentionKernel:
    return TorchSDPA(num_kv_heads=num_kv_heads)


@dataclass(frozen=True, slots=True)
class _Singles:
    """Neighbours in T that compute one token each."""

    rows: slice
    slots: Tensor  # [B x S]
    mask_B11S: Tensor | None  # True where a token is seen; None where all are

    def attend(self, q_TKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        q_BKGD = q_TKGD[self.rows]
        num_sequences, num_kv_heads, _, head_dim = q_BKGD.shape
        keys, values = (
            _gather(side, self.slots).view(num_sequences, -1, num_kv_heads, head_dim).transpose(1, 2)
            for side in cache
        )
        # The queries of one KV head stand where tokens usually stand: nothing is repeated.
        out_BKGD = scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=self.mask_B11S)
        return out_BKGD.reshape(num_sequences, -1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence."""

    rows: slice
    slots_S: Tensor | None  # None: it sees its own tokens only
    mask_CS: Tensor | None  # True where a token is seen; None is causal

    def attend(self, q_TKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        q_GKCD = q_TKGD[self.rows].permute(2, 1, 0, 3)
        if self.slots_S is None:
            k_SKD, v_SKD = k_TKD[self.rows], v_TKD[self.rows]
        else:
            k_SKD, v_SKD = (_gather(side, self.slots_S) for side in cache)
        out_GKCD = scaled_dot_product_attention(
            q_GKCD,
            k_SKD.transpose(0, 1).expand(q_GKCD.shape[0], -1, -1, -1),
            v_SKD.transpose(0, 1).expand(q_GKCD.shape[0], -1, -1, -1),
            attn_mask=self.mask_CS,
            is_causal=self.mask_CS is None,
        )
        return out_GKCD.permute(2, 1, 0, 3).reshape(q_GKCD.shape[2], -1)


class _Prepared:
    def __init__(self, parts: Sequence[_Singles | _Chunk], num_kv_heads: int) -> None:
        self._parts = parts
        self._num_kv_heads = num_kv_heads

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        q_TKGD = q_THD.view(q_THD.shape[0], self._num_kv_heads, -1, q_THD.shape[2])
        outputs = [part.attend(q_TKGD, k_TKD, v_TKD, cache) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather(side_SKD: Tensor, slots: Tensor) -> Tensor:
    """Copy whole tokens; as rows of two dimensions they go a third faster than as three."""
    return side_SKD.flatten(1).index_select(0, slots).view(-1, *side_SKD.shape[1:])


def _size_class(span: Span) -> int:
    """Return 0 for a share of several tokens, else the binary length of what the token sees."""
    return 0 if span.num_tokens > 1 else len(span.slots_E).bit_length()


def _singles(spans: Sequence[Span], *, window: int | None, device: torch.device) -> _Singles:
    seen = [span.slots_E if window is None else span.slots_E[-window:] for span in spans]
    lengths_B = np.array([len(slots) for slots in seen])
    longest = int(lengths_B.max())
    slots_BS = np.empty((len(spans), longest), dtype=np.int64)
    for row, slots in zip(slots_BS, seen, strict=True):
        row[: len(slots)] = slots
        row[len(slots) :] = slots[0]
    mask = None
    if int(lengths_B.min()) < longest:
        mask = _tensor(np.arange(longest) < lengths_B[:, None], device)[:, None, None, :]
    rows = slice(spans[0].offset, spans[0].offset + len(spans))
    return _Singles(rows, _tensor(slots_BS.reshape(-1), device), mask)


def _chunk(span: Span, *, window: int | None, device: torch.device) -> _Chunk:
    rows = slice(span.offset, span.offset + span.num_tokens)
    end = span.first_token + span.num_tokens
    windowed = window is not None and window < end
    if span.first_token == 0 and not windowed:
        return _Chunk(rows, None, None)
    start = max(0, span.first_token - window + 1) if window is not None else 0
    queries_C1 = np.arange(span.first_token, end)[:, None]
    keys_S = np.arange(start, end)
    mask_CS = keys_S <= queries_C1
    if window is not None:
        mask_CS &= keys_S > queries_C1 - window
    return _Chunk(rows, _tensor(span.slots_E[start:], device), _tensor(mask_CS, device))


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
