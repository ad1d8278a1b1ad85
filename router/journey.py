"""One answer on its way through its attempts: what it has been through and how long it may still take."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from router.admission import Turn
from router.guard import Deadline, Guard, Watched
from router.tries import Tries
from twinpool.core.request import Request, TokenOutput
from twinpool.core.timeline import RequestTimeline


@dataclass(slots=True, kw_only=True)
class Journey:
    """One answer, over all its attempts."""

    timeline: RequestTimeline
    turn: Turn
    tries: Tries
    deadline: Deadline  # of the whole answer
    patience: Deadline  # of the current wait for room, refusals included

    def hand_over(self, request: Request) -> Request:
        """Return ``request`` as a worker gets it now, with the time that is left."""
        return replace(request, timeout_s=self.deadline.left_s())

    def guard(self, *watched: Watched) -> Guard:
        return Guard(*watched, timeout_s=self.deadline.left_s())


def continue_after(request: Request, sent: list[TokenOutput], *, timeout_s: float) -> Request:
    """Return the request of the next attempt: what was sent is part of it, and it has an id of its own."""
    attempt = request.continued(sent, request_id=uuid.uuid4().hex, timeout_s=timeout_s)
    if not sent:
        return attempt
    # The client has them; asking again would compute them for nothing and send them twice.
    return replace(attempt, sampling=replace(attempt.sampling, num_prompt_logprobs=None))
