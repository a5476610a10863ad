"""The style of a report: dark on light, one column on a phone."""

STYLE = """
:root { color-scheme: light; --ink: #1a1d23; --soft: #565c67; --rule: #dfe2e7; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 14px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2, summary { font-size: 17px; font-weight: 700; margin: 0 0 8px; }
summary { cursor: pointer; margin: 0; }
.status { border-radius: 99px; padding: 2px 12px; font-size: 14px; font-weight: 600; }
.status.good { background: #d8f0e3; color: #0b5a37; }
.status.bad { background: #fbdcdc; color: #8c1420; }
.status.wait { background: #fdeccb; color: #714a00; }
.message { flex-basis: 100%; margin: 4px 0 0; color: #8c1420; }
.facts { margin: 6px 0 16px; color: var(--soft); overflow-wrap: anywhere; }
.note { color: var(--soft); margin: 6px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin-bottom: 16px; }
.tiles div, figure, section:not(.tiles):not(.charts) { background: #fff; border: 1px solid var(--rule);
  border-radius: 8px; }
.tiles div { padding: 10px 14px; }
.tiles strong { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
section:not(.tiles):not(.charts) { margin-top: 16px; padding: 14px 16px; }
figure { margin: 0; padding: 12px 14px 8px; min-width: 0; }
figcaption { font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 6px; padding: 0;
  font-size: 13px; min-height: 20px; }
.legend i { display: inline-block; width: 20px; margin-right: 6px; vertical-align: middle;
  border-top: 2.5px solid currentColor; }
.legend i.dashed { border-top-style: dashed; }
.legend i.tick { width: 0; border: 5px solid transparent; border-top-width: 0; border-bottom: 9px solid; }
svg { display: block; width: 100%; height: auto; }
svg.narrow { display: none; }
svg text { font-size: 12px; fill: #33383f; font-variant-numeric: tabular-nums; }
svg text.unit { fill: #565c67; }
.grid { stroke: #e6e8ec; } .axis { stroke: #7b818c; } .grid, .axis { fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.range { opacity: .18; stroke: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 3px 18px 3px 0; border-bottom: 1px solid #eef0f3; vertical-align: top; }
@media (max-width: 540px) {
  main { padding: 14px 10px 32px; }
  h1 { font-size: 20px; }
  svg.wide { display: none; } svg.narrow { display: block; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 8px; }
}
@media print { body { background: #fff; } figure, section { break-inside: avoid; } }
""".strip()
