"""What gRPC may take, and how fast it notices a dead peer: the options of every server and channel.

KV does not pass here (kv_transfer has a stream of its own), so messages are small but for two:

- a request is at most 5 bytes per prompt token: 16 MiB hold three million tokens;
- the first output of a request that asked for prompt log-probabilities has about 15 + 12 x alternatives
  bytes per prompt token: 64 MiB hold 262,144 tokens with 20 alternatives each.
"""

from __future__ import annotations

MAX_REQUEST_BYTES = 16 * 2**20  # into a worker
MAX_ANSWER_BYTES = 64 * 2**20  # out of a worker
MAX_JOIN_BYTES = 2**20  # a worker's info or load

# A frozen process or a cut cable shows as silence.  gRPC's own threads answer, whatever Python does.
KEEPALIVE_S = 2.0  # a silent connection is asked for a sign of life so often
KEEPALIVE_TIMEOUT_S = 4.0  # and is given up without one
CONNECT_TIMEOUT_S = 3.0
HANDSHAKE_TIMEOUT_S = 5.0  # a connection that has not said what it is by then is closed
MAX_IDLE_S = 600.0  # one that said what it is, and makes no call
MAX_CONNECTIONS = 4096  # to one port, so that strangers leave files for the others
MAX_RECONNECT_S = 1.0  # longest pause between two attempts to connect

Options = tuple[tuple[str, int], ...]


def server_options(*, max_receive_bytes: int, max_send_bytes: int) -> Options:
    """Return options of a server.

    Without SO_REUSEPORT a port that is taken is an error at the start, not a share of somebody else's calls.
    """
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.http2.settings_timeout", round(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", round(MAX_IDLE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        # Peers ask for a sign of life at KEEPALIVE_S also when nothing runs; that is no offence.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(KEEPALIVE_S * 500)),
        *_keepalive(),
    )


def channel_options(*, max_receive_bytes: int, max_send_bytes: int) -> Options:
    """Return options of a channel: its own connection, through no proxy, and no retry behind our back."""
    return (
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(MAX_RECONNECT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        *_keepalive(),
    )


def _keepalive() -> Options:
    return (
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )
