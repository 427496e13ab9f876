"""From other people's names to the signal catalogue, with units.

Names are compared in lower case with blanks and dashes as underscores and dots as slashes. A unit at the end
(`_ms`, `(ms)`, `_s`, `_gib`) is taken off and applied. When a file has several names for one signal, the first in the
table that the file uses owns the signal and the others are kept under their own names.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from runhealth.storage.importers.base import EVALUATION, EXTRA, TRAINING, Tally
from runhealth.storage.importers.recipes import Conversion
from runhealth.storage.records import Scalar
from runhealth.storage.signals import STEP_SIGNALS, Dtype

SIGNAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "loss": (
        "loss",
        "train_loss_step",
        "train_loss",
        "train/loss",
        "training_loss",
        "training/loss",
        "lm_loss",
        "total_loss",
        "loss/train",
        "loss_train",
        "loss/train/total",
        "reduced_train_loss",
        "train/crossentropyloss",
        "step_loss",
        "train_step_loss",
        "loss/total",
        "train/loss_step",
        "train/ce",
        "train/ce_loss",
        "train_ce",
        "ce_loss",
        "cross_entropy",
        "train/lm_loss",
        "train/total_loss",
        "train/cross_entropy",
        "nll_loss",
        "trl",
        "loss_metrics/global_avg_loss",
        "metrics/train_loss",
        "actor/pg_loss",
    ),
    "eval_loss": (
        "eval_loss",
        "val_loss",
        "valid_loss",
        "validation_loss",
        "eval/loss",
        "val/loss",
        "valid/loss",
        "validation/loss",
        "loss/val",
        "loss/validation",
        "loss/eval",
        "tel",
        "dev_loss",
        "test_loss",
        "test/loss",
        "validation_metrics/loss",
    ),
    "grad_norm": (
        "grad_norm",
        "train/grad_norm",
        "gradient_norm",
        "gnorm",
        "total_grad_norm",
        "global_grad_norm",
        "train/global_grad_norm",
        "grad_norm/total",
        "total_norm",
        "norm",
        "l2_grad_norm",
        "grad/norm",
        "optim/total_grad_norm",
        "gradients/global_norm",
        "l2_norm/grad/global",
        "actor/grad_norm",
    ),
    "grad_norm_rank": ("grad_norm_rank", "local_grad_norm"),
    "clip_threshold": ("clip_threshold", "grad_clip", "clip_grad", "max_grad_norm", "gradient_clipping"),
    "clip_coef": ("clip_coef", "grad_clip_coef"),
    "lr": (
        "lr",
        "learning_rate",
        "train/lr",
        "train/learning_rate",
        "lr/pg0",
        "lr/group_0",
        "lr/group0",
        "optim/learning_rate_group0",
        "learning_rate_group0",
        "lr_0",
        "actor/lr",
    ),
    "update_ratio": ("update_ratio",),
    "weight_norm": ("weight_norm", "param_norm", "params_norm", "parameter_norm"),
    "loss_scale": ("loss_scale", "grad_scale", "loss_scaler", "scaler_scale", "amp_scale", "train/loss_scale"),
    "step_skipped": (
        "step_skipped",
        "skipped",
        "skipped_step",
        "number_of_skipped_iterations",
        "skipped_iterations",
        "optim/step_skipped",
    ),
    "nan_steps": ("nan_steps", "number_of_nan_iterations", "nan_iterations"),
    "overflow_count": ("overflow_count",),
    "underflow_count": ("underflow_count",),
    "nonfinite_count": ("nonfinite_count", "nan_count"),
    "amax_ratio": ("amax_ratio",),
    "logit_max": ("logit_max", "max_logit", "max_attention_logit", "max_attn_logit"),
    "activation_max": ("activation_max",),
    "tokens": ("tokens", "batch_tokens", "num_tokens"),
    "consumed_samples": (
        "consumed_samples",
        "consumed_train_samples",
        "samples_seen",
        "data_index",
        "sample_index",
        "data_position",
        "num_samples_seen",
        "train/consumed_samples",
    ),
    "epoch": ("epoch", "train/epoch", "epochs"),
    "dropped": ("dropped",),
}

# Names that are times only with a unit behind them, and those that are times by themselves (then in seconds).
_TIMES_WITH_UNIT: Mapping[str, tuple[str, ...]] = {
    "t_step_s": ("step", "iter", "iteration", "dt", "time", "train_step_timing_in"),
    "t_data_s": ("data", "dataloader", "data_loading"),
    "t_forward_s": ("compute", "forward", "fwd", "forward_compute"),
    "t_backward_s": ("backward", "bwd", "backward_compute"),
    "t_wait_s": ("wait", "collective_wait", "comm", "comm_wait", "allreduce", "all_reduce", "barrier"),
    "t_optimizer_s": ("optimizer", "opt", "optim"),
    "t_checkpoint_s": ("checkpoint", "save_checkpoint", "ckpt"),
    "elapsed_s": ("elapsed", "runtime", "total", "wall"),
}
_TIMES: Mapping[str, tuple[str, ...]] = {
    "t_step_s": (
        "step_time",
        "t_step",
        "iter_time",
        "iteration_time",
        "batch_time",
        "time_per_step",
        "time_per_iter",
        "sec_per_step",
        "seconds_per_step",
        "sec_per_iter",
        "elapsed_time_per_iteration",
        "time_per_iteration",
        "time/step",
        "perf/step_time",
        "timing/step",
        "timing_s/step",
        "time_metrics/end_to_end",
    ),
    "t_data_s": (
        "data_time",
        "t_data",
        "data_wait",
        "data_wait_time",
        "dataloader_time",
        "data_loading_time",
        "batch_generator",
        "time_metrics/data_loading",
    ),
    "t_forward_s": ("forward_time", "t_forward", "fwd_time", "compute_time"),
    "t_backward_s": ("backward_time", "t_backward", "bwd_time"),
    "t_wait_s": ("t_wait", "wait_time", "comm_time", "collective_wait_time"),
    "t_optimizer_s": ("optimizer_time", "t_optimizer", "optim_time", "optimizer_step_time"),
    "t_checkpoint_s": ("checkpoint_time", "t_checkpoint", "save_time"),
    "elapsed_s": (
        "elapsed_time",
        "train_time",
        "total_time",
        "wall_clock",
        "wallclock",
        "wall_time_elapsed",
        "accumulated_submission_time",
        "_runtime",
        "time_elapsed",
    ),
}
_MEMORY: Mapping[str, tuple[str, ...]] = {
    "mem_allocated_bytes": (
        "mem_allocated",
        "memory_allocated",
        "allocated",
        "max_allocated",
        "max_mem",
        "memory",
        "mem",
        "peak_memory",
        "max_memory_allocated",
        "gpu_mem",
    ),
    "mem_reserved_bytes": ("mem_reserved", "memory_reserved", "reserved", "max_reserved", "memory/max_reserved"),
    "mem_rss_bytes": ("mem_rss", "rss", "host_memory"),
}
_UNIT = re.compile(
    r"(?P<base>.+?)(?:\s*\(\s*|[_/. ])(?P<unit>ns|us|ms|msec|s|sec|secs|seconds|bytes|kib|mib|gib|kb|mb|gb)\s*\)?\Z"
)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "msec": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_BYTES = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_RUNNING_MEAN = re.compile(r"(?:^|[_/])(?:step_)?(?:avg|average|mean|running|ema|smoothed)(?:[_/]|$)")
_MAX_NAME = 200
_MISTAKABLE = re.compile(r"step|loss|time|grad|iter")
_EVAL_LOSS = re.compile(r"(?:eval|val|valid|validation|dev)[/_](?:\w+[/_])?(?:loss|ce|nll|cross_entropy)\Z")
_EVALUATION = re.compile(r"(?:eval|val|valid|validation|dev|test|predict)[/_]|bbox/|segm/")
_LIGHTNING_LR = re.compile(r"lr-[A-Z]\w*(?:/pg1|/group0)?\Z")  # /group0: Composer
_PREFIX = re.compile(r"(?:train|training|trainer|metrics|perf|timing|optim)/")

FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    "step": (
        "step",
        "global_step",
        "iteration",
        "iter",
        "train/global_step",
        "trainer/global_step",
        "train_step",
        "training_step",
        "trainer/step",
        "train/step",
        "num_updates",
        "update",
        "current_steps",
        "current_step",
        "iter_num",
        "steps",
        "it",
        "_step",
    ),
    "rank": ("rank", "global_rank", "process_rank", "rank_id", "process_index"),
    "attempt": ("attempt", "restart_count", "attempt_id", "restart"),
    "ts": ("timestamp", "_timestamp", "ts", "datetime", "date_time", "created_at", "wall_time"),
}
_FIELD_OF = {name: (field, rank) for field, names in FIELD_NAMES.items() for rank, name in enumerate(names)}


def normalise(name: str) -> str:
    """Lower case, blanks and dashes as underscores, dots as slashes."""
    return name.strip().lower().replace(" ", "_").replace("-", "_").replace(".", "/")


def _flat(table: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, int]]:
    return {name: (signal, rank) for signal, names in table.items() for rank, name in enumerate(names)}


_SIGNAL_OF, _TIME_OF, _UNIT_TIME_OF, _MEMORY_OF = map(_flat, (SIGNAL_NAMES, _TIMES, _TIMES_WITH_UNIT, _MEMORY))


@lru_cache(maxsize=4096)
def field_of(name: str) -> tuple[str, int] | None:
    """Whether a name is a step, rank, attempt or time stamp, and its place in the table (lower is surer)."""
    return _FIELD_OF.get(normalise(name)) if len(name) <= _MAX_NAME else None


@lru_cache(maxsize=4096)
def target_of(name: str) -> tuple[str, float, int] | None:
    """(signal, factor to its unit, place in the table) of a foreign name, or None if it is not known."""
    if len(name) > _MAX_NAME:
        return None
    plain = normalise(name)
    if plain in STEP_SIGNALS and plain not in SIGNAL_NAMES:
        return plain, 1.0, 0
    if plain in _SIGNAL_OF:
        signal, place = _SIGNAL_OF[plain]
        return signal, 1.0, place
    if _RUNNING_MEAN.search(plain):
        return None
    if plain in _TIME_OF:
        signal, place = _TIME_OF[plain]
        return signal, 1.0, place
    if match := _UNIT.match(plain):
        base, unit = match["base"].rstrip("_"), match["unit"]
        known = _MEMORY_OF.get(base) if unit in _BYTES else _TIME_OF.get(base) or _UNIT_TIME_OF.get(base)
        if known is not None:
            factor = float(_BYTES[unit]) if unit in _BYTES else _SECONDS[unit]
            return known[0], factor, known[1] + 50
    if _EVAL_LOSS.match(plain):
        return "eval_loss", 1.0, 100
    if _LIGHTNING_LR.match(name.strip()):
        return "lr", 1.0, 100
    if " - " in name and not name.endswith(("__MIN", "__MAX")):  # "run - metric" of exported charts
        inner = target_of(name.rsplit(" - ", 1)[1])
        return (inner[0], inner[1], inner[2] + 400) if inner is not None else None
    if prefix := _PREFIX.match(plain):
        inner = target_of(plain[prefix.end() :])
        return (inner[0], inner[1], inner[2] + 200) if inner is not None else None
    return None


_Plan = tuple[tuple[str, ...], tuple[tuple[str, float, bool], ...], str]


class Names:
    """The mapping of one file: which of its names owns which signal. Bounded: at most `_MAX_NAMES` names are kept."""

    _MAX_NAMES = 5000
    _MAX_PLANS = 256

    def __init__(
        self, tally: Tally, mapping: Mapping[str, str] | None = None, table: Mapping[str, str] | None = None
    ) -> None:
        """`mapping` is the user's (signal to name), `table` a special format's (name to signal; an empty signal keeps
        the name as it is)."""
        self._tally = tally
        self._chosen = {foreign: signal for signal, foreign in (mapping or {}).items()}
        self._table = dict(table or {})
        self._owner: dict[str, str] = dict(mapping or {})
        self._known: dict[str, tuple[str, float, str, bool]] = {}
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self.unknown: dict[str, None] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Decide for names that appear together which of them own a signal."""
        ranked = sorted(
            ((self._target(name), name) for name in names if name not in self._known),
            key=lambda pair: pair[0][2] if pair[0] is not None else 0,
        )
        for target, name in ranked:
            if len(self._known) >= self._MAX_NAMES:
                self._tally.note(f"more than {self._MAX_NAMES} names: the rest were left out, '{name}' the first")
                return
            if target is not None and self._owner.setdefault(target[0], name) == name:
                self._known[name] = (target[0], target[1], self._series(target[0]), _is_whole(target[0]))
                continue
            if target is not None:
                owner = self._owner[target[0]]
                self._tally.note(f"'{name}' kept under its own name: '{owner}' is read as {target[0]}")
            else:
                self.unknown.setdefault(name, None)
                if _RUNNING_MEAN.search(normalise(name)) and _MISTAKABLE.search(normalise(name)):
                    self._tally.note(f"'{name}' is a running mean: it hides single steps and is read as no signal")
            out = f"{name}_as_logged" if name in STEP_SIGNALS else name
            self._known[name] = (out, 1.0, EVALUATION if _EVALUATION.match(normalise(name)) else EXTRA, False)

    def convert(self, fields: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], str]:
        """The values under their catalogue names and units, and the series that the row belongs to."""
        key = tuple(fields)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key)
        outs, changed, series = plan
        values = dict(zip(outs, fields.values(), strict=True))
        for out, factor, whole in changed:
            value = values[out]
            if factor != 1.0:
                value *= factor
            values[out] = int(value) if whole and isinstance(value, float) and abs(value) < 2**62 else value
        values.pop("", None)
        return values, series

    def conversion(self, fields: Iterable[str]) -> Conversion:
        """What `convert` does with rows of these names."""
        outs, changed, _ = self._plan(tuple(fields))
        return Conversion(outs=outs, changed=changed)

    def _plan(self, key: tuple[str, ...]) -> _Plan:
        """What to do with rows of these names, remembered for the next ones."""
        known = self._known
        if any(name not in known for name in key):
            self.learn(key)
        entries = [known.get(name, ("", 1.0, EXTRA, False)) for name in key]
        series = EXTRA
        for _, _, kind, _ in entries:
            if kind is TRAINING or (kind is EVALUATION and series is EXTRA):
                series = kind
        changed = tuple((out, factor, whole) for out, factor, _, whole in entries if out and (factor != 1.0 or whole))
        plan = tuple(out for out, *_ in entries), changed, series
        if len(self._plans) >= self._MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def owner(self, signal: str) -> str | None:
        """The file's name of a signal, if any."""
        return self._owner.get(signal)

    def finish(self) -> None:
        """Write the notes about unknown names."""
        names = list(self.unknown)
        if names:
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            self._tally.note(f"kept under their own names, not known to any detector: {shown}")
        for foreign, signal in self._chosen.items():
            if foreign not in self._known:
                self._tally.note(f"'{foreign}', which {signal} was to be read from, never occurred")

    def _target(self, name: str) -> tuple[str, float, int] | None:
        if name in self._chosen:
            found = target_of(name)
            signal = self._chosen[name]
            return signal, found[1] if found is not None and found[0] == signal else _factor(name, signal), -2
        if name in self._table:
            signal = self._table[name]
            return (signal, _factor(name, signal), -1) if signal else None
        return target_of(name)

    @staticmethod
    def _series(signal: str) -> str:
        if signal == "eval_loss":
            return EVALUATION
        return EXTRA if signal in ("epoch", "elapsed_s", "mem_rss_bytes") else TRAINING


def _factor(name: str, signal: str) -> float:
    """The unit that a chosen name states, as a factor to the signal's unit."""
    match = _UNIT.match(normalise(name))
    if match is None or signal not in STEP_SIGNALS:
        return 1.0
    factors = {"s": _SECONDS, "bytes": {unit: float(size) for unit, size in _BYTES.items()}}
    return factors.get(STEP_SIGNALS[signal].unit, {}).get(match["unit"], 1.0)


def _is_whole(signal: str) -> bool:
    return signal in STEP_SIGNALS and STEP_SIGNALS[signal].dtype in (Dtype.I64, Dtype.U64)
