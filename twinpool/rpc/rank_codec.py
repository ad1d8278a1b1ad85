"""The words of ``twinpool/core/rank_port.py`` as protobuf messages, both ways; see ``codec.py``."""

from __future__ import annotations

from twinpool.core.errors import InvalidRequest
from twinpool.core.rank_port import Expected, RankHello, RankReady, RankState
from twinpool.core.ticket import KVTicket
from twinpool.pb import rank_pb2
from twinpool.rpc import codec
from twinpool.rpc.checks import MAX_INT, hex_digits, integer, number, signature, text


def hello_to_pb(hello: RankHello) -> rank_pb2.RankMessage:
    """Return the first message of a rank."""
    return rank_pb2.RankMessage(
        hello=rank_pb2.RankHello(rank=hello.rank, num_ranks=hello.num_ranks, generation=hello.generation)
    )


def hello_from_pb(message: rank_pb2.RankMessage) -> RankHello:
    """Return what a rank says first.

    Raises:
        InvalidRequest: It says something else, or a field is out of range.
    """
    if not message.HasField("hello"):
        raise InvalidRequest("hello", "the first message does not carry it")
    hello = message.hello
    num_ranks = integer("num_ranks", hello.num_ranks, least=2, most=codec.MAX_RANKS)
    return RankHello(
        rank=integer("rank", hello.rank, least=1, most=num_ranks - 1),
        num_ranks=num_ranks,
        generation=hello.generation,
    )


def ready_to_pb(ready: RankReady) -> rank_pb2.RankMessage:
    """Return the message of ``ready``."""
    return rank_pb2.RankMessage(
        ready=rank_pb2.RankReady(address=ready.address, endpoints=codec.endpoints_to_pb(ready.endpoints))
    )


def ready_from_pb(message: rank_pb2.RankReady) -> RankReady:
    """Return what a rank says of itself.

    Raises:
        InvalidRequest: A field is missing or too long.
    """
    return RankReady(
        address=text("address", message.address), endpoints=codec.endpoints_from_pb(message.endpoints)
    )


def expected_to_pb(expected: Expected, *, epoch: int) -> rank_pb2.ExpectRequest:
    """Return the message of ``expected``."""
    return rank_pb2.ExpectRequest(
        transfer_id=expected.transfer_id,
        epoch=epoch,
        sender_id=expected.sender_id,
        key=expected.key,
        blocks=expected.blocks,
        num_tokens=expected.num_tokens,
        cached_tokens=expected.cached_tokens,
        timeout_s=expected.timeout_s,
    )


def expected_from_pb(message: rank_pb2.ExpectRequest) -> Expected:
    """Return what a rank is to expect; whether it has those blocks is not known here.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    if message.blocks and max(message.blocks) > MAX_INT:
        raise InvalidRequest("blocks", f"{max(message.blocks)} is more than {MAX_INT}")
    num_tokens = integer("num_tokens", message.num_tokens, least=1)
    return Expected(
        transfer_id=hex_digits("transfer_id", message.transfer_id, num_digits=32),
        sender_id=text("sender_id", message.sender_id),
        key=signature("key", message.key),
        blocks=tuple(message.blocks),
        num_tokens=num_tokens,
        cached_tokens=integer("cached_tokens", message.cached_tokens, most=num_tokens),
        timeout_s=number("timeout_s", message.timeout_s, least=0.0),
    )


def begin_to_pb(ticket: KVTicket, *, timeout_s: float) -> rank_pb2.BeginRequest:
    """Return the message that begins to send to the holder of ``ticket``."""
    return rank_pb2.BeginRequest(ticket=codec.ticket_to_pb(ticket), timeout_s=timeout_s)


def begin_from_pb(message: rank_pb2.BeginRequest) -> tuple[KVTicket, float]:
    """Return a ticket and the request's own time in seconds.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    return codec.ticket_from_pb(message.ticket), number("timeout_s", message.timeout_s, least=0.0)


def transfer_from_pb(message: rank_pb2.TransferName) -> str:
    """Return the id of a transfer.

    Raises:
        InvalidRequest: It is none.
    """
    return hex_digits("transfer_id", message.transfer_id, num_digits=32)


def state_to_pb(state: RankState) -> rank_pb2.RankState:
    """Return the message of ``state``."""
    return rank_pb2.RankState(
        num_transfers=state.num_transfers, asked_to_stop=state.asked_to_stop, counters=state.counters
    )


def state_from_pb(message: rank_pb2.RankState) -> RankState:
    """Return how a rank is.

    Raises:
        InvalidRequest: A field is out of range.
    """
    return RankState(
        num_transfers=integer("num_transfers", message.num_transfers),
        asked_to_stop=message.asked_to_stop,
        counters=codec.counters_from_pb(message.counters),
    )
