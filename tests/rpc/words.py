"""One value of each word that travels."""

from __future__ import annotations

from tests.toys import layout
from twinpool.core.ports import BlockCounts, Role, WorkerAudit, WorkerInfo, WorkerLoad
from twinpool.core.ticket import Endpoint, KVTicket

RANKS = (
    (Endpoint("grpc", "127.0.0.1:1"), Endpoint("loopback", "decode-0")),
    (Endpoint("grpc", "127.0.0.1:2"),),
)

TICKET = KVTicket(
    transfer_id="0123456789abcdef" * 2,
    epoch=7,
    request_id="r0",
    worker_id="decode-0",
    sender_id="prefill-0",
    ranks=RANKS,
    layout=layout(tp_size=2),
    num_tokens=69,
    cached_tokens=16,
    lease_s=3.0,
    expires_unix_s=1_700_000_000.25,
    signature=bytes(range(32)),
)

INFO = WorkerInfo(
    worker_id="decode-0",
    role=Role.DECODE,
    address="127.0.0.1:1",
    pid=4321,
    host="laptop",
    generation=7,
    model="toy",
    fingerprint={"dtype": "float32", "revision": ""},
    layout=layout(tp_size=2),
    num_blocks=64,
    max_model_tokens=256,
    ranks=RANKS,
)

LOAD = WorkerLoad(
    running=2, queued=1, free_blocks=50, draining=True, stalled_s=0.5, counters={"steps": 2**40}
)

AUDIT = WorkerAudit(
    worker_id="decode-0",
    role=Role.DECODE,
    blocks=BlockCounts(total=64, free=50, cached=4, owned=8, draining=2),
    tickets=1,
    transfers=2,
    sequences=3,
)
