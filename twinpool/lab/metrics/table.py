"""A summary as text for people: rows of latencies, and lines of what else it comes to."""

from __future__ import annotations

from twinpool.lab.metrics.summary import Summary

COLUMNS = ("ms", "mean", "p50", "p90", "p95", "p99", "max")
_NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "end to end",
    "queue_s": "queue",
    "normalised_s": "normalised",
    "late_s": "sent late",
}


def latency_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return name and milliseconds in the order of ``COLUMNS``, for each latency that is known."""
    rows = []
    for name, shown in _NAMES.items():
        values = getattr(summary, name)
        if len(values):
            numbers = (values.mean(), *values.percentiles((50, 90, 95, 99, 100)))
            rows.append((shown, *(f"{number * 1e3:,.2f}" for number in numbers if number is not None)))
    return rows


def outcome_lines(summary: Summary) -> list[str]:
    """Say in some lines how many were answered, how many tokens a second, and how many in time."""
    told = [f"{summary.num_answered:,} of {summary.num_requests:,} answered in {summary.duration_s:.1f} s"]
    if summary.errors:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in summary.errors.most_common())
        told[0] += f"; errors: {kinds}"
    if summary.duration_s > 0.0:
        rates = (summary.num_answered, summary.prompt_tokens, summary.output_tokens)
        requests, tokens_in, tokens_out = (amount / summary.duration_s for amount in rates)
        told.append(
            f"throughput: {requests:.2f} requests/s, {tokens_in:,.1f} tokens/s in, {tokens_out:,.1f} out"
        )
    if summary.cached_tokens:
        told.append(
            f"cached: {summary.cached_tokens / max(1, summary.prompt_tokens):.1%} of the prompts' tokens"
        )
    if summary.paths:
        told.append(f"paths: {', '.join(f'{path} {count:,}' for path, count in summary.paths.most_common())}")
    told += _goodput(summary)
    return told


def _goodput(summary: Summary) -> list[str]:
    limits = summary.limits
    asked = [
        f"{name} {limit * 1e3:g} ms"
        for name, limit in (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s))
        if limit is not None
    ]
    if not asked or summary.goodput_share is None:
        return []
    rate = "" if summary.goodput_rate is None else f", {summary.goodput_rate:.2f} requests/s"
    return [f"goodput: {summary.goodput_share:.1%} within {' and '.join(asked)}{rate}"]
