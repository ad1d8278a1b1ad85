"""The request of one item of a workload, as it goes over the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.bench.target import Target
from twinpool.lab.bench.vocabulary import Vocabulary
from twinpool.lab.workload.item import WorkItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Makes requests of one run."""

    target: Target
    config: BenchConfig
    model: str
    vocabulary: Vocabulary
    run_id: str
    _fixed: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._fixed.update(
            {
                "model": self.model,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": self.config.temperature,
            }
        )
        if self.config.ignore_eos:
            self._fixed["ignore_eos"] = True

    def request_id(self, item: WorkItem) -> str:
        """Return what names a request in the server's own books."""
        return f"{self.run_id}-{item.index}"

    def request(self, item: WorkItem) -> bytes:
        """Return the whole request; the same item gives the same bytes but for the id of the run."""
        path = "/v1/chat/completions" if self.config.endpoint == "chat" else "/v1/completions"
        body = {**self._fixed, **self._asked(item), "max_tokens": item.output_tokens, **self.config.body}
        if item.tenant:
            body["user"] = item.tenant
        data = json.dumps(body, separators=(",", ":")).encode()
        return self.target.request("POST", path, data, request_id=self.request_id(item))

    def _asked(self, item: WorkItem) -> Mapping[str, Any]:
        if self.config.endpoint == "chat":
            return {"messages": [{"role": "user", "content": self.vocabulary.text(item)}]}
        return {"prompt": self.vocabulary.prompt(item)}
