"""`twinpool demo`: three prompts through two pools, then the same through one, token for token.

It runs `twinpool serve` as anybody would and talks to its HTTP API; it looks at nothing from the inside.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from twinpool.cluster.api_client import ApiClient
from twinpool.cluster.server_process import server_process
from twinpool.core.errors import ServingError, Unavailable

PROMPTS = (
    # Long enough to travel while it is computed.
    "Two kitchens run one restaurant. The first one only prepares: it reads each order to its end, washes, "
    "cuts and lays out all that the dish needs, and sends every bowl on as soon as it is filled. The second "
    "one only cooks: it takes one dish after the other from the bowls that are there, and never has to stop "
    "because somebody brings a long order. Each kitchen hires as many people as its own work needs. Why may "
    "the guests be served sooner than with one kitchen that does both?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about two friends who share the work.",
)
_STORY_LIMIT_S = 10.0


def run_demo(*, model: str | None, max_tokens: int) -> int:
    """Show the demo; return 0 only if every answer came and all tokens were equal.

    Args:
        model: What to serve; the default model if None.
        max_tokens: Of each answer.

    Raises:
        ServingError: A server did not start, answer or end.
    """
    console = Console(highlight=False, soft_wrap=True)
    # The same threads in both parts: sums of floats depend on how they are cut into pieces.
    options = ["--threads", str(max(1, (os.cpu_count() or 1) // 2))]
    options += [] if model is None else ["--model", model]
    console.print("[bold]1. Two pools: one prefill worker, one decode worker[/bold]")
    split: list[list[int]] = []
    with _server([*options, "--prefill", "1", "--decode", "1"], console) as client:
        for prompt in PROMPTS:
            console.print(f"\n[bold]> {prompt}[/bold]")
            ids, request_id, path = _answer(client, prompt, max_tokens, console)
            split.append(ids)
            console.print(_timeline(_story(client, request_id), path))
            if path != "disaggregated":
                raise Unavailable(f"the answer took the path {path}, not disaggregated")
    console.print("\n[bold]2. The same prompts, colocated: one worker does both[/bold]")
    quiet = Console(quiet=True)
    num_equal = 0
    with _server([*options, "--colocated", "1"], console) as client:
        for prompt, expected in zip(PROMPTS, split, strict=True):
            ids, _, _ = _answer(client, prompt, max_tokens, quiet)
            is_equal = ids == expected
            num_equal += is_equal
            verdict = "[green]equal[/green]" if is_equal else "[red]NOT EQUAL[/red]"
            console.print(f"> {prompt}\n  {len(ids)} token ids: {verdict}")
    console.print(
        f"\n{num_equal} of {len(PROMPTS)} answers have the same tokens in both ways; all is shut down."
    )
    return 0 if num_equal == len(PROMPTS) else 1


@contextmanager
def _server(options: list[str], console: Console) -> Iterator[ApiClient]:
    """Run `twinpool serve` until the block ends.

    Raises:
        Unavailable: It does not start, or does not end well.
    """
    started_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started_s:6.1f} s  {text}", style="dim", markup=False)

    with server_process(options, say=say) as url:
        yield ApiClient(url)


def _answer(client: ApiClient, prompt: str, max_tokens: int, console: Console) -> tuple[list[int], str, str]:
    """Show an answer while it is generated; return its token ids, its request's id and the path it took."""
    body = {
        "model": client.get("/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    ids: list[int] = []
    with client.stream("/v1/chat/completions", body) as stream:
        for chunk in stream.chunks:
            for choice in chunk["choices"]:
                ids += choice.get("token_ids", [])
                console.print(choice["delta"].get("content") or "", end="", markup=False)
    console.print()
    return ids, stream.headers["x-request-id"], stream.headers["x-twinpool-path"]


def _story(client: ApiClient, request_id: str) -> Mapping[str, Any]:
    """Return what happened to a request, once its last span is closed."""
    end_s = time.monotonic() + _STORY_LIMIT_S
    while True:
        story: Mapping[str, Any] = {}
        with contextlib.suppress(ServingError):
            story = client.get(f"/admin/requests/{request_id}")
        spans = story.get("spans", [])
        if spans and all(span["end_s"] is not None for span in spans):
            return story
        if time.monotonic() > end_s:
            return story
        time.sleep(0.05)


def _timeline(story: Mapping[str, Any], path: str) -> Table:
    """Return the story as a table, in the order in which things began."""
    table = Table("step", "start", "took", "detail", title=f"path: {path}", title_justify="left")
    rows = [(span["start_s"], span["name"], span["end_s"], _detail(span)) for span in story.get("spans", [])]
    rows += [
        (event["at_s"], event["name"].replace("_", " "), None, _detail(event))
        for event in story.get("events", [])
    ]
    for start_s, name, end_s, detail in sorted(rows, key=lambda row: row[0]):
        took = "" if end_s is None else f"{(end_s - start_s) * 1000:.0f} ms"
        table.add_row(name, f"{start_s * 1000:.0f} ms", took, detail)
    return table


def _detail(item: Mapping[str, Any]) -> str:
    known = {"name", "start_s", "end_s", "at_s"}
    details = {name: value for name, value in item.items() if name not in known and value not in (None, 0)}
    if "kv_bytes" in details:
        details = {"KV": f"{details.pop('kv_bytes') / 2**20:.2f} MiB", **details}
    return ", ".join(f"{name.removeprefix('num_')} {value}" for name, value in details.items())
