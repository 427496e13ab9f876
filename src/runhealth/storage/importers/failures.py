"""Lines that say how a job failed: tracebacks, out of memory, collectives that time out, ranks that die.

What torch.distributed, torchrun, Slurm and the kernel print is told apart by its cause. Every final failure becomes one
`exception` event with `data["cause"]`; beside it, where a cause is known, an event of the kind that names it: `hang`,
`dead_rank` or `out_of_memory`. `data["ranks"]` lists the ranks that are at fault, as far as the lines tell.
"""

import re
from dataclasses import dataclass, field

from runhealth.storage.importers.base import Mark
from runhealth.storage.records import EventKind

# Most lines are not about failures: one look for these words decides.
_HINT = re.compile(
    r"rror|xcept|emory|oom|OOM|ime[d]?[- ]?[Oo]ut|TIME|atchdog|NCCL|nccl|ignal|SIG|exit|code|onnection|CANCEL|Xid|ECC"
    r"|bus|FAIL|fail|raceback|[Rr]ank|EXHAUST|ALLOC|alloc|Interrupt|Kill|kill|host|dead|lost|Root"
)
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Fault)\b")
_SECONDARY = re.compile(
    r"ChildFailedError|SignalException|DistBackendError|DistNetworkError|Connection (?:reset|closed)|Broken pipe"
)
_TORCHRUN = re.compile(r"\s*(?P<key>rank|exitcode|traceback|host)\s*:\s*(?P<value>.+?)\s*\Z")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_FAILED_RANK = re.compile(r"failed \(exitcode: (?P<code>-?\d{1,4})\) local_rank: (?P<rank>\d{1,6})")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA (?:error: )?out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED"
    r"|can't allocate memory|Out of memory: Kill|oom[-_]kill|OUT_OF_MEMORY|MemoryError"
)
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: (?P<work>Work\w*\([^)\n]{0,300}\)?[^)\n]{0,80}\)?)"
    r"(?:.{0,40}?ran for (?P<ms>\d{1,12}) milliseconds)?"
)
_HANG = re.compile(
    r"Watchdog caught collective operation timeout|watchdog got stuck for \d+ seconds|operations have failed or timed "
    r"out|Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation|collective operation timeout|Timeout at NCCL work"
    r"|failed to pass monitoredBarrier in|heartbeat monitor timed out|store->get\(.{0,200}?timeout|Socket Timeout",
    re.I,
)
_WORK = re.compile(r"(?P<key>SeqNum|OpType|Timeout\(ms\))=(?P<value>\w{1,30})")
_LAST_WORK = re.compile(
    r"Timeout at NCCL work: (?P<at>\d{1,18}), last enqueued NCCL work: (?P<put>\d{1,18}), "
    r"last completed NCCL work: (?P<done>\d{1,18})"
)
_RANK = re.compile(r"\[(?:[^\[\]]{0,120}?\b)?rank ?(?P<rank>\d{1,6})\]|\brank[ :=]+(?P<plain>\d{1,6})\b", re.I)
_MISSING_RANK = re.compile(r"[Rr]anks? (?P<ranks>[\d, ]{1,200}?) failed to pass monitoredBarrier")
_DEAD = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|remote process exit|exitcode\s*:\s*-(?:9|7|11)\b"
    r"|Signal (?:9|7|11) \(SIG|killed by signal|fallen off the bus|uncorrectable ECC|NVRM: Xid"
    r"|Rank \d+ (?:is dead|has exited|was lost)|node failure|NODE_FAIL|heartbeat timeout",
    re.I,
)
_CANCELLED = re.compile(
    r"slurmstepd: error: \*\*\* .*CANCELLED|received SIGTERM, exiting|DUE TO TIME LIMIT|got signal: (?:15|2)\b"
)
_LOG_PREFIX = re.compile(r"\A(?:\[?(?:default|rank)?\d{0,6}\]?:\s?)?(?P<text>[A-Za-z_][\w.]*(?:Error|Exception)\b: .+)")
_WORK_NAMES = {"SeqNum": "seq", "OpType": "op", "Timeout(ms)": "timeout_ms"}
# Frames of a C++ stack name functions, not what happened; warnings and notices of torch's C++ parts are no failures.
_NOISE = re.compile(r"\s*frame #\d+:|\[[WI]\d{3,4} \d\d:|\[[WI] [\w.]+:\d+\]|[WI]\d{4} \d\d:\d\d:.*?\.cpp:\d+\]")
_MAX_CHARS = 2000
_MAX_RANKS = 100_000


@dataclass(slots=True)
class _Failure:
    """What the lines since the last measurement say."""

    message: str = ""
    line: int = 0
    rank: int | None = None
    strength: int = 0  # how much the message explains: 1 a follow-up error, 2 the last line of a traceback
    causes: dict[str, tuple[int, str]] = field(default_factory=dict)  # cause: (line, text)
    ranks: dict[str, set[int]] = field(default_factory=dict)  # cause: ranks at fault
    waiting: dict[int, int] = field(default_factory=dict)  # rank that waits: the last work that it put in
    data: dict[str, object] = field(default_factory=dict)


def may_tell_failure(line: str) -> bool:
    """Whether a line has one of the words without which it tells of no failure, unless it goes on with one."""
    return _HINT.search(line[:_MAX_CHARS]) is not None


class FailureReader:
    """Feed it the lines that hold no measurement; ask for the marks when training goes on or the log ends."""

    def __init__(self) -> None:
        self._failure: _Failure | None = None
        self._cancelled: Mark | None = None
        self._in_traceback = False
        self._root_cause = False
        self._torchrun: dict[str, str] = {}

    @property
    def ended(self) -> bool:
        """Whether something was met that may have ended the training."""
        return self._failure is not None or self._cancelled is not None

    @property
    def busy(self) -> bool:
        """Whether what the next line means depends on those before it."""
        return self.ended or self._in_traceback

    @property
    def line(self) -> int:
        """The line of the failure."""
        return self._failure.line if self._failure is not None else 0

    @property
    def exited(self) -> bool:
        """Whether a process is known to have ended: what follows is another attempt."""
        return self._failure is not None and "exitcode" in self._failure.data

    def feed(self, line: str, number: int, rank: int | None) -> bool:
        """Take one line; say whether it was about a failure."""
        text = line[:_MAX_CHARS]
        if not self._in_traceback and _HINT.search(text) is None:
            return False
        if _NOISE.match(text):
            return True
        if self._in_traceback:
            if text[:1] in (" ", "\t", "", "|", "+"):
                return True
            self._in_traceback = False
            if self._is_cancelled(text, number):
                return True
            if _EXCEPTION.match(text) or ": " in text:
                self._explain(text, number, rank, 1 if _SECONDARY.search(text) else 2)
                self._causes(text, number, rank)
                return True
        if _TRACEBACK in text:
            self._in_traceback = True
            return True
        if self._failure is not None:
            if _ROOT_CAUSE in text:
                self._root_cause = True
                self._torchrun.clear()
                return True
            if match := _TORCHRUN.match(text):
                self._from_torchrun(match["key"], match["value"], number)
                return True
        if self._causes(text, number, rank):
            return True
        if match := _FAILED_RANK.search(text):
            failure = self._explain(text, number, int(match["rank"]), 1)
            failure.data.setdefault("exitcode", match["code"])
            return True
        if self._is_cancelled(text, number):
            return True
        if match := _LOG_PREFIX.match(text):
            self._explain(match["text"], number, rank, 2)
            return True
        return False

    def _is_cancelled(self, text: str, number: int) -> bool:
        if _CANCELLED.search(text) is None:
            return False
        self._cancelled = Mark(line=number, kind=EventKind.ATTEMPT_END, message=text.strip()[:300])
        return True

    def take(self) -> list[Mark]:
        """The marks of what was met, and a fresh start."""
        failure, cancelled = self._failure, self._cancelled
        self._failure = self._cancelled = None
        self._root_cause = self._in_traceback = False
        self._torchrun.clear()
        if failure is None:
            return [cancelled] if cancelled is not None else []
        if cancelled is not None and failure.strength < 2 and not failure.causes:
            return [cancelled]  # the errors are what is left of a job that was told to end
        return _marks(failure)

    def _explain(self, text: str, number: int, rank: int | None, strength: int) -> _Failure:
        failure = self._failure
        if failure is None:
            failure = self._failure = _Failure()
        # Of equally good ones the first is the cause; but within one process the last of chained exceptions counts.
        same = rank == failure.rank
        if strength > failure.strength or (strength == failure.strength and same):
            failure.message, failure.line, failure.strength = text.strip()[:500], number, strength
            failure.rank = rank
        return failure

    def _causes(self, text: str, number: int, rank: int | None) -> bool:
        cause = (
            "out_of_memory"
            if _OUT_OF_MEMORY.search(text)
            else "hang"
            if _HANG.search(text)
            else "dead_rank"
            if _DEAD.search(text)
            else None
        )
        if cause is None:
            return False
        failure = self._explain(text, number, rank, 0 if cause == "hang" else 1)
        if not failure.message:
            failure.message, failure.line, failure.rank = text.strip()[:500], number, rank
        failure.causes.setdefault(cause, (number, text.strip()[:500]))
        at = rank
        if at is None and (match := _RANK.search(text)):
            at = int(match["rank"] or match["plain"])
        if cause == "hang":
            self._hang(failure, text, at)
        elif at is not None:
            failure.ranks.setdefault(cause, set()).add(at)
        return True

    def _hang(self, failure: _Failure, text: str, rank: int | None) -> None:
        if rank is not None and len(failure.waiting) < _MAX_RANKS:
            failure.waiting.setdefault(rank, -1)
        if match := _WATCHDOG.search(text):
            for part in _WORK.finditer(match["work"]):
                failure.data.setdefault(_WORK_NAMES[part["key"]], part["value"])
            if match["ms"]:
                failure.data.setdefault("waited_s", int(match["ms"]) / 1000)
        if (match := _LAST_WORK.search(text)) and rank is not None:
            failure.waiting[rank] = int(match["put"])
        if match := _MISSING_RANK.search(text):
            missing = {int(part) for part in re.findall(r"\d{1,6}", match["ranks"])}
            failure.ranks.setdefault("hang", set()).update(missing)

    def _from_torchrun(self, key: str, value: str, number: int) -> None:
        assert self._failure is not None
        data = self._failure.data
        if key == "rank":
            self._torchrun.clear()
        self._torchrun[key] = value[:200]
        if self._root_cause or key not in data:
            data[key] = value[:200]
        if key == "exitcode" and re.match(r"-(?:9|7|11)\b", value):
            rank = re.match(r"\d{1,6}", self._torchrun.get("rank", ""))
            self._failure.causes.setdefault("dead_rank", (number, f"exit code {value}"))
            if rank is not None:
                self._failure.ranks.setdefault("dead_rank", set()).add(int(rank[0]))


def _marks(failure: _Failure) -> list[Mark]:
    marks = []
    cause = "out_of_memory" if "out_of_memory" in failure.causes else None
    if cause is None and failure.causes:
        cause = min(failure.causes, key=lambda known: failure.causes[known][0])  # what came first brought on the rest
    if cause == "dead_rank" and failure.strength == 2 and not failure.ranks.get("dead_rank"):
        cause = None  # a peer closed its connection because it raised the exception that is already known
    data = dict(failure.data)
    rank = failure.rank
    torchrun_rank = re.match(r"\d{1,6}", str(data.get("rank", "")))
    if torchrun_rank is not None:
        rank = int(torchrun_rank[0])
    if cause == "hang":
        blamed = _blamed(failure)
        data["waiting_ranks"] = sorted(failure.waiting)[:64]
    else:
        blamed = sorted(failure.ranks.get(cause or "", ())) or ([rank] if rank is not None else [])
    if blamed:
        data["ranks"] = blamed[:64]
        rank = blamed[0]
    if cause is not None:
        data["cause"] = cause
        line, text = failure.causes[cause]
        marks.append(Mark(line=line, kind=cause, message=text, rank=rank or 0, data=dict(data)))
    marks.append(
        Mark(line=failure.line, kind=EventKind.EXCEPTION, message=failure.message, rank=rank or 0, data=dict(data))
    )
    return marks


def _blamed(failure: _Failure) -> list[int]:
    """The ranks that the others wait for: named, or behind in their queue, or the one that never complained."""
    named = failure.ranks.get("hang")
    if named:
        return sorted(named)
    waiting = failure.waiting
    put = {rank: last for rank, last in waiting.items() if last >= 0}
    if len(set(put.values())) > 1:
        least = min(put.values())
        return sorted(rank for rank, last in put.items() if last == least)
    silent = sorted(set(range(max(waiting, default=-1) + 1)) - waiting.keys())
    return silent if len(waiting) >= 3 and len(silent) == 1 else []
