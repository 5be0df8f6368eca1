"""The report's style sheet. Every rule is scoped to one class, so that the report can be embedded in another page."""

SCOPE = "strata-report"

# Text colors have a contrast ratio of at least 4.5 to their scheme's background and panel.
LIGHT = {
    "back": "#ffffff",
    "panel": "#f6f7f9",
    "line": "#e1e5ea",
    "ink": "#171b22",
    "muted": "#5a6472",
    "accent": "#2255c4",
    "raw": "#a9c0ee",
    "mark": "#b0450c",
    "good": "#0c7040",
    "bad": "#b3261e",
}
DARK = {
    "back": "#111419",
    "panel": "#191d24",
    "line": "#2b313b",
    "ink": "#e7eaef",
    "muted": "#9ca6b4",
    "accent": "#8ab0ff",
    "raw": "#3a5288",
    "mark": "#f2a66f",
    "good": "#5fd09a",
    "bad": "#ff8d84",
}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


_RULES = """
& { color-scheme: light dark; container-type: inline-size; box-sizing: border-box; max-width: 72rem; margin: 0 auto;
  padding: 2.5rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--back); color: var(--ink); text-align: left;
  font: 400 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
& *, & *::before { box-sizing: border-box; }
& h1, & h2, & h3, & p, & ul, & dl, & dd, & figure, & table { margin: 0; padding: 0; }
& h1, & h2, & h3 { color: inherit; font-weight: 600; line-height: 1.25; letter-spacing: -0.011em; }
& h1 { font-size: 28px; overflow-wrap: anywhere; }
& h2 { font-size: 19px; margin-bottom: 1rem; }
& h3 { font-size: 15px; letter-spacing: 0; }
& section { margin-top: 3rem; }
& code, & .text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
& code { font-size: 13px; overflow-wrap: anywhere; }
& .note { color: var(--muted); font-size: 13px; margin-top: 0.75rem; max-width: 46rem; }
& .problem { color: var(--bad); }

& .title { display: flex; flex-wrap: wrap; align-items: center; gap: 0.25rem 0.875rem; }
& .status { font-size: 13px; font-weight: 600; line-height: 1; padding: 0.375rem 0.625rem; border-radius: 999px;
  border: 1px solid currentcolor; }
& .complete { color: var(--good); }
& .incomplete { color: var(--bad); }
& .facts { color: var(--muted); margin-top: 0.5rem; overflow-wrap: anywhere; }
& .facts span { display: inline-block; max-width: 100%; }
& .facts span:not(:last-child)::after { content: "\\b7"; margin: 0 0.5em; }
& .tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; margin-top: 1.75rem; overflow: hidden;
  background: var(--line); border: 1px solid var(--line); border-radius: 10px; }
& .tiles > div { background: var(--back); padding: 1rem 1.125rem; }
& .tiles dt { color: var(--muted); font-size: 13px; }
& .tiles dd { font-size: 20px; font-weight: 600; line-height: 1.35; letter-spacing: -0.011em;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
& .tiles .key-result { grid-column: span 2; }
& .tiles .key-result dd { font-size: 28px; letter-spacing: -0.018em; }
& small { display: block; color: var(--muted); font-size: 13px; font-weight: 400; line-height: 1.4;
  letter-spacing: 0; }
& .better { color: var(--good); }
& .worse { color: var(--bad); }
& .arrow { color: var(--muted); font-weight: 400; }

& .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 2.25rem 2.5rem; }
& .chart { min-width: 0; }
& .wide { grid-column: 1 / -1; }
& figcaption { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem; }
& .unit { color: var(--muted); font-weight: 400; font-size: 13px; margin-left: 0.5em; }
& .last { font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums; }
& .legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.25rem; margin-top: 0.25rem; color: var(--muted);
  font-size: 13px; }
& .legend li { display: flex; align-items: center; gap: 0.5rem; }
& .key { display: inline-block; width: 1rem; border-top: 2px solid var(--accent); }
& .key.raw { border-color: var(--raw); }
& .key.mark { width: 9px; height: 9px; border: 0; border-radius: 50%; background: var(--mark); }
& .key.restart { width: 0; height: 13px; border-top: 0; border-left: 1px dashed var(--muted); }
& .chart > svg { display: block; overflow: visible; width: calc(100% - 4.25rem); height: 9.5rem;
  margin: 1rem 1rem 1.75rem 3.25rem; }
& .wide > svg { height: 15rem; }
& svg svg { overflow: visible; }
& svg text { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
& svg text.y { text-anchor: end; }
& svg text.x { text-anchor: middle; }
& svg .grid { stroke: var(--line); shape-rendering: crispEdges; }
& svg path { fill: none; vector-effect: non-scaling-stroke; stroke-width: 1.75px; stroke-linejoin: round;
  stroke-linecap: round; }
& svg .curve { stroke: var(--accent); }
& svg .raw { stroke: var(--raw); stroke-width: 1.25px; }
& svg .dots { stroke: var(--accent); stroke-width: 5px; }
& svg .mark { fill: var(--mark); stroke: var(--back); stroke-width: 2px; }
& svg .restart { stroke: var(--muted); stroke-dasharray: 3 3; }
& svg .target { stroke: transparent; stroke-width: 9px; }
& .band rect { fill: transparent; }
& .band line { stroke: var(--muted); visibility: hidden; }
& .band circle { fill: var(--accent); stroke: var(--back); stroke-width: 1.5px; visibility: hidden; }
& .band:hover line, & .band:hover circle { visibility: visible; }

& .tables { columns: 2 22rem; column-gap: 2.5rem; margin-top: 3rem; }
& .tables section { margin-top: 0; break-inside: avoid; }
& .tables section + section { margin-top: 3rem; }
& table { width: 100%; border-collapse: collapse; font-size: 14px; border: 0; }
& table + table { margin-top: 1.5rem; }
& th, & td { padding: 0.4375rem 1rem 0.4375rem 0; border: 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: baseline; font-weight: 400; overflow-wrap: anywhere; }
& thead th { color: var(--muted); font-size: 13px; overflow-wrap: normal; }
& th:last-child, & td:last-child { padding-right: 0; }
& tbody th { min-width: 10rem; }
& .short, & .number { overflow-wrap: normal; white-space: nowrap; }
& .number { text-align: right; font-variant-numeric: tabular-nums; }

& .sample { padding: 1.25rem 0; border-top: 1px solid var(--line); }
& .sample h3 { margin-bottom: 0.75rem; }
& .columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); gap: 1rem; }
& .columns > div { min-width: 0; }
& .columns h4 { margin: 0 0 0.375rem; color: var(--muted); font-size: 13px; font-weight: 400; line-height: 1.5; }
& .text { background: var(--panel); border-radius: 6px; padding: 0.625rem 0.75rem; font-size: 13px; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
& .text.after { box-shadow: inset 2px 0 var(--accent); }
& .empty { color: var(--muted); font-style: italic; }
& details { border-top: 1px solid var(--line); padding-top: 1rem; }
& summary { cursor: pointer; font-weight: 600; }
& summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 2px; }
& details > .text { margin-top: 1rem; }
@container (max-width: 34rem) {
  & h1 { font-size: 24px; }
  & .tiles { grid-template-columns: repeat(2, 1fr); }
  & .tiles > div { padding: 0.75rem 0.875rem; }
}
"""

STYLE = (
    f".{SCOPE}{{{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{.{SCOPE}{{{_variables(DARK)}}}}}" + _RULES.replace("&", f".{SCOPE}")
)

PAGE_STYLE = (
    f":root{{color-scheme:light dark}}body{{margin:0;background:{LIGHT['back']}}}"
    f"@media (prefers-color-scheme:dark){{body{{background:{DARK['back']}}}}}"
)
