"""The x-window: which steps are on screen.

The app owns the window, not the chart: new data resets the zoom of a chart, so every chart is drawn with explicit
bounds. A window with an upper end is frozen; one without follows the run.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Steps `lo` to `hi`, both included."""

    lo: int
    hi: int

    @property
    def steps(self) -> int:
        return self.hi - self.lo + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the reader asked for: steps `first` to `last`, or the newest `tail` steps. None leaves that end open."""

    first: int | None = None
    last: int | None = None
    tail: int | None = None

    @property
    def follows(self) -> bool:
        """Whether new steps move the right edge."""
        return self.last is None

    def span(self, run: Span) -> Span:
        """The steps to draw of a run that holds `run`. Ends given in the wrong order are swapped."""
        last = run.hi if self.last is None else self.last
        if self.first is not None:
            first = self.first
        elif self.last is None and self.tail is not None:
            first = max(run.lo, run.hi - self.tail + 1)
        else:
            first = min(run.lo, last)
        return Span(lo=min(first, last), hi=max(first, last))

    def newer_steps(self, run: Span) -> int:
        """Steps of the run beyond the right edge of a frozen window."""
        return 0 if self.last is None else max(0, run.hi - self.last)


def around(onset: int, end: int | None, run: Span, *, margin: int = 150) -> Window:
    """A window that shows an incident with what came before it: at least `margin` steps on both sides."""
    last = onset if end is None else max(end, onset)
    side = max(margin, (last - onset) // 2)
    return Window(first=max(run.lo, onset - side), last=min(run.hi, last + side))
