"""`twinpool complete` and `twinpool chat`: text in, text out as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from twinpool.cli.client import client_of
from twinpool.cluster.api_client import ApiClient
from twinpool.core.errors import ConfigError


def complete(args: argparse.Namespace) -> int:
    """Print the completion of one prompt."""
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt in (None, "-") else args.prompt
    if not prompt:
        raise ConfigError("prompt", "is empty")
    client = client_of(args)
    body = {"model": _model(client), "prompt": prompt, **_sampling(args)}
    _print(choice["text"] for choice in _choices(client, "/v1/completions", body))
    return 0


def chat(args: argparse.Namespace) -> int:
    """Answer one message, or every line of stdin until its end."""
    client = client_of(args)
    model = _model(client)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    for message in _messages(args.message):
        messages.append({"role": "user", "content": message})
        body = {"model": model, "messages": messages, **_sampling(args)}
        answer = _print(
            choice["delta"].get("content") or "" for choice in _choices(client, "/v1/chat/completions", body)
        )
        messages.append({"role": "assistant", "content": answer})
    return 0


def _messages(only: str | None) -> Iterator[str]:
    if only is not None:
        yield only
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("Say something; Ctrl-D ends.", file=sys.stderr)
    while True:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _model(client: ApiClient) -> str:
    return str(client.get("/v1/models")["data"][0]["id"])


def _choices(client: ApiClient, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    with client.stream(path, body) as stream:
        for chunk in stream.chunks:
            yield from chunk["choices"]


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "stop": args.stop,
    }
    return {name: value for name, value in given.items() if value is not None}


def _print(texts: Iterator[str]) -> str:
    """Print texts as they come and return them joined."""
    parts = []
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()
        parts.append(text)
    print(flush=True)
    return "".join(parts)
