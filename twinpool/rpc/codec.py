"""The words of twinpool/core as protobuf messages, both ways.

On the way in nothing is believed: a message that does not fit becomes an ``InvalidRequest`` that names
the field, so a hostile or broken peer costs one call and no more.  What a field means is not known
here; whether a request can be run is the engine's to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinpool.core.errors import ConfigError, InvalidRequest
from twinpool.core.layout import DTYPE_BYTES, KVLayout
from twinpool.core.ports import BlockCounts, Role, WorkerAudit, WorkerInfo, WorkerLoad
from twinpool.core.request import FinishReason, Request, SamplingParams, TokenLogprob, TokenOutput
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport
from twinpool.pb import types_pb2, worker_pb2
from twinpool.rpc.checks import MAX_INT, hex_digits, integer, length, number, positive, signature, text

MAX_LOGPROBS = 128  # alternatives per token
MAX_LIST_ITEMS = 4096  # logit biases, stop tokens, counters: lists whose length a client can choose
MAX_ENDPOINTS = 16  # of one rank
MAX_RANKS = 64  # of one worker

_FINISH_TO_PB = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB = {value: finish for finish, value in _FINISH_TO_PB.items()}


def request_to_pb(request: Request) -> types_pb2.Request:
    """Return the message of ``request``; its ``timeout_s`` travels as the deadline of the call."""
    return types_pb2.Request(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids,
        sampling=_sampling_to_pb(request.sampling),
        cache_salt=request.cache_salt,
    )


def request_from_pb(message: types_pb2.Request, *, timeout_s: float) -> Request:
    """Return the request of ``message``, which has ``timeout_s`` seconds left.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    request = Request(
        request_id=text("request_id", message.request_id),
        prompt_ids=_token_ids("prompt_ids", message.prompt_ids),
        output_ids=_token_ids("output_ids", message.output_ids),
        sampling=_sampling_from_pb(message.sampling),
        timeout_s=timeout_s,
        cache_salt=text("cache_salt", message.cache_salt, least=0),
    )
    if not request.prompt_ids:
        raise InvalidRequest("prompt_ids", "there is no token")
    if len(request.output_ids) >= request.sampling.max_tokens:
        raise InvalidRequest(
            "output_ids",
            f"{len(request.output_ids)} tokens leave nothing of max_tokens = {request.sampling.max_tokens}",
        )
    return request


def output_to_pb(output: TokenOutput) -> types_pb2.TokenOutput:
    """Return the message of ``output``."""
    message = types_pb2.TokenOutput(
        index=output.index,
        token_id=output.token_id,
        finish=_FINISH_TO_PB[output.finish],
        cached_tokens=output.cached_tokens,
    )
    if output.logprob is not None:
        message.logprob.CopyFrom(_logprob_to_pb(output.logprob))
    if output.prompt_logprobs is not None:
        after_first = [
            _logprob_to_pb(logprob) for logprob in output.prompt_logprobs[1:] if logprob is not None
        ]
        assert len(after_first) == max(len(output.prompt_logprobs) - 1, 0), "only the first entry may be None"
        message.prompt_logprobs.CopyFrom(types_pb2.PromptLogprobs(after_first=after_first))
    return message


def output_from_pb(message: types_pb2.TokenOutput) -> TokenOutput:
    """Return the output of ``message``.

    Raises:
        InvalidRequest: A field is out of range.
    """
    if message.finish not in _FINISH_FROM_PB:
        raise InvalidRequest("finish", f"{message.finish} is no finish reason")
    return TokenOutput(
        index=integer("index", message.index),
        token_id=integer("token_id", message.token_id),
        finish=_FINISH_FROM_PB[message.finish],
        logprob=_logprob_from_pb(message.logprob) if message.HasField("logprob") else None,
        prompt_logprobs=(
            (None, *(_logprob_from_pb(logprob) for logprob in message.prompt_logprobs.after_first))
            if message.HasField("prompt_logprobs")
            else None
        ),
        cached_tokens=integer("cached_tokens", message.cached_tokens),
    )


def sender_from_pb(message: worker_pb2.ReserveRequest) -> str:
    """Return the id of the worker that is to send the KV.

    Raises:
        InvalidRequest: It is missing or too long.
    """
    return text("sender_id", message.sender_id)


def ticket_to_pb(ticket: KVTicket) -> types_pb2.KVTicket:
    """Return the message of ``ticket``."""
    return types_pb2.KVTicket(
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        request_id=ticket.request_id,
        worker_id=ticket.worker_id,
        sender_id=ticket.sender_id,
        ranks=_ranks_to_pb(ticket.ranks),
        layout=_layout_to_pb(ticket.layout),
        num_tokens=ticket.num_tokens,
        cached_tokens=ticket.cached_tokens,
        lease_s=ticket.lease_s,
        expires_unix_s=ticket.expires_unix_s,
        signature=ticket.signature,
    )


def ticket_from_pb(message: types_pb2.KVTicket) -> KVTicket:
    """Return the ticket of ``message``.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    num_tokens = integer("num_tokens", message.num_tokens, least=1)
    return KVTicket(
        transfer_id=hex_digits("transfer_id", message.transfer_id, num_digits=32),
        epoch=message.epoch,
        request_id=text("request_id", message.request_id),
        worker_id=text("worker_id", message.worker_id),
        sender_id=text("sender_id", message.sender_id),
        ranks=_ranks_from_pb(message.ranks),
        layout=_layout_from_pb(message.layout),
        num_tokens=num_tokens,
        cached_tokens=integer("cached_tokens", message.cached_tokens, most=num_tokens),
        lease_s=number("lease_s", message.lease_s, least=0.0),
        expires_unix_s=number("expires_unix_s", message.expires_unix_s, least=0.0),
        signature=signature("signature", message.signature),
    )


def report_to_pb(report: TransferReport) -> types_pb2.TransferReport:
    """Return the message of ``report``."""
    return types_pb2.TransferReport(
        kv_bytes=report.kv_bytes,
        num_frames=report.num_frames,
        cached_tokens=report.cached_tokens,
        first_frame_s=report.first_frame_s,
        complete_s=report.complete_s,
        resumed_s=report.resumed_s,
        transport=report.transport,
    )


def report_from_pb(message: types_pb2.TransferReport) -> TransferReport:
    """Return the report of ``message``.

    Raises:
        InvalidRequest: A time is not a finite number of at least 0.
    """
    times_s = {
        name: number(name, getattr(message, name), least=0.0) if message.HasField(name) else None
        for name in ("first_frame_s", "complete_s", "resumed_s")
    }
    return TransferReport(
        kv_bytes=message.kv_bytes,
        num_frames=message.num_frames,
        cached_tokens=integer("cached_tokens", message.cached_tokens),
        transport=text("transport", message.transport, least=0),
        **times_s,
    )


def info_to_pb(info: WorkerInfo) -> types_pb2.WorkerInfo:
    """Return the message of ``info``."""
    return types_pb2.WorkerInfo(
        worker_id=info.worker_id,
        role=info.role.value,
        address=info.address,
        pid=info.pid,
        host=info.host,
        generation=info.generation,
        model=info.model,
        fingerprint=info.fingerprint,
        layout=_layout_to_pb(info.layout),
        num_blocks=info.num_blocks,
        max_model_tokens=info.max_model_tokens,
        ranks=_ranks_to_pb(info.ranks),
    )


def info_from_pb(message: types_pb2.WorkerInfo) -> WorkerInfo:
    """Return the worker's info of ``message``.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    length("fingerprint", message.fingerprint, most=MAX_LIST_ITEMS)
    return WorkerInfo(
        worker_id=text("worker_id", message.worker_id),
        role=_role(message.role),
        address=text("address", message.address),
        pid=integer("pid", message.pid),
        host=text("host", message.host),
        generation=message.generation,
        model=text("model", message.model),
        fingerprint={
            text("fingerprint", name): text("fingerprint", value, least=0)
            for name, value in message.fingerprint.items()
        },
        layout=_layout_from_pb(message.layout),
        num_blocks=integer("num_blocks", message.num_blocks, least=1),
        max_model_tokens=integer("max_model_tokens", message.max_model_tokens, least=1),
        ranks=_ranks_from_pb(message.ranks),
    )


def endpoints_to_pb(endpoints: Sequence[Endpoint]) -> types_pb2.RankEndpoints:
    """Return the message of the endpoints of one rank."""
    return types_pb2.RankEndpoints(
        endpoints=[types_pb2.Endpoint(transport=e.transport, address=e.address) for e in endpoints]
    )


def endpoints_from_pb(message: types_pb2.RankEndpoints) -> tuple[Endpoint, ...]:
    """Return the endpoints of one rank.

    Raises:
        InvalidRequest: There are too many, or one is empty or too long.
    """
    length("endpoints", message.endpoints, most=MAX_ENDPOINTS)
    return tuple(
        Endpoint(text("transport", endpoint.transport), text("address", endpoint.address))
        for endpoint in message.endpoints
    )


def load_to_pb(load: WorkerLoad) -> types_pb2.WorkerLoad:
    """Return the message of ``load``."""
    return types_pb2.WorkerLoad(
        running=load.running,
        queued=load.queued,
        free_blocks=load.free_blocks,
        draining=load.draining,
        stalled_s=load.stalled_s,
        counters=load.counters,
    )


def load_from_pb(message: types_pb2.WorkerLoad) -> WorkerLoad:
    """Return the load of ``message``.

    Raises:
        InvalidRequest: A field is out of range.
    """
    return WorkerLoad(
        running=integer("running", message.running),
        queued=integer("queued", message.queued),
        free_blocks=integer("free_blocks", message.free_blocks),
        draining=message.draining,
        stalled_s=number("stalled_s", message.stalled_s, least=0.0),
        counters=counters_from_pb(message.counters),
    )


def counters_from_pb(counters: Mapping[str, int]) -> Mapping[str, int]:
    """Return totals by name.

    Raises:
        InvalidRequest: There are too many, or a name is empty or too long.
    """
    length("counters", counters, most=MAX_LIST_ITEMS)
    return {text("counters", name): count for name, count in counters.items()}


def audit_to_pb(audit: WorkerAudit) -> worker_pb2.AuditReply:
    """Return the message of ``audit``."""
    return worker_pb2.AuditReply(
        worker_id=audit.worker_id,
        role=audit.role.value,
        blocks=types_pb2.BlockCounts(
            total=audit.blocks.total,
            free=audit.blocks.free,
            cached=audit.blocks.cached,
            owned=audit.blocks.owned,
            draining=audit.blocks.draining,
        ),
        tickets=audit.tickets,
        transfers=audit.transfers,
        sequences=audit.sequences,
    )


def audit_from_pb(message: worker_pb2.AuditReply) -> WorkerAudit:
    """Return the books of ``message``; whether they add up is the reader's to judge.

    Raises:
        InvalidRequest: A field is missing or out of range.
    """
    blocks = message.blocks
    return WorkerAudit(
        worker_id=text("worker_id", message.worker_id),
        role=_role(message.role),
        blocks=BlockCounts(
            total=integer("total", blocks.total),
            free=integer("free", blocks.free),
            cached=integer("cached", blocks.cached),
            owned=integer("owned", blocks.owned),
            draining=integer("draining", blocks.draining),
        ),
        tickets=integer("tickets", message.tickets),
        transfers=integer("transfers", message.transfers),
        sequences=integer("sequences", message.sequences),
    )


def timeout_from_pb(message: worker_pb2.DrainRequest) -> float:
    """Return how long a drain may wait, in seconds.

    Raises:
        InvalidRequest: It is not a finite number of at least 0.
    """
    return number("timeout_s", message.timeout_s, least=0.0)


def freed_blocks_from_pb(message: worker_pb2.ClearCacheReply) -> int:
    """Return how many blocks became free.

    Raises:
        InvalidRequest: It is out of range.
    """
    return integer("freed_blocks", message.freed_blocks)


def role_from_pb(message: worker_pb2.AssignRequest) -> Role:
    """Return the role that a worker is to have.

    Raises:
        InvalidRequest: It is none.
    """
    return _role(message.role)


def _sampling_to_pb(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[types_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
    )


def _sampling_from_pb(message: types_pb2.SamplingParams) -> SamplingParams:
    length("logit_bias", message.logit_bias, most=MAX_LIST_ITEMS)
    length("stop_token_ids", message.stop_token_ids, most=MAX_LIST_ITEMS)
    return SamplingParams(
        seed=message.seed,
        max_tokens=integer("max_tokens", message.max_tokens, least=1),
        min_tokens=integer("min_tokens", message.min_tokens),
        temperature=number("temperature", message.temperature, least=0.0),
        top_k=integer("top_k", message.top_k),
        top_p=positive("top_p", message.top_p, most=1.0),
        min_p=number("min_p", message.min_p, least=0.0, most=1.0),
        repetition_penalty=positive("repetition_penalty", message.repetition_penalty),
        presence_penalty=number("presence_penalty", message.presence_penalty),
        frequency_penalty=number("frequency_penalty", message.frequency_penalty),
        logit_bias=tuple(
            (integer("logit_bias", entry.token_id), number("logit_bias", entry.bias))
            for entry in message.logit_bias
        ),
        stop_token_ids=_token_ids("stop_token_ids", message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=_optional_logprobs(message, "num_logprobs"),
        num_prompt_logprobs=_optional_logprobs(message, "num_prompt_logprobs"),
    )


def _optional_logprobs(message: types_pb2.SamplingParams, name: str) -> int | None:
    if not message.HasField(name):
        return None
    return integer(name, getattr(message, name), most=MAX_LOGPROBS)


def _logprob_to_pb(logprob: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _logprob_from_pb(message: types_pb2.TokenLogprob) -> TokenLogprob:
    length("top_ids", message.top_ids, most=MAX_LOGPROBS)
    if len(message.top_ids) != len(message.top_logprobs):
        raise InvalidRequest(
            "top_logprobs", f"{len(message.top_logprobs)} values for {len(message.top_ids)} tokens"
        )
    return TokenLogprob(
        token_id=integer("token_id", message.token_id),
        logprob=_logprob_value("logprob", message.logprob),
        rank=integer("rank", message.rank, least=1),
        top=tuple(
            (integer("top_ids", token_id), _logprob_value("top_logprobs", value))
            for token_id, value in zip(message.top_ids, message.top_logprobs, strict=True)
        ),
    )


def _layout_to_pb(layout: KVLayout) -> types_pb2.KVLayout:
    return types_pb2.KVLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        tp_size=layout.tp_size,
    )


def _layout_from_pb(message: types_pb2.KVLayout) -> KVLayout:
    if message.dtype not in DTYPE_BYTES:
        raise InvalidRequest("dtype", f"{message.dtype[:32]!r} is none of {', '.join(sorted(DTYPE_BYTES))}")
    try:
        return KVLayout(
            num_layers=integer("num_layers", message.num_layers, least=1),
            num_kv_heads=integer("num_kv_heads", message.num_kv_heads, least=1),
            head_dim=integer("head_dim", message.head_dim, least=1),
            block_tokens=integer("block_tokens", message.block_tokens, least=1),
            dtype=message.dtype,
            tp_size=integer("tp_size", message.tp_size, least=1, most=MAX_RANKS),
        )
    except ConfigError as error:
        raise InvalidRequest("tp_size", error.problem) from None


def _ranks_to_pb(ranks: Sequence[Sequence[Endpoint]]) -> list[types_pb2.RankEndpoints]:
    return [endpoints_to_pb(endpoints) for endpoints in ranks]


def _ranks_from_pb(messages: Sequence[types_pb2.RankEndpoints]) -> tuple[tuple[Endpoint, ...], ...]:
    length("ranks", messages, most=MAX_RANKS)
    return tuple(endpoints_from_pb(message) for message in messages)


def _role(value: str) -> Role:
    try:
        return Role(value)
    except ValueError:
        raise InvalidRequest("role", f"{value[:32]!r} is none of {', '.join(Role)}") from None


def _token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if ids and max(ids) > MAX_INT:
        raise InvalidRequest(name, f"token id {max(ids)} is more than {MAX_INT}")
    return tuple(ids)


def _logprob_value(name: str, value: float) -> float:
    """A log-probability: minus infinity is one, what is not a number is none."""
    if math.isnan(value) or value == math.inf:
        raise InvalidRequest(name, f"{value} is no log-probability")
    return value
