"""The KV of one request on its way: layer by layer over the sender's link and the receiver's, or later."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.plan import agreed_wire, plan_head_copies
from twinpool.core.layout import KVLayout, wire_bytes
from twinpool.lab.profile.profile import Link
from twinpool.lab.simulate.config import Overlap
from twinpool.lab.simulate.link import Flow, SharedLink
from twinpool.lab.simulate.worker import SimulatedWorker


class Way:
    """Makes transfers.

    Args:
        link: Of each worker, or of each of its ranks.
        overlap: When KV may leave.
        compact: It travels as int8.
        is_shared: Transfers of a worker queue for its link; otherwise each has one to itself.
    """

    def __init__(self, link: Link, *, overlap: Overlap, compact: bool, is_shared: bool) -> None:
        self.link = link
        self.overlap = overlap
        self._compact = compact
        self._is_shared = is_shared
        self._token_bytes: dict[tuple[KVLayout, KVLayout], int] = {}

    def transfer(
        self, source: SimulatedWorker, target: SimulatedWorker, *, num_tokens: int, first_token: int
    ) -> SimulatedTransfer:
        """Begin to send tokens ``[first_token, num_tokens)`` of a prompt that ``source`` computes."""
        links: tuple[SharedLink, ...] = (source.link_out, target.link_in)
        if not self._is_shared:
            links = tuple(SharedLink(link.bytes_s) for link in links)
        return SimulatedTransfer(
            self, source, target, links=links, num_tokens=num_tokens, first_token=first_token
        )

    def token_bytes(self, source: KVLayout, target: KVLayout) -> int:
        """Return the bytes of a token, each head once for each rank that keeps it."""
        known = self._token_bytes.get((source, target))
        if known is None:
            known = self._token_bytes[source, target] = token_bytes(source, target, compact=self._compact)
        return known


class SimulatedTransfer:
    """One transfer; made by a ``Way``.

    Attributes:
        num_bytes: That were sent.
        whole_s: When the receiver has all of it; known after the last step of the prompt.
    """

    __slots__ = (
        "_due_bytes",
        "_flows",
        "_links",
        "_source",
        "_target",
        "_token_bytes",
        "_way",
        "_written",
        "num_bytes",
        "whole_s",
    )

    def __init__(
        self,
        way: Way,
        source: SimulatedWorker,
        target: SimulatedWorker,
        *,
        links: tuple[SharedLink, ...],
        num_tokens: int,
        first_token: int,
    ) -> None:
        self.num_bytes = 0
        self.whole_s = 0.0
        self._way = way
        self._source = source
        self._target = target
        self._links = links
        self._written = min(first_token, num_tokens)
        self._due_bytes = 0.0  # what becomes ready when the current step ends
        self._flows: tuple[Flow, ...] = ()  # of the current step, on each link
        self._token_bytes = way.token_bytes(source.info.layout, target.info.layout)

    def computes(self, end_token: int, *, start_s: float, end_s: float) -> None:
        """A step writes the KV of the prompt up to ``end_token``; layer by layer, if it leaves so."""
        num_bytes = max(0, end_token - self._written) * self._token_bytes
        self._written = max(self._written, end_token)
        self.num_bytes += num_bytes
        num_layers = self._source.info.layout.num_layers
        if self._way.overlap is not Overlap.LAYERS or num_layers == 1 or not num_bytes:
            self._due_bytes += num_bytes
            return
        layer_bytes = num_bytes / num_layers
        self._due_bytes = layer_bytes
        layer_s = (end_s - start_s) / num_layers
        self._flows = tuple(
            [
                link.flow(num_bytes - layer_bytes, start_s=start_s + layer_s, end_s=end_s)
                for link in self._links
            ]
        )

    def computed(self, *, is_last: bool, now_s: float) -> None:
        """That step ended; ``is_last``: the prompt is whole."""
        if self._way.overlap is Overlap.NONE and not is_last:
            return
        if self._due_bytes:
            if self._flows and now_s < self._flows[0][1]:  # sooner than it looked: a neighbour ended
                for link, flow in zip(self._links, self._flows, strict=True):
                    link.hasten(flow, now_s=now_s)
            left_s = max([link.burst(self._due_bytes, now_s=now_s) for link in self._links])
            self.whole_s = left_s + self._way.link.latency_s
            self._due_bytes = 0.0
        if is_last:
            self._source.kv_bytes_out += self.num_bytes
            self._target.kv_bytes_in += self.num_bytes


def token_bytes(source: KVLayout, target: KVLayout, *, compact: bool = False) -> int:
    """Return what a token's KV takes on the wire, over all ranks: as ``kv_transfer`` sends it."""
    wire = agreed_wire(source, target, compact=compact)
    num_heads = sum(copy.num_heads for copy in plan_head_copies(source, target))
    layer = wire_bytes(wire, num_tokens=1, num_heads=num_heads, head_dim=source.head_dim)
    return source.num_layers * layer


def without_time(link: Link) -> Link:
    """Return a link on which everything takes no time: as simdistserve has it."""
    return replace(link, latency_s=0.0, bytes_s=1e30)
