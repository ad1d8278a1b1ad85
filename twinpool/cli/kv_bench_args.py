"""What the options of `kv-bench` ask for: a probe and how to measure it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_bytes, parse_seconds
from twinpool.lab.kv_bench.driving import Wanted
from twinpool.lab.kv_bench.probe import LAYOUTS, Probe
from twinpool.lab.kv_bench.ways import check_names
from twinpool.lab.shaper import LinkShape

_LAYOUT, _BYTES, _MODEL_TOKENS = "8b-bf16", 64 * 2**20, 512
_SMALL_BYTES, _REPEAT, _SMALL_REPEAT = 8 * 2**20, 7, 51
_LISTENING = ("listen", "wait", "run", "set", "certs")  # all that the side that listens may be told
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", re.ASCII)


def probe_of(given: Mapping[str, Any]) -> Probe:
    """Return what is to be moved; of a model, with the layout that counts until the model is loaded.

    Args:
        given: The arguments that were given.

    Raises:
        ConfigError: One of them cannot be.
    """
    name = given.get("layout", _LAYOUT)
    if name not in LAYOUTS:
        raise ConfigError("--layout", f"{name} is none of {', '.join(LAYOUTS)}")
    source_tp, target_tp = _ranks(given.get("tp", "1:1"))
    layout = replace(LAYOUTS[name], block_tokens=given.get("block_tokens", LAYOUTS[name].block_tokens))
    try:
        layout = replace(layout, tp_size=source_tp)
    except ConfigError as error:
        raise ConfigError("--tp", error.problem) from None
    settings = {name: given[name] for name in ("seed", "device", "compact") if name in given}
    if "timeout" in given:
        settings["timeout_s"] = given["timeout"]
    if "message_bytes" in given:
        settings["message_bytes"] = parse_bytes(given["message_bytes"], field="--message-bytes")
    return Probe(
        layout=layout,
        target_tp=target_tp,
        num_tokens=_num_tokens(given, layout.token_bytes),
        scattered="neighbours" not in given,
        **settings,
    )


def wanted_of(given: Mapping[str, Any], *, wire_bytes: int) -> Wanted:
    """Return how to measure a transfer of ``wire_bytes``.

    Raises:
        ConfigError: An argument cannot be.
    """
    names = tuple(given["transports"].split(",")) if "transports" in given else ()
    check_names(names)
    link: dict[str, Any] = {name: given[name] for name in ("loss", "seed") if name in given}
    if "bandwidth" in given:
        link["bandwidth_bytes_s"] = float(parse_bytes(given["bandwidth"], field="--bandwidth"))
    if "latency" in given:
        link["latency_s"] = parse_seconds(given["latency"], field="--latency")
    try:
        shape = LinkShape(**link)
    except ConfigError as error:
        raise ConfigError(f"--{error.field.removeprefix('link.')}", error.problem) from None
    repeat = _SMALL_REPEAT if wire_bytes < _SMALL_BYTES else _REPEAT
    return Wanted(transports=names, repeat=given.get("repeat", repeat), shape=shape)


def check_listening(given: Mapping[str, Any]) -> None:
    """Check that the side that listens is told nothing that the other side says.

    Raises:
        ConfigError: It is.
    """
    for name in given:
        if name not in _LISTENING and ":" not in name:  # with a colon: options of security
            raise ConfigError(f"--{name.replace('_', '-')}", "is for the side that connects to say")


def address_of(option: str, text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Read HOST:PORT, or HOST where there is a default port.

    Raises:
        ConfigError: It is none.
    """
    match = _ADDRESS.fullmatch(text)
    port = None if match is None else default_port if match[2] is None else int(match[2])
    if match is None or port is None or port > 65535:
        form = "HOST:PORT" if default_port is None else "HOST or HOST:PORT"
        raise ConfigError(option, f"{text!r} is not {form}")
    return match[1].strip("[]"), port


def _num_tokens(given: Mapping[str, Any], token_bytes: int) -> int:
    if "tokens" in given:
        return int(given["tokens"])
    if "model" in given:
        if "bytes" in given:
            raise ConfigError("--bytes", "goes with --layout; of a model's KV --tokens says how much")
        return _MODEL_TOKENS
    num_bytes = parse_bytes(given["bytes"], field="--bytes") if "bytes" in given else _BYTES
    if num_bytes < token_bytes:
        raise ConfigError("--bytes", f"{num_bytes} is less than one token, {token_bytes}")
    return num_bytes // token_bytes


def _ranks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text, re.ASCII)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError("--tp", f"{text!r} is not P:D, two numbers of ranks as in 2:1")
    return int(match[1]), int(match[2])
