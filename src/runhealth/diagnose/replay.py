"""Counterfactual replay: the stretch of an incident is trained once more, first as it was, then with one thing changed,
until the cause is proven or three replays are made.

Nothing here trains: `Trainer` does, behind `port`. The run is only read.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from runhealth.diagnose import experiments, replays
from runhealth.diagnose.findings import Finding, Report
from runhealth.diagnose.lastgood import choose as choose_checkpoint
from runhealth.diagnose.plans import ReplayOrder
from runhealth.diagnose.replay_measure import (
    BEFORE_STEPS,
    CHANNELS,
    LOOK_STEPS,
    Match,
    Steps,
    Target,
    compare,
    last_step,
    read_steps,
    target_of,
)
from runhealth.diagnose.replays import VANISHED_BELOW, Replayed, Tried
from runhealth.storage.errors import PlanError, ReplayError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import CheckpointRecord, CheckpointStatus

MOST_SHARDS = 8
AGAIN = "as_is_again"


class Trainer(Protocol):
    """Plays a stretch again; returns the folder of its telemetry. Raises ReplayError."""

    def play(self, order: ReplayOrder) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a replay begins. `resumes`: the attempt itself began here. `before`: an older checkpoint, or none."""

    step: int
    path: str
    resumes: bool
    before: str


def pick(report: Report, incident: str | None) -> Finding:
    """The finding to replay: the one asked for, else the worst one that can be.

    Raises:
        ReplayError: there is none, or it is of a kind that a replay cannot show.
    """
    name = report.source.name
    able = [f for f in report.findings if f.kind in CHANNELS and f.suspects]
    known = ", ".join(f.id for f in able) or "none"
    if incident is None:
        if not able:
            raise ReplayError(f"{name}: nothing was found that a replay could answer")
        return able[0]
    for finding in report.findings:
        if incident not in (finding.id, finding.details.get("incident")):
            continue
        if finding.kind not in CHANNELS:
            kinds = ", ".join(kind.replace("_", " ") for kind in CHANNELS)
            raise ReplayError(
                f"{name}: {incident} is a {finding.kind.replace('_', ' ')}, and a replay answers what loss, gradients"
                f" and updates do ({kinds}); of this run: {known}"
            )
        return finding
    raise ReplayError(f"{name}: no incident {incident!r} that a replay could answer; known are: {known}")


def check_run(reader: RunReader) -> Mapping[str, object]:
    """The run's config. Raises ReplayError for what cannot be trained again here."""
    info = reader.info
    if info.bundled:
        raise ReplayError(
            f"run {info.name!r} is shipped with the package without its checkpoints: nothing to replay from"
        )
    if "://" in info.path:
        raise ReplayError(f"{info.path}: expected a run on this disk, met a URL; copy the run here to replay it")
    missing = [key for key in ("world", "steps", "model", "data", "optim") if key not in info.config]
    if missing:
        raise ReplayError(
            f"run {info.name!r} has no config of the trainer ({', '.join(missing)} missing): an imported log, or a loop"
            " of your own, cannot be trained again from here"
        )
    parallel = info.config.get("parallel", {})
    sizes = {"world": info.config["world"], **(parallel if isinstance(parallel, Mapping) else {})}
    counts = {name: sizes.get(name, 1) for name in ("world", "tp", "pp")}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ReplayError(f"{info.path}/run.json: expected {name} in the config as a number over 0, met {count!r}")
    return info.config


def start_of(reader: RunReader, report: Report, finding: Finding) -> Start:
    """The last good checkpoint of the attempt in which it happened, or the one that this attempt began with: then what
    happened at the load is part of what is replayed.

    Raises:
        ReplayError: no checkpoint before the onset.
    """
    rows = reader.sql("SELECT * FROM checkpoints").iter_rows(named=True)
    records = [
        CheckpointRecord(
            attempt=row["attempt"],
            step=row["step"],
            rank=row["rank"],
            path=row["path"],
            status=CheckpointStatus(row["status"]),
            ts_ns=row["ts_ns"] or 0,
            reason=row["reason"] or "",
        )
        for row in rows
    ]
    firsts = {a.attempt: a.first_step for a in report.attempts}
    first = firsts.get(finding.attempt, 0)
    loaded = [r for r in records if r.attempt == finding.attempt and r.status is CheckpointStatus.LOADED]
    why = "no checkpoint was recorded"
    found: tuple[int, str] | None = None
    try:
        good = choose_checkpoint(
            records, attempt=finding.attempt, onset_step=finding.onset_step, attempt_first_steps=firsts
        )
        found = (good.step, good.path)
    except PlanError as error:
        why = str(error)
    resumes = False
    if loaded and (found is None or found[0] <= first):
        found, resumes = (loaded[0].step, loaded[0].path), True
    if found is None or found[0] < first or found[0] > finding.onset_step:
        raise ReplayError(
            f"{finding.id}: no checkpoint to replay from before the onset at step {finding.onset_step:,}: {why}"
        )
    return Start(step=found[0], path=found[1], resumes=resumes, before=_before(records, finding, firsts, found[0]))


def _before(records: list[CheckpointRecord], finding: Finding, firsts: Mapping[int, int], step: int) -> str:
    older = [r for r in records if r.step < step]
    try:
        good = choose_checkpoint(
            older, attempt=finding.attempt, onset_step=finding.onset_step, attempt_first_steps=firsts
        )
    except PlanError:
        return ""
    return good.path


class Inquiry:
    """The replays of one incident. Make it, then `run` it with a trainer.

    Raises (when made):
        ReplayError: it cannot be replayed; nothing has been written or started then.
    """

    def __init__(self, reader: RunReader, report: Report, finding: Finding, say: Callable[[str], None]) -> None:
        self._reader, self._finding, self._say = reader, finding, say
        self._config = check_run(reader)
        self.incident = str(finding.details.get("incident", finding.id))
        self._start = start_of(reader, report, finding)
        onset = finding.onset_step
        first = min(self._start.step, onset - BEFORE_STEPS)
        self._record = read_steps(reader, first, onset + LOOK_STEPS, finding.attempt)
        self._target: Target = target_of(finding, self._record)
        recorded = max(step for step in self._record)
        self._stop = last_step(self._target, onset, recorded) + 1
        self._shards = self._suspect_shards()
        self._played: dict[str, Steps] = {}

    @property
    def possible(self) -> list[str]:
        """Changes that this run's config and this incident allow for."""
        model, parallel = self._section("model"), self._section("parallel")
        sizes = [int(str(parallel.get(name, 1))) for name in ("tp", "pp")]
        lanes = int(str(self._config["world"])) // (sizes[0] * sizes[1])
        whole = sizes == [1, 1] and parallel.get("kind", "ddp") in ("ddp", "zero1")
        allowed = {
            "mask_shards": bool(self._shards),
            "swap_lanes": not self._shards and lanes > 1 and self._target.odd_rank is not None,
            "scheduled_lr": True,
            "fp32": model.get("precision") in ("bf16", "fp16", "fp8"),
            "restore_optimizer": self._start.resumes,
            "configured_optimizer": not self._start.resumes,
            "clip_updates": True,
            "cap_logits": whole,
            "half_clip": True,
        }
        return [change for change, able in allowed.items() if able]

    def run(self, trainer: Trainer, now_ns: Callable[[], int] = time.time_ns) -> Replayed:
        """At most three replays. Raises ReplayError when one fails."""
        finding, start, target = self._finding, self._start, self._target
        self._say(
            f"replaying {self.incident} from checkpoint {start.step:,} to step {self._stop - 1:,}, at most"
            f" {experiments.MOST_REPLAYS} times; scored is {target.channel} in steps"
            f" {', '.join(f'{step:,}' for step in target.steps)}"
        )
        tried = [self._try(trainer, "as_is", "as_is")]
        match = compare(self._record, self._played["as_is"], finding.onset_step)
        deterministic = match.equal_steps >= experiments.LEAST_EQUAL_STEPS
        self._say(f"  {experiments.fidelity(self._result(tried, match, deterministic, 0))}")
        if tried[0].vanished and not deterministic:
            tried.append(self._try(trainer, "as_is", AGAIN))
            again = compare(self._played["as_is"], self._played[AGAIN], finding.onset_step)
            deterministic = again.parted_step is None
            self._say("  the two replays are " + ("bit-equal" if deterministic else "not alike: nothing is proven"))
        result = self._result(tried, match, deterministic, now_ns())
        while not tried[0].vanished and len(tried) < experiments.MOST_REPLAYS:
            beliefs = experiments.probabilities(finding, result)
            change = experiments.choose(beliefs, self.possible, {one.change for one in tried})
            if change is None:
                break
            tried.append(self._try(trainer, change, change))
            result = self._result(tried, match, deterministic, now_ns())
        return result

    def _try(self, trainer: Trainer, change: str, name: str) -> Tried:
        start = self._start
        shards = self._shards if change == "mask_shards" else ()
        order = ReplayOrder(
            incident=self.incident,
            name=name,
            attempt=self._finding.attempt,
            change=change,
            checkpoint=start.path,
            stop_step=self._stop,
            resumes=start.resumes,
            shards=shards,
            before=start.before if change == "restore_optimizer" else "",
        )
        began = time.monotonic()
        path = trainer.play(order)
        with RunReader.open(path) as reader:
            played = read_steps(reader, start.step, self._stop - 1)
        self._played[name] = played
        score = self._target.score_of(played)
        ratio = score / self._target.score
        vanished = ratio < VANISHED_BELOW
        if change == "swap_lanes":
            lanes = len(self._target.rank_baselines)
            vanished = self._target.moved(played, lanes)
        one = Tried(
            change=change,
            path=f"{replays.FOLDER}/{self.incident}/{name}",
            steps=len(played),
            score=score,
            ratio=ratio,
            vanished=vanished,
            shards=shards,
        )
        said = experiments.claim(self._result([one], _NO_MATCH, False, 0), one)
        self._say(f"  {said}; {len(played)} steps in {time.monotonic() - began:.0f} s")
        return one

    def _result(self, tried: list[Tried], match: Match, deterministic: bool, made_ns: int) -> Replayed:
        finding, target = self._finding, self._target
        leader = next((s for s in finding.suspects if s.suspect == finding.verdict), None)
        return Replayed(
            run=self._reader.info.name,
            incident=self.incident,
            attempt=finding.attempt,
            onset_step=finding.onset_step,
            channel=target.channel,
            unit=target.unit,
            baseline=target.baseline,
            score=target.score,
            first_step=target.steps[0],
            last_step=target.steps[-1],
            checkpoint_step=self._start.step,
            checkpoint_path=self._start.path,
            deterministic=deterministic,
            equal_steps=match.equal_steps,
            parted_step=match.parted_step,
            parted_ranks=match.parted_ranks,
            band=match.band,
            tried=tuple(tried),
            verdict_before=finding.verdict,
            probability_before=leader.probability if leader is not None else 0.0,
            made_ns=made_ns,
        )

    def _suspect_shards(self) -> tuple[str, ...]:
        """The shards that the finding names, else those that the odd rank read where it happened."""
        details = self._finding.details
        named = details.get("shards") or ([details["shard"]] if details.get("shard") else [])
        if isinstance(named, list) and named:
            return tuple(str(shard) for shard in named[:MOST_SHARDS])
        rank = self._target.odd_rank
        if rank is None:
            return ()
        rows = self._reader.sql(
            "SELECT DISTINCT shard FROM batches WHERE attempt = ? AND rank = ? AND step BETWEEN ? AND ? ORDER BY shard",
            (self._finding.attempt, rank, self._target.steps[0], self._target.steps[-1]),
        )
        return tuple(str(shard) for (shard,) in rows.iter_rows() if shard)[:MOST_SHARDS]

    def _section(self, name: str) -> Mapping[str, object]:
        found = self._config.get(name)
        return found if isinstance(found, Mapping) else {}


_NO_MATCH = Match(equal_steps=0, parted_step=None, parted_ranks=(), band=0.0)
