"""The value of ``x-twinpool-path``: how an answer was made, and what happened on the way.

    value = path *( "; " note )
    path  = "disaggregated" / "local" / "colocated"
    note  = ( "retried" / "recomputed" / "fallback" / "failed" ) "=" reason
    reason = 1*( ALPHA / "_" )              a class of twinpool/core/errors.py, or why there was a fallback

Notes stand in the order in which they came true, each once; ``failed`` is the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.core.timeline import RequestTimeline

_NOTES = {"retry": "retried", "recompute": "recomputed", "fallback": "fallback"}  # by the timeline's event


def path_header(timelines: Sequence[RequestTimeline], *, error: Exception | None) -> str | None:
    """Return the value for the first of some choices that was placed on workers; None if none was.

    Args:
        timelines: Of the choices of one answer, as far as they have come.
        error: What the client is told instead of an answer.
    """
    placed = next((timeline for timeline in timelines if timeline.path is not None), None)
    if placed is None or placed.path is None:
        return None
    told = [(_NOTES[event.name], event.detail["reason"]) for event in placed.events if event.name in _NOTES]
    recomputed = {reason for note, reason in told if note == "recomputed"}
    notes = [f"{note}={reason}" for note, reason in told if not (note == "retried" and reason in recomputed)]
    if error is not None:
        notes.append(f"failed={type(error).__name__}")
    return "; ".join([placed.path, *dict.fromkeys(notes)])
