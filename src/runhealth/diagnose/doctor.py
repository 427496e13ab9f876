"""What can be seen in a run or log, what cannot, and what each missing signal would tell."""

from collections.abc import Collection

from runhealth.diagnose.report.plain import Style, safe
from runhealth.diagnose.suspect import load_suspects
from runhealth.storage.records import SourceInfo
from runhealth.storage.signals import BATCH_SIGNALS, STEP_SIGNALS


def render(info: SourceInfo, signals: Collection[str], style: Style) -> str:
    known = set(signals)
    yes, no = ("✓", "–") if style.unicode else ("yes", "no ")
    lines = [f"{safe(info.name)}  {safe(info.format)}  {info.rows_kept:,} of {info.rows_read:,} rows kept"]
    lines.extend(f"  line {rejected.line}: {safe(rejected.why)}" for rejected in info.rejected[:5])
    lines.extend(f"  note: {safe(note)}" for note in info.notes[:5])
    lines += ["", "Recorded"]
    free = sorted(s for s in known if s not in STEP_SIGNALS and s not in BATCH_SIGNALS and not s.startswith("layer."))
    named = [s for s in (*STEP_SIGNALS, *BATCH_SIGNALS) if s in known]
    lines.extend(f"  {yes} {name}" for name in named)
    layer = sorted(s for s in known if s.startswith("layer."))
    if layer:
        lines.append(f"  {yes} {safe(', '.join(layer))}")
    if free:
        lines.append(f"  {yes} not in the catalogue, kept and shown: {safe(', '.join(free[:20]))}")
    lines += ["", "Not recorded: it would tell"]
    for name, signal in {**STEP_SIGNALS, **BATCH_SIGNALS}.items():
        if name not in known and signal.would_tell:
            lines.append(f"  {no} {name}: {signal.would_tell}")
    lines += ["", "Suspects"]
    for suspect in load_suspects():
        needs = suspect.needs
        absent = [s for s in needs.all if s not in known]
        if needs.any and not any(s in known for s in needs.any):
            absent.append(f"one of {', '.join(needs.any)}")
        state = f"{no} {suspect.name}: cannot look, needs {', '.join(absent)}" if absent else f"{yes} {suspect.name}"
        partly = [s for s in needs.optional if s not in known]
        if not absent and partly:
            state += f" (would see more with {', '.join(partly)})"
        lines.append(f"  {state}")
    return "\n".join(lines) + "\n"
