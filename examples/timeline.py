"""Send one request and show where its time went; needs nothing but Python.

    twinpool serve                                        # in another terminal
    python examples/timeline.py "Once upon a time"

TWINPOOL_URL and TWINPOOL_API_KEY name another server and its key.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
import uuid
from typing import Any

URL = os.environ.get("TWINPOOL_URL", "http://127.0.0.1:8000")


def call(path: str, body: dict[str, Any] | None = None, *, request_id: str) -> Any:
    """GET a path, or POST a body to it; return the JSON."""
    headers = {
        "content-type": "application/json",
        "x-request-id": request_id,
        "authorization": f"Bearer {os.environ.get('TWINPOOL_API_KEY', 'none')}",
    }
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers), timeout=600) as answer:
        return json.load(answer)


def main() -> None:
    """Print the answer, then its spans and events in order."""
    prompt = " ".join(sys.argv[1:]) or "Once upon a time"
    request_id = f"timeline-{uuid.uuid4().hex}"
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0}
    print(call("/v1/completions", body, request_id=request_id)["choices"][0]["text"])

    found = call(f"/admin/requests/{request_id}", request_id=request_id)
    print(f"path {found['path']}, prefill {found['prefill_worker']}, decode {found['decode_worker']}")
    lines = [(span["start_s"], span["end_s"], span["name"]) for span in found["spans"]]
    lines += [(event["at_s"], event["at_s"], event["name"]) for event in found["events"]]
    for start_s, end_s, name in sorted(lines, key=lambda line: line[0]):
        took = "          " if end_s is None else f"{1000 * (end_s - start_s):7.1f} ms"
        print(f"{1000 * start_s:7.1f} ms  {took}  {name}")
    print(f"KV moved: {found['kv_bytes']} bytes; outcome: {found['outcome']}")


if __name__ == "__main__":
    main()
