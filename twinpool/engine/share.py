"""What one rank keeps of a model: which heads, which inner dimensions, which token ids.

Pure numbers: no tensor, no other process.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.core.layout import KVLayout
from twinpool.engine.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Ranges of one rank, in the numbers of the whole model.

    Queries, keys, values, gate and up are cut by their outputs, the matrices behind them by their inputs;
    embedding and output matrix are cut by token ids.  KV heads are those of ``KVLayout.rank_heads``: with
    more ranks than KV heads several ranks keep the same one, each with other query heads.
    """

    heads: range  # query heads; each finds its KV head among ``kv_heads``
    kv_heads: range
    inner: range
    token_ids: range
    adds_bias: bool  # of matrices whose outputs are summed over all ranks: one rank adds it


def share_of(config: DecoderConfig, *, rank: int, size: int) -> Share:
    """Return what rank ``rank`` of ``size`` keeps.

    Raises:
        ConfigError: Heads and ranks do not divide.
    """
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=1,
        dtype="float32",
        tp_size=size,
    )
    if config.num_heads % size:
        raise ConfigError("tensor_parallel", f"{size} ranks do not divide {config.num_heads} query heads")
    if config.vocab_size < size:
        raise ConfigError("tensor_parallel", f"{size} ranks are more than {config.vocab_size} token ids")
    return Share(
        heads=cut(config.num_heads, rank=rank, size=size),
        kv_heads=layout.rank_heads(rank),
        inner=cut(config.inner_dim, rank=rank, size=size),
        token_ids=cut(config.vocab_size, rank=rank, size=size),
        adds_bias=rank == 0,
    )


def cut(total: int, *, rank: int, size: int) -> range:
    """Return one of ``size`` neighbouring parts of ``range(total)``; they differ by one at most."""
    return range(total * rank // size, total * (rank + 1) // size)
