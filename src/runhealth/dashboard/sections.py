"""The parts of a page, from data to Streamlit elements. What they show is built by the pure functions of `views`."""

import streamlit as st

from runhealth.dashboard.controls import set_window, use_selection
from runhealth.dashboard.live import HEAT_BUCKETS, LiveRun, Snapshot
from runhealth.dashboard.queries import HEAT_METRICS, Progress
from runhealth.dashboard.views import curves, findings, heatmap, overview
from runhealth.dashboard.views.palette import Palette
from runhealth.dashboard.views.states import EmptyState, state_html
from runhealth.dashboard.views.text import markdown
from runhealth.dashboard.views.verdict import Verdict, ranked, superseded_by, verdict_html
from runhealth.dashboard.window import Span, Window, around
from runhealth.diagnose.findings import Report
from runhealth.diagnose.report import markdown as report_markdown

MOST_FINDINGS = 20


def page_style() -> None:
    """Less empty space above the verdict than a page usually has, and no fading while a redraw is under way: on a page
    that redraws itself every two seconds it would be a flicker."""
    st.html(
        "<style>[data-testid=stMainBlockContainer]{padding-top:2.6rem;padding-bottom:3rem}"
        "[data-stale=true]{opacity:1!important;transition:none!important}</style>"
    )


def empty(state: EmptyState, colours: Palette) -> None:
    st.html(state_html(state, colours))
    st.code(state.action, language="bash")


def overview_strip(live: LiveRun, progress: Progress, span: Span, colours: Palette) -> None:
    """The whole run's loss; dragging across it sets the window."""
    points = live.strip(progress)
    if points is None or not points.height:
        return
    # a new key when the window moves: the drag that moved it is then over, and the strip shows the window instead
    key = f"strip-{live.name}-{span.lo}-{span.hi}"
    st.vega_lite_chart(
        overview.overview_data(points), overview.overview(progress.span, span, colours), width="stretch",
        height=overview.HEIGHT_PX + 26, key=key, on_select=lambda: use_selection(key),
        selection_mode=[overview.SELECTION],
    )  # fmt: skip
    st.caption("Drag across the strip to choose a window. Charts keep every extreme and every non-finite step.")


def bar(shown: Verdict, colours: Palette, *, diagnosing: bool, problem: str) -> None:
    left, right = st.columns([3, 1.35], vertical_alignment="center")
    left.html(verdict_html(shown, colours, diagnosing=diagnosing, problem=problem))
    with right:
        st.caption("Next")
        st.code(shown.action, language="bash", wrap_lines=True)


def new_steps(count: int) -> bool:
    """The way back from a frozen window to the newest steps."""
    return count > 0 and st.button(
        f"+{count:,} newer steps: follow", key="follow", on_click=set_window, args=(Window(),)
    )


def charts(snapshot: Snapshot, report: Report | None, attempt: int | None, colours: Palette) -> None:
    if not snapshot.points:
        st.info(
            f"Nothing is recorded between steps {snapshot.span.lo:,} and {snapshot.span.hi:,}. Clear the step fields."
        )
        return
    attempts = snapshot.progress.attempts
    spec = curves.curves(
        snapshot.points, snapshot.span, attempts=attempts, findings=ranked(report, attempts),
        checkpoints=snapshot.checkpoints, palette=colours, attempt=attempt,
    )  # fmt: skip
    st.echarts_chart(
        spec, height=curves.height_px(len(snapshot.points)), key="curves",
        alt=f"{', '.join(snapshot.points)} over steps {snapshot.span.lo:,} to {snapshot.span.hi:,}",
    )  # fmt: skip
    st.html(curves.legend_html(snapshot.points, colours))
    missing = [panel.signal for panel in curves.PANELS if panel.signal not in snapshot.points]
    if missing:
        st.caption("Not recorded here: " + ", ".join(markdown(signal) for signal in missing))


def heat(live: LiveRun, snapshot: Snapshot, attempt: int | None, colours: Palette) -> None:
    st.subheader("Ranks", anchor=False)
    if len(snapshot.progress.ranks) < 2:
        st.caption("One rank writes telemetry: there is nothing to compare it with.")
        return
    if not snapshot.heat_metrics:
        st.caption("No per-rank times, losses or gradient norms are recorded. They would tell which rank is off.")
        return
    if st.session_state.get("heat") not in (None, *snapshot.heat_metrics):
        del st.session_state["heat"]
    metric = st.radio(
        "Deviation from the median of the ranks at each step", snapshot.heat_metrics, key="heat", bind="query-params",
        format_func=lambda metric: HEAT_METRICS[metric][0], horizontal=True,
    )  # fmt: skip
    ranks = snapshot.progress.ranks
    cells = live.heat(snapshot, metric, attempt)
    spec = heatmap.heatmap(cells, metric, snapshot.span, ranks=ranks, buckets=HEAT_BUCKETS, palette=colours)
    st.echarts_chart(
        spec, height=heatmap.height_px(len(ranks)), key="heatmap",
        alt=f"{HEAT_METRICS[metric][0]} of {len(ranks)} ranks as deviation from their median",
    )  # fmt: skip


def finding_list(report: Report | None, progress: Progress, colours: Palette) -> bool:
    """Draws the findings; true when the window was moved to one of them."""
    st.subheader("Findings", anchor=False)
    every = ranked(report, progress.attempts)
    moved = False
    if not every:
        st.caption("None." if report is not None else "No report yet.")
    for position, finding in enumerate(every[:MOST_FINDINGS]):
        label = f"{finding.severity.value}: {markdown(findings.title(finding))}"
        later = superseded_by(finding, progress.attempts)
        if later is not None:
            label += f" (attempt {later} went back behind it)"
        with st.expander(label, expanded=position == 0, key=f"finding-{finding.id}"):
            st.html(findings.facts_html(finding))
            table = findings.suspects_html(finding, colours)
            if table:
                st.html(table)
            moved |= st.button(
                "Show these steps", key=f"show-{finding.id}", on_click=set_window,
                args=(around(finding.onset_step, finding.end_step, progress.span),),
            )  # fmt: skip
    if len(every) > MOST_FINDINGS:
        st.caption(f"And {len(every) - MOST_FINDINGS} more: the command at the top prints all of them.")
    return moved


def exports(live: LiveRun, snapshot: Snapshot, report: Report | None, attempt: int | None) -> None:
    span = snapshot.span
    left, right, _ = st.columns([1, 1, 2])
    left.download_button(
        "Window as CSV", data=lambda: live.csv(span, attempt), file_name=f"{live.name}-{span.lo}-{span.hi}.csv",
        mime="text/csv", key="csv", on_click="ignore", width="stretch", help="Every recorded row, not thinned.",
    )  # fmt: skip
    if report is not None:
        right.download_button(
            "Report as Markdown", data=lambda: report_markdown.render(report),
            file_name=f"{live.name}.md", mime="text/markdown", key="markdown", on_click="ignore", width="stretch",
        )  # fmt: skip
