"""The report as one page of HTML: no script, no network, light and dark, for a desktop and a phone."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.lab.study.figures.palette import style_sheet
from twinpool.lab.study.findings.words import Conclusion, listed, ms, rates_text
from twinpool.lab.study.pictures import Picture
from twinpool.lab.study.results import Results
from twinpool.lab.study.tables import Table, pools_table, requests_table

_NOT_TOLD = ("kind", "speed", "start_s")  # the kind stands first; the others are the study's own
# Title, kinds of conclusions, names of figures.
_PARTS = (
    ("Requests within the limits", ("goodput", "capacity"), ("goodput", "share")),
    ("Latencies", ("latency",), ("ttft", "tpot")),
    ("Pools, and the KV between them", ("pools", "transfer"), ("waterfall", "timeline")),
)
_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--surface);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:800px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:1.6rem;line-height:1.25;margin:.5em 0}
h2{font-size:1.15rem;margin:2.2em 0 .6em}
h3{font-size:1rem;margin:2em 0 .5em}
p,li,dd{overflow-wrap:anywhere}
.soft,figcaption,small{color:var(--soft)}
small{display:block;font-size:.85rem}
figure{margin:0}figcaption{font-size:.9rem;margin-top:.4em}
svg{display:block;width:100%;height:auto}svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif!important}
.narrow{display:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25em 1.2em;margin:1em 0}
dt{color:var(--soft)}dd{margin:0}
ul.told{padding-left:1.1em}ul.told li{margin:.7em 0}
.doubt{border-left:3px solid var(--series-1);padding-left:12px;margin:1em 0}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{color:var(--soft);font-weight:500;vertical-align:bottom;white-space:normal}
th:nth-child(2),td:nth-child(2){text-align:left}
tr.first td{border-top:2px solid var(--grid)}
pre{overflow-x:auto;font-size:.8rem;background:var(--heat-0);padding:12px;border-radius:6px}
summary{cursor:pointer;color:var(--soft)}
@media (max-width:640px){.wide{display:none}.narrow{display:block}main{padding:16px 14px 48px}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6em}}
"""


def page(results: Results, conclusions: Sequence[Conclusion], pictures: Sequence[Picture]) -> str:
    """Return the whole page."""
    title = f"{results.settings.workers} workers, divided {listed(results.arms)}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        _facts(results),
        *(_doubt(each) for each in conclusions if each.kind == "doubt"),
        *(
            _part(
                title,
                [each for each in conclusions if each.kind in kinds],
                [picture for picture in pictures if picture.name in names],
            )
            for title, kinds, names in _PARTS
        ),
        "<h2>Numbers</h2>",
        "<p class=soft>Latencies are means, over the repeats, of the percentile of each.</p>",
        _table(requests_table(results)),
        "<p class=soft>Tokens per second are those of one worker of the pool, over the time from the first "
        "request to the last answer.</p>",
        _table(pools_table(results)),
        "<h2>What differed between the arms</h2>",
        _differed(results),
        "<h2>How it was measured</h2>",
        _method(results),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Twinpool: {_text(title)}</title><style>{style_sheet()}{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _facts(results: Results) -> str:
    settings, first = results.settings, results.valid[0]
    machine: Mapping[str, Any] = first.bench["machine"]
    loads = [float(each.bench["load_before"]) for each in results.measurements]
    days = sorted({each.taken_at[:16].replace("T", " ") for each in results.measurements})
    limits = settings.bench.limits
    facts = {
        "Model": first.bench["server"]["model"],
        "Load": workload_text(settings.workload),
        "Limits": f"TTFT {ms(limits.ttft_s or 0.0)}, TPOT {ms(limits.tpot_s or 0.0)}; both must be met",
        "Rates": f"{rates_text(results.rates)}, {settings.cell_s:g} s each",
        "Measured": f"{len(results.measurements)} cells, {days[0]} to {days[-1]} UTC",
        "Machine": f"{machine['processor']}, {machine['cores']} cores; load average before a cell "
        f"{min(loads):.1f} to {max(loads):.1f}",
    }
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>"


def workload_text(workload: Mapping[str, Any]) -> str:
    """Return a workload as it is asked for, in one line."""
    rest = ", ".join(
        f"{key} {value}" for key, value in workload.items() if key not in _NOT_TOLD and value is not None
    )
    return f"{workload.get('kind', '')}: {rest}" if rest else str(workload.get("kind", ""))


def _doubt(conclusion: Conclusion) -> str:
    return f'<div class="doubt">{_text(conclusion.text)}<small>{_text(conclusion.evidence)}</small></div>'


def _part(title: str, conclusions: Sequence[Conclusion], pictures: Sequence[Picture]) -> str:
    rows = (f"<li>{_text(each.text)}<small>{_text(each.evidence)}</small></li>" for each in conclusions)
    told = f'<ul class="told">{"".join(rows)}</ul>' if conclusions else ""
    return f"<h2>{_text(title)}</h2>{told}{''.join(map(_figure, pictures))}"


def _figure(picture: Picture) -> str:
    return (
        f"<h3>{_text(picture.title)}</h3><figure>{picture.wide}{picture.narrow}"
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.columns)
    body, last = [], None
    for row in table.rows:
        start = "<tr>" if row[0] == last else '<tr class="first">'
        last = row[0]
        body.append(start + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>")
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def _differed(results: Results) -> str:
    allowed = results.settings.allowed
    also = f", and {listed(allowed)}, which were allowed to differ" if allowed else ""
    config = json.dumps(results.valid[0].config, indent=1)
    return (
        f"<p>The roles of the workers{_text(also)}. The other {results.num_settings} settings of each cell "
        f"were compared and are equal; cells of equal rate and repeat sent the same requests at the same "
        f"times.</p><details><summary>All settings of a cell</summary><pre>{_text(config)}</pre></details>"
    )


def _method(results: Results) -> str:
    return (
        f"<p>Every arm is made of the same running workers: they get other roles and forget their caches "
        f"between two cells. Arms take turns, {results.settings.repeats} times at each rate, with other "
        f"requests in each repeat. Requests are sent when they are due, whatever became of those before; "
        f"latencies count from then. A request is within the limits if it was answered and meets both. A "
        f"difference is claimed where the ranges of two arms, from their least repeat to their best, do not "
        f"overlap. A pool is busy while its engines are in a step.</p>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
