"""Which rank sends which KV heads to which rank, and whether two layouts can be matched at all."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import LayoutMismatch
from twinpool.core.layout import COMPACT, DTYPE_BYTES, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCopy:
    """Heads that one rank sends to another, by their number in the model."""

    source_rank: int
    target_rank: int
    first_head: int
    num_heads: int


def plan_head_copies(source: KVLayout, target: KVLayout) -> tuple[HeadCopy, ...]:
    """List the copies that carry every KV head from ``source`` ranks to ``target`` ranks.

    Both sides call this with the same two layouts and get the same tuple.  Each head reaches each target rank
    that keeps it once.  Of several source ranks that keep a head, the targets take turns.

    Args:
        source: Layout of the prefill worker.
        target: Layout of the decode worker.

    Returns:
        Copies ordered by target rank, then first head; neighbouring heads of one source rank are one copy.

    Source:
        The problem is the one of ``ParaWorker.migrate_blocks`` in LLMServe/DistServe.
    """
    copies: list[HeadCopy] = []
    for target_rank in range(target.tp_size):
        heads = target.rank_heads(target_rank)
        head = heads.start
        while head < heads.stop:
            source_rank = _keeper(source, head, turn=target_rank)
            end = min(heads.stop, source.rank_heads(source_rank).stop)
            copies.append(
                HeadCopy(
                    source_rank=source_rank,
                    target_rank=target_rank,
                    first_head=head,
                    num_heads=end - head,
                )
            )
            head = end
    return tuple(copies)


def agreed_wire(source: KVLayout, target: KVLayout, *, compact: bool) -> str:
    """Return how KV travels: in the narrower of the two dtypes, the sender's if they are alike."""
    if compact:
        return COMPACT
    return min(source.dtype, target.dtype, key=DTYPE_BYTES.__getitem__)


def check_layouts(source: KVLayout, target: KVLayout, *, convert_dtypes: bool) -> None:
    """Check that KV of ``source`` can be written to ``target``.  Blocks and ranks may differ.

    Raises:
        LayoutMismatch: They cannot; the message names what differs.
    """
    names = ("num_layers", "num_kv_heads", "head_dim") + (() if convert_dtypes else ("dtype",))
    for name in names:
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise LayoutMismatch(f"{name}: prefill stores {ours}, decode stores {theirs}")


def _keeper(layout: KVLayout, head: int, *, turn: int) -> int:
    """Return a rank that keeps ``head``; those that do are neighbours."""
    num_keepers = max(1, layout.tp_size // layout.num_kv_heads)
    return head // layout.heads_per_rank * num_keepers + turn % num_keepers
