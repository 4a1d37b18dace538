"""The style sheet of the report: one column on a phone, two on a desk, no split figures on paper."""

CSS = """
:root { color-scheme: light; --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa;
  --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 24px 64px; }
header { margin-bottom: 20px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p { margin: 0 0 10px; }
.facts { color: var(--soft); margin: 0; }
.facts span { white-space: nowrap; }
.facts span:not(:last-child)::after { content: " ·"; }
.notice { background: #fff8e1; border: 1px solid #e6c65c; border-radius: 8px; padding: 10px 14px; margin: 14px 0; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); }
.tile, figure, .box { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; border-top: 3px solid var(--accent); }
.tile .label { color: var(--soft); font-size: .85rem; }
.tile .value { font-size: 1.3rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile .detail { color: var(--soft); font-size: .85rem; line-height: 1.4; margin-top: 4px; }
.box { padding: 16px 18px; overflow-x: auto; }
.box > :last-child { margin-bottom: 0; }
.story { max-width: none; }
.story li { margin-bottom: 6px; max-width: 85ch; }
.story ul { margin: 0; padding-left: 1.2em; }
.plots { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 0; padding: 14px 16px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .88rem; line-height: 1.45; margin-top: 8px; }
sub { font-size: .8em; line-height: 0; }
table + h3 { margin-top: 24px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
td .meaning { display: block; color: var(--soft); font-size: .85rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85rem; }
code { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 12px 0 0; }
summary { cursor: pointer; font-weight: 600; }
.pair { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); align-items: start; }
@media screen and (max-width: 820px) {
  main { padding: 16px 12px 40px; }
  h1 { font-size: 1.4rem; }
  .plots, .pair { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 10px; }
  .tile { padding: 12px; }
  .tile:first-child { grid-column: 1 / -1; }
  .tile .value { font-size: 1.15rem; }
  figure { padding: 10px; }
}
@media print {
  html { font-size: 11px; }
  body { background: #fff; font-size: 1rem; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 20px; }
  .tile, figure, .box, tr { break-inside: avoid; }
  .box { overflow: visible; }
  h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; }
}
"""
