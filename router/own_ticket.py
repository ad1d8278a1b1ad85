"""Whether a ticket is its worker's own: where KV is sent follows from who joined, not from an answer."""

from __future__ import annotations

from twinpool.core.errors import TransferRefused
from twinpool.core.ports import WorkerInfo
from twinpool.core.ticket import KVTicket


def check_ticket(ticket: KVTicket, *, decode: WorkerInfo, sender_id: str, request_id: str) -> None:
    """Check that a ticket says of its worker what that worker said when it joined.

    A ticket goes on to the prefill worker, which connects to the addresses in it.

    Args:
        ticket: As ``decode`` gave it.
        decode: Who was asked for room.
        sender_id: The worker for which it was asked.
        request_id: The attempt for which it was asked.

    Raises:
        TransferRefused: It says something else; the field is named.
    """
    for name, given, known in (
        ("worker_id", ticket.worker_id, decode.worker_id),
        ("epoch", ticket.epoch, decode.generation),
        ("request_id", ticket.request_id, request_id),
        ("sender_id", ticket.sender_id, sender_id),
        ("ranks", ticket.ranks, decode.ranks),
        ("layout", ticket.layout, decode.layout),
    ):
        if given != known:
            raise TransferRefused(
                f"the ticket of worker {decode.worker_id} has another {name}: {str(given)[:200]}"
            )
