"""The page's style sheet: light and dark by the reader's setting, one column on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c1f24; --soft: #5b6470; --paper: #ffffff; --panel: #f5f6f8; --grid: #d9dde3; --link: #0b5cad;
  --mark: #ffe9a8; --warn: #8a4b00;
  --run0: #1668c1; --run1: #c2410c; --run2: #15803d; --run3: #9333ea; --run4: #a16207; --run5: #0e7490;
  --run6: #be185d; --run7: #52525b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e8eb; --soft: #a3acb8; --paper: #15181c; --panel: #1e2227; --grid: #3a414a; --link: #7cb7ff;
    --mark: #5c4a00; --warn: #ffb86b;
    --run0: #6cb0ff; --run1: #ff9a66; --run2: #5fd38a; --run3: #cf9bff; --run4: #e6c35c; --run5: #59cfe0;
    --run6: #ff8fc0; --run7: #b4bac2;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1240px; padding: 0 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.7rem; line-height: 1.2; margin: 24px 0 4px; }
h2 { font-size: 1.3rem; margin: 40px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 24px 0 6px; }
h4 { font-size: 0.95rem; margin: 12px 0 4px; font-weight: 600; }
p, ul { margin: 6px 0; max-width: 76ch; }
a { color: var(--link); }
nav a { margin-right: 14px; white-space: nowrap; }
.soft, figcaption, caption { color: var(--soft); font-size: 0.88rem; }
.problems { border-left: 3px solid var(--warn); padding: 4px 0 4px 12px; margin: 12px 0; }
.problems strong { color: var(--warn); }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.9rem; margin: 8px 0; }
caption { text-align: left; padding-bottom: 4px; }
th, td {
  text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: normal;
}
.runs td { min-width: 15ch; overflow-wrap: anywhere; }
thead th { border-bottom-color: var(--soft); }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--paper); max-width: 34vw; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.paper td, tr.paper th { color: var(--soft); font-style: italic; font-weight: 400; }
.grid, .maps { display: grid; gap: 20px 28px; align-items: start; }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); }
.maps { grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; min-width: 0; }
svg.plot { display: block; width: 100%; height: auto; }
svg.plot * { stroke-linejoin: round; stroke-linecap: butt; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; padding: 0; margin: 8px 0; }
.legend svg { vertical-align: middle; margin-right: 6px; }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; }
.sample { background: var(--panel); border-radius: 6px; padding: 10px 14px; margin: 12px 0; }
.sample dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 14px; margin: 0; }
.sample dt { color: var(--soft); font-size: 0.88rem; padding-top: 1px; max-width: 22ch; }
.sample dd { margin: 0; }
mark {
  background: var(--mark); color: inherit; border-radius: 2px; padding: 0 2px; text-decoration: underline;
  text-underline-offset: 3px;
}
@media (max-width: 640px) {
  .sample dl { grid-template-columns: 1fr; gap: 0; }
  .sample dt { padding-top: 6px; max-width: none; }
}
"""
