"""codec: every word comes back as it went, and a message that does not fit is refused by its field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rpc.words import AUDIT, INFO, LOAD, TICKET
from tests.toys import request
from twinpool.core.errors import InvalidRequest
from twinpool.core.request import FinishReason, Request, SamplingParams, TokenLogprob, TokenOutput
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.pb import types_pb2, worker_pb2
from twinpool.rpc import codec
from twinpool.rpc.checks import MAX_TEXT_CHARS

TOKENS = st.integers(0, 2**31 - 1)
COUNTS = st.integers(0, 2**31 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(0.0, 1e9)
LOGPROB_VALUES = st.floats(max_value=0.0, allow_nan=False)
TOP = st.lists(st.tuples(TOKENS, LOGPROB_VALUES), max_size=4).map(tuple)
LOGPROBS = st.builds(TokenLogprob, TOKENS, LOGPROB_VALUES, st.integers(1, 2**31 - 1), TOP)
SAMPLING = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(8, 2**31 - 1),
    min_tokens=COUNTS,
    temperature=st.floats(0.0, 1e6),
    top_k=COUNTS,
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(1e-9, 1e6),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    logit_bias=st.lists(st.tuples(TOKENS, FINITE), max_size=3).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(0, codec.MAX_LOGPROBS),
    num_prompt_logprobs=st.none() | st.integers(0, codec.MAX_LOGPROBS),
)
REQUESTS = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable()),
    prompt_ids=st.lists(TOKENS, min_size=1, max_size=20).map(tuple),
    sampling=SAMPLING,
    timeout_s=SECONDS,
    output_ids=st.lists(TOKENS, max_size=7).map(tuple),
    cache_salt=st.text(max_size=MAX_TEXT_CHARS),
)
OUTPUTS = st.builds(
    TokenOutput,
    index=COUNTS,
    token_id=TOKENS,
    finish=st.none() | st.sampled_from(FinishReason),
    logprob=st.none() | LOGPROBS,
    prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=3).map(lambda rest: (None, *rest)),
    cached_tokens=COUNTS,
)
REPORTS = st.builds(
    TransferReport,
    kv_bytes=st.integers(0, 2**63),
    num_frames=st.integers(0, 2**63),
    cached_tokens=COUNTS,
    first_frame_s=st.none() | SECONDS,
    complete_s=st.none() | SECONDS,
    resumed_s=st.none() | SECONDS,
    transport=st.sampled_from(["", "grpc", "shm+tcp"]),
)


def over_the_wire(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


@settings(max_examples=200, deadline=None)
@given(REQUESTS)
def test_a_request_comes_back_as_it_went(sent: Request) -> None:
    message = over_the_wire(codec.request_to_pb(sent))

    assert codec.request_from_pb(message, timeout_s=sent.timeout_s) == sent


@settings(max_examples=200, deadline=None)
@given(OUTPUTS)
def test_an_output_comes_back_as_it_went(sent: TokenOutput) -> None:
    assert codec.output_from_pb(over_the_wire(codec.output_to_pb(sent))) == sent


@settings(max_examples=50, deadline=None)
@given(REPORTS)
def test_a_report_comes_back_as_it_went(sent: TransferReport) -> None:
    assert codec.report_from_pb(over_the_wire(codec.report_to_pb(sent))) == sent


@pytest.mark.parametrize("epoch", [0, 1, 2**64 - 1])
def test_a_ticket_comes_back_as_it_went(epoch: int) -> None:
    sent: KVTicket = replace(TICKET, epoch=epoch)

    assert codec.ticket_from_pb(over_the_wire(codec.ticket_to_pb(sent))) == sent


def test_a_worker_says_of_itself_what_it_is() -> None:
    assert codec.info_from_pb(over_the_wire(codec.info_to_pb(INFO))) == INFO
    assert codec.load_from_pb(over_the_wire(codec.load_to_pb(LOAD))) == LOAD
    assert codec.audit_from_pb(over_the_wire(codec.audit_to_pb(AUDIT))) == AUDIT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", "x" * 513),
        ("cache_salt", "x" * 513),
        ("prompt_ids", []),
        ("prompt_ids", [1, 2**31]),
        ("output_ids", [2**32 - 1]),
        ("output_ids", [1, 2, 3, 4]),  # as many as max_tokens
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_its_field(field: str, value: Any) -> None:
    message = codec.request_to_pb(request(max_tokens=4))
    message.ClearField(field)
    if isinstance(value, list):
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)

    with pytest.raises(InvalidRequest) as caught:
        codec.request_from_pb(message, timeout_s=1.0)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", 2**32 - 1),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -1e-9),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", -math.inf),
        ("num_logprobs", codec.MAX_LOGPROBS + 1),
        ("num_prompt_logprobs", 2**32 - 1),
    ],
)
def test_sampling_that_cannot_be_is_refused_by_its_field(field: str, value: float) -> None:
    message = codec.request_to_pb(request())
    setattr(message.sampling, field, value)

    with pytest.raises(InvalidRequest) as caught:
        codec.request_from_pb(message, timeout_s=1.0)
    assert caught.value.param == field


def test_lists_that_a_client_can_lengthen_have_an_end() -> None:
    message = codec.request_to_pb(request())
    message.sampling.stop_token_ids.extend([1] * (codec.MAX_LIST_ITEMS + 1))

    with pytest.raises(InvalidRequest, match="stop_token_ids: 4097 entries are more than 4096"):
        codec.request_from_pb(message, timeout_s=1.0)


def test_a_bias_must_be_a_number() -> None:
    message = codec.request_to_pb(request())
    message.sampling.logit_bias.add(token_id=3, bias=math.nan)

    with pytest.raises(InvalidRequest, match="logit_bias: nan is not a finite number"):
        codec.request_from_pb(message, timeout_s=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer_id", "a" * 31),
        ("transfer_id", "A" * 32),
        ("transfer_id", "../" + "a" * 29),
        ("request_id", ""),
        ("worker_id", ""),
        ("sender_id", ""),
        ("num_tokens", 0),
        ("num_tokens", 2**31),
        ("cached_tokens", 70),
        ("lease_s", math.nan),
        ("lease_s", -1.0),
        ("expires_unix_s", math.inf),
        ("signature", b"\0" * 31),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_by_its_field(field: str, value: Any) -> None:
    message = codec.ticket_to_pb(TICKET)
    setattr(message, field, value)

    with pytest.raises(InvalidRequest) as caught:
        codec.ticket_from_pb(message)
    assert caught.value.param == field


def test_an_output_that_does_not_fit_is_refused_by_its_field() -> None:
    whole = codec.output_to_pb(
        TokenOutput(index=0, token_id=1, logprob=TokenLogprob(1, -0.5, 1, ((1, -0.5),)))
    )
    broken = []
    for field, value in [("finish", 7), ("token_id", 2**31), ("index", 2**31), ("cached_tokens", 2**31)]:
        broken.append((field, over_the_wire(whole)))
        setattr(broken[-1][1], field, value)
    broken.append(("top_logprobs", over_the_wire(whole)))
    broken[-1][1].logprob.top_ids.append(2)
    broken.append(("logprob", over_the_wire(whole)))
    broken[-1][1].logprob.logprob = math.nan

    for field, message in broken:
        with pytest.raises(InvalidRequest) as caught:
            codec.output_from_pb(message)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "boss"), ("worker_id", ""), ("num_blocks", 0), ("max_model_tokens", 2**31), ("address", "")],
)
def test_an_info_that_does_not_fit_is_refused_by_its_field(field: str, value: Any) -> None:
    message = codec.info_to_pb(INFO)
    setattr(message, field, value)

    with pytest.raises(InvalidRequest) as caught:
        codec.info_from_pb(message)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("dtype", "int4", "'int4' is none of bfloat16, float16, float32"),
        ("num_kv_heads", 3, "2 ranks and 3 KV heads do not divide each other"),
        ("tp_size", 0, r"0 is not in \[1, "),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_field(field: str, value: Any, problem: str) -> None:
    info, ticket = codec.info_to_pb(INFO), codec.ticket_to_pb(TICKET)
    for layout in (info.layout, ticket.layout):
        setattr(layout, field, value)

    with pytest.raises(InvalidRequest, match=problem):
        codec.info_from_pb(info)
    with pytest.raises(InvalidRequest, match=problem):
        codec.ticket_from_pb(ticket)


def test_ranks_that_a_worker_can_lengthen_have_an_end() -> None:
    info = codec.info_to_pb(INFO)
    info.ranks.extend([info.ranks[0]] * codec.MAX_RANKS)

    with pytest.raises(
        InvalidRequest, match=f"ranks: {codec.MAX_RANKS + 2} entries are more than {codec.MAX_RANKS}"
    ):
        codec.info_from_pb(info)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_understood(payload: bytes) -> None:
    """Bytes that protobuf can read by accident still meet every check."""
    readers: list[tuple[type[Message], Any]] = [
        (types_pb2.Request, lambda message: codec.request_from_pb(message, timeout_s=1.0)),
        (types_pb2.TokenOutput, codec.output_from_pb),
        (types_pb2.KVTicket, codec.ticket_from_pb),
        (types_pb2.WorkerInfo, codec.info_from_pb),
        (types_pb2.WorkerLoad, codec.load_from_pb),
        (types_pb2.TransferReport, codec.report_from_pb),
        (worker_pb2.AuditReply, codec.audit_from_pb),
    ]
    for kind, read in readers:
        message = kind()
        try:
            message.ParseFromString(payload)
        except Exception:
            continue
        try:
            read(message)
        except InvalidRequest as error:
            assert error.param
