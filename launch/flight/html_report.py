"""The report of a job as one HTML page: a row a rank, late ranks, the use of time.

The page needs nothing else: no server, no network, no library. The picture is SVG whose parts
have labels for the pointer; a few lines of script zoom it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .diagnosis import duration
from .file import Record
from .stats import Stats, collective_rows, is_late, late_rows, rank_rows, reason_name
from .timeline import HOST_KINDS, Meeting, Timeline

# The picture holds so many parts at most; of more, those that took longest.
MOST_PARTS = 12_000
WIDTH = 1000.0
ROW = 44
HOST_HEIGHT = 12
TICKS = 10


def page(timeline: Timeline, stats: Stats) -> str:
    """The whole page."""
    parts, left_out = _chosen(timeline)
    shown = f" The {len(parts)} longest of {len(parts) + left_out} parts." if left_out else ""
    tables = "".join(
        f"<h2>{escape(title)}</h2>{_table(rows, number)}"
        for title, rows, number in (
            ("Who was late", late_rows(stats, 30), (2, 3, 4, 5)),
            ("Collectives, by waiting", collective_rows(stats, 30), range(2, 9)),
            ("Where each rank's time went", rank_rows(stats), range(2, 8)),
        )
        if len(rows) > 1
    )
    lost = f"<p>{stats.lost} records came too fast to be kept.</p>" if stats.lost else ""
    return _PAGE.format(
        title=escape(f"{len(timeline.ranks)} ranks, {duration(timeline.seconds)}"),
        headline=escape(stats.headline),
        legend=_LEGEND,
        labels=_labels(timeline),
        picture=_picture(timeline, parts),
        height=ROW * len(timeline.ranks),
        seconds=f"{timeline.seconds:.9f}",
        axis=_axis(timeline),
        shown=escape(shown),
        tables=tables,
        lost=lost,
        style=_STYLE,
        script=_SCRIPT,
    )


# ---- the picture -------------------------------------------------------------------------------


class _Part:
    """A rectangle: of a rank, from, to, its class, and its label."""

    __slots__ = ("begin", "end", "kind", "rank", "text")

    def __init__(self, rank: int, begin: float, end: float, kind: str, text: str):
        self.rank, self.begin, self.end, self.kind, self.text = rank, begin, end, kind, text


def _chosen(timeline: Timeline) -> tuple[list[_Part], int]:
    parts = list(_parts(timeline))
    left_out = max(0, len(parts) - MOST_PARTS)
    if left_out:
        parts.sort(key=lambda part: part.end - part.begin, reverse=True)
        parts = parts[:MOST_PARTS]
    # An outer span comes before its inner spans: it is drawn first.
    return sorted(parts, key=lambda part: (part.rank, part.begin, -part.end)), left_out


def _parts(timeline: Timeline) -> Iterator[_Part]:
    whole = timeline.seconds * 1e9
    for flight in timeline.ranks:
        for record in flight.records:
            if record.is_collective:
                continue
            begin = timeline.at(flight.rank, record.began)
            end = timeline.at(flight.rank, record.completed) if record.completed else whole
            kind = record.label.get("kind", "")
            name = kind if kind in ("compile", "trace", "program", "data", "wait") else "named"
            row = "host" if kind in HOST_KINDS else "run"
            text = f"{reason_name(record)}\n{_times(begin, end)}{_line(record)}"
            yield _Part(flight.rank, begin, end, f"{row} {name}", text)
    for meeting in timeline.meetings:
        yield from _meeting(timeline, meeting, whole)


def _meeting(timeline: Timeline, meeting: Meeting, whole: float) -> Iterator[_Part]:
    last, waits = meeting.last, meeting.waits
    late = is_late(meeting)
    row = "fly" if meeting.record.is_overlapped else "run"
    absent = meeting.members - len(meeting.came)
    for rank, came in meeting.came.items():
        left = meeting.left.get(rank, whole)
        arrived = min(came + waits[rank], left)
        said = f"{meeting.record.name}, call {meeting.call}{_line(meeting.record)}"
        if absent:
            said += f"\n{absent} of {meeting.members} ranks never came"
        elif rank != last:
            said += f"\nwaited {duration(waits[rank] / 1e9)} for rank {last}"
        elif late:
            said += f"\nlate by {duration(meeting.lateness / 1e9)}"
        if arrived > came and rank != last:
            yield _Part(rank, came, arrived, f"{row} wait", f"{said}\n{_times(came, arrived)}")
        begin = arrived if rank != last else came
        kind = f"{row} {'open' if rank not in meeting.left else 'move'}"
        yield _Part(rank, begin, left, kind, f"{said}\n{_times(came, left)}")
        if rank == last and late:
            earliest = min(meeting.came.values())
            yield _Part(rank, earliest, came, "late", f"{said}\n{_times(earliest, came)}")


def _times(begin: float, end: float) -> str:
    return f"{duration(max(end - begin, 0.0) / 1e9)} at {begin / 1e9:.6f} s"


def _line(record: Record) -> str:
    source = record.label.get("source", "")
    return f"\n{source}" if source else ""


def _picture(timeline: Timeline, parts: Sequence[_Part]) -> str:
    whole = max(timeline.seconds * 1e9, 1.0)
    row_of = {flight.rank: k for k, flight in enumerate(timeline.ranks)}
    drawn = []
    for part in parts:
        top = ROW * row_of[part.rank]
        row = part.kind.split()[0]
        y, height = {
            "host": (top + 2, HOST_HEIGHT),
            "run": (top + HOST_HEIGHT + 4, ROW - HOST_HEIGHT - 10),
            "fly": (top + ROW - 12, 6),  # in front of the program that goes on
            "late": (top + ROW - 5, 3),
        }[row]
        x = part.begin / whole * WIDTH
        width = max((part.end - part.begin) / whole * WIDTH, 0.02)
        drawn.append(
            f'<rect class="{part.kind}" x="{x:.4f}" y="{y}" width="{width:.4f}" '
            f'height="{height}"><title>{escape(part.text)}</title></rect>'
        )
    return "\n".join(drawn)


def _labels(timeline: Timeline) -> str:
    return "".join(
        f'<div class="rank" style="height:{ROW}px"><b>rank {f.rank}</b> {escape(f.host)}</div>'
        for f in timeline.ranks
    )


def _axis(timeline: Timeline) -> str:
    return "".join(
        f"<span>{duration(timeline.seconds * k / TICKS) if k else '0'}</span>"
        for k in range(TICKS + 1)
    )


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if k in right else ''}>{escape(cell)}</{tag}>"
            for k, cell in enumerate(cells)
        )

    head, *body = rows
    inside = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{inside}</tbody></table>"


_LEGEND = "".join(
    f'<span><i class="{kind}"></i>{text}</span>'
    for kind, text in (
        ("program", "program"),
        ("move", "collective"),
        ("wait", "waits for the last rank"),
        ("late", "late, others wait"),
        ("open", "never ended"),
        ("compile", "compiles"),
        ("trace", "traces"),
        ("data", "waits for data"),
        ("named", "named by the user"),
    )
)

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --faint: #6b7280; --line: #e3e6ea;
  --program: #b9c7dd; --move: #2f6fde; --wait: #f2b134; --late: #d33a2c; --compile: #8a63c9;
  --trace: #c3aee6; --data: #3aa76d; --named: #7d8894; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e8eb; --faint: #98a1ab;
  --line: #2c3239; --program: #46556b; --move: #6ea0ff; --wait: #d99a20; --late: #ff6b5c;
  --compile: #a988e0; --trace: #6d5a91; --data: #55c98b; --named: #8893a0; } }
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 1400px;
  padding: 0 1.5rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } .faint { color: var(--faint); font-size: .85rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .8rem 0; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin-right: .35rem; vertical-align: -1px; }
.chart { display: grid; grid-template-columns: max-content 1fr; column-gap: 1rem; }
.rank { display: flex; align-items: center; gap: .4rem; border-top: 1px solid var(--line); }
.plot { overflow: hidden; border-top: 1px solid var(--line); cursor: grab; }
svg { display: block; width: 100%; }
.axis { grid-column: 2; display: flex; justify-content: space-between; color: var(--faint);
  font-size: .75rem; border-top: 1px solid var(--line); }
rect:hover { stroke: var(--ink); stroke-width: 1px; vector-effect: non-scaling-stroke; }
.program { fill: var(--program); background: var(--program); }
.move { fill: var(--move); background: var(--move); }
.wait { fill: var(--wait); background: var(--wait); }
.late, .open { fill: var(--late); background: var(--late); }
.compile { fill: var(--compile); background: var(--compile); }
.trace { fill: var(--trace); background: var(--trace); }
.data { fill: var(--data); background: var(--data); }
.named { fill: var(--named); background: var(--named); }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--faint); font-weight: 600; }
td, th { padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line); }
.number { text-align: right; }
"""

_SCRIPT = """
const svg = document.querySelector("svg"), plot = document.querySelector(".plot");
const axis = [...document.querySelectorAll(".axis span")];
const whole = Number(svg.dataset.seconds), width = svg.viewBox.baseVal.width;
let from = 0, span = width, held = null;
function text(t) { return t < 1e-3 ? (t * 1e6).toFixed(1) + " µs"
  : t < 1 ? (t * 1e3).toFixed(2) + " ms" : t.toFixed(3) + " s"; }
function show() {
  from = Math.min(Math.max(from, 0), width - span);
  svg.setAttribute("viewBox", `${from} 0 ${span} ${svg.viewBox.baseVal.height}`);
  axis.forEach((tick, k) => {
    tick.textContent = text((from + span * k / (axis.length - 1)) / width * whole); });
}
plot.addEventListener("wheel", event => {
  event.preventDefault();
  const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / plot.clientWidth;
  const place = from + at * span;
  span = Math.min(width, Math.max(span * Math.exp(event.deltaY * 0.002), width * 1e-6));
  from = place - at * span; show();
}, { passive: false });
plot.addEventListener("pointerdown", event => { held = [event.clientX, from]; });
addEventListener("pointerup", () => { held = null; });
addEventListener("pointermove", event => {
  if (held) { from = held[1] - (event.clientX - held[0]) / plot.clientWidth * span; show(); } });
plot.addEventListener("dblclick", () => { from = 0; span = width; show(); });
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>spmd: {title}</title>
<style>{style}</style>
</head>
<body>
<h1>{headline}</h1>
<p class="faint">The wheel zooms, dragging moves, a double click shows all.{shown}</p>
{lost}
<div class="legend">{legend}</div>
<div class="chart"><div>{labels}</div>
<div class="plot">
<svg viewBox="0 0 1000 {height}" height="{height}" preserveAspectRatio="none" role="img"
 data-seconds="{seconds}">
{picture}
</svg></div>
<div class="axis">{axis}</div></div>
{tables}
<script>{script}</script>
</body>
</html>
"""
