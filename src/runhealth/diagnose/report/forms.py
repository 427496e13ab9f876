"""One door to all forms of the report."""

import json
import time
from collections.abc import Sequence

from runhealth.diagnose.findings import Report
from runhealth.diagnose.report import json as json_report
from runhealth.diagnose.report.plain import Style, stdout_style


def render(reports: Sequence[Report], form: str, *, several: bool, to_file: bool) -> str:
    """`several`: more than one path was asked for, so the JSON is an array even if one could be read."""
    if form == "json":
        if not several:
            return json_report.render(reports[0])
        return json.dumps([json_report.report_json(report) for report in reports], indent=2, allow_nan=False) + "\n"
    if form == "markdown":
        from runhealth.diagnose.report.markdown import render as render_markdown

        return "\n".join(render_markdown(report) for report in reports)
    if form == "html":
        from runhealth.diagnose.report.html import render as render_html

        return render_html(reports)
    if form == "sarif":
        from runhealth.diagnose.report.sarif import render as render_sarif

        return render_sarif(reports)
    if form == "junit":
        from runhealth.diagnose.report.junit import render as render_junit

        return render_junit(reports)
    from runhealth.diagnose.report.text import render as render_text

    style = Style(colour=False, unicode=True) if to_file else stdout_style()
    return "\n".join(render_text(report, style, now_ns=time.time_ns()) for report in reports)
