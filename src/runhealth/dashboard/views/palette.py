"""Colours that work on the light and on the dark background of Streamlit."""

from dataclasses import dataclass
from typing import Any

from runhealth.diagnose.findings import Severity

Spec = dict[str, Any]  # an ECharts option object


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Hex colours. `cold` and `hot` end the heat map's scale, `neutral` is its middle."""

    lines: tuple[str, ...]
    faint: str
    error: str
    warning: str
    info: str
    good: str
    bad_value: str  # NaN and Inf
    text: str
    muted: str
    grid: str
    cold: str
    neutral: str
    hot: str

    def severity(self, severity: Severity) -> str:
        return {Severity.ERROR: self.error, Severity.WARNING: self.warning, Severity.INFO: self.info}[severity]


LIGHT = Palette(
    lines=("#2563eb", "#7c3aed", "#0f766e", "#b45309"),
    faint="#9ca3af",
    error="#c81e1e",
    warning="#b45309",
    info="#1d6fb8",
    good="#15803d",
    bad_value="#c026d3",
    text="#1f2937",
    muted="#5b6472",
    grid="#e5e7eb",
    cold="#2563eb",
    neutral="#f3f4f6",
    hot="#dc2626",
)
DARK = Palette(
    lines=("#60a5fa", "#a78bfa", "#2dd4bf", "#f59e0b"),
    faint="#6b7280",
    error="#f87171",
    warning="#fbbf24",
    info="#60a5fa",
    good="#4ade80",
    bad_value="#e879f9",
    text="#e5e7eb",
    muted="#9aa4b2",
    grid="#2b3140",
    cold="#60a5fa",
    neutral="#1f2430",
    hot="#f87171",
)


def palette(theme: str | None) -> Palette:
    """The palette of a theme type as Streamlit names it: `light` or `dark`."""
    return DARK if theme == "dark" else LIGHT
