"""The style sheet of the HTML report: light and dark by the reader's setting."""

STYLE = """\
:root {
  --page: #f7f8fa; --card: #ffffff; --text: #1b1f24; --dim: #66707c; --edge: #dde2e8; --grid: #eceff3;
  --line: #1f6feb;
  --error: #c62828; --warning: #a86200; --info: #57789c; --ok: #1a7f4b; --code: #eef1f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #171c23; --text: #e4e8ee; --dim: #93a0ae; --edge: #2b333d; --grid: #232a33;
  --line: #6cb0ff;
    --error: #ff6b66; --warning: #f0b050; --info: #8fb3d9; --ok: #56c98a; --code: #222a34;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 16px 48px; }
main + main { border-top: 2px solid var(--edge); }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 8px; }
h3 { font-size: 16px; margin: 0 0 2px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.sub, .dim { color: var(--dim); }
.sub { font-size: 13.5px; }
.verdict, article, .curves {
  background: var(--card);
  border: 1px solid var(--edge);
  border-radius: 8px;
  padding: 14px 16px;
}
.verdict { margin: 16px 0; border-left: 5px solid var(--ok); font-size: 16px; }
.verdict.error { border-left-color: var(--error); }
.verdict.warning { border-left-color: var(--warning); }
.verdict.error > b { color: var(--error); }
.verdict.warning > b { color: var(--warning); }
.verdict.ok > b { color: var(--ok); }
article { margin: 0 0 14px; }
.chip {
  display: inline-block;
  padding: 0 8px;
  border-radius: 10px;
  font-size: 12.5px;
  border: 1px solid currentcolor;
}
.chip.error { color: var(--error); }
.chip.warning { color: var(--warning); }
.chip.info { color: var(--info); }
code {
  background: var(--code);
  padding: 1px 6px;
  border-radius: 4px;
  font: 13px/1.5 ui-monospace, monospace;
  overflow-wrap: anywhere;
}
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--dim); }
th, td {
  padding: 5px 10px 5px 0;
  border-bottom: 1px solid var(--edge);
  vertical-align: top;
  overflow-wrap: anywhere;
}
td.kind { white-space: nowrap; }
th.num, td.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; }
.suspects .who { width: 220px; }
.bar { height: 5px; margin-top: 5px; background: var(--grid); border-radius: 3px; }
.bar i { display: block; height: 5px; background: var(--line); border-radius: 3px; }
ul { margin: 0; padding: 0; list-style: none; }
ul.plain { font-size: 13.5px; }
li.for b { color: var(--ok); }
li.against b { color: var(--error); }
details { display: inline; font-size: 13px; color: var(--dim); }
summary { display: inline; cursor: pointer; text-decoration: underline dotted; }
svg { display: block; width: 100%; height: auto; margin: 4px 0; }
@media (max-width: 640px) { .curves, .zoom { overflow-x: auto; } svg { min-width: 600px; } }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
svg text.name {
  font-size: 12.5px;
  font-weight: 600;
  fill: var(--text);
  paint-order: stroke;
  stroke: var(--card);
  stroke-width: 4px;
}
.line { fill: none; stroke: var(--line); stroke-width: 1.4; stroke-linejoin: round; }
.dot { fill: var(--line); }
.grid { stroke: var(--grid); fill: none; }
.axis { stroke: var(--dim); fill: none; }
.nan { fill: var(--error); }
.nanmark { color: var(--error); }
.band { opacity: 0.22; }
.band.error, .key.error { fill: var(--error); background: var(--error); }
.band.warning, .key.warning { fill: var(--warning); background: var(--warning); }
.band.info, .key.info { fill: var(--info); background: var(--info); }
.band.attempt, .key.attempt { fill: var(--text); background: var(--text); }
.band.attempt { opacity: 0.35; }
.key {
  display: inline-block;
  width: 12px;
  height: 12px;
  border-radius: 3px;
  margin-left: 14px;
  vertical-align: -1px;
  opacity: 0.6;
}
.legend { font-size: 12.5px; margin: 2px 0 0 50px; }
.nanmark { margin-left: 14px; }
@media (max-width: 640px) { .suspects .who { width: 120px; } }
@media print { body { background: #fff; } article, .curves { break-inside: avoid; } }
"""
