"""Name tables of tools that write CSV or JSONL, and what makes them recognisable."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`needs`: columns that all have to be there. `names`: foreign name to signal; "" keeps a name as it is."""

    format: str
    needs: frozenset[str]
    names: Mapping[str, str] = field(default_factory=dict)
    without: str = ""


TABLES = (
    # https://detectron2.readthedocs.io/en/latest/modules/utils.html, EventStorage and JSONWriter; times in seconds
    Table(
        format="detectron2",
        needs=frozenset({"iteration", "total_loss"}),
        names=MappingProxyType({"total_loss": "loss", "time": "t_step_s", "data_time": "t_data_s"}),
    ),
    # https://github.com/mlcommons/algorithmic-efficiency, logger_utils.py: `loss` is the training step's own, the
    # others come from evaluations of whole data sets, that of the training set among them
    Table(
        format="algoperf",
        needs=frozenset({"global_step", "accumulated_submission_time"}),
        names=MappingProxyType({"loss": "loss", "train/loss": "", "test/loss": "", "train/ctc_loss": "", "score": ""}),
    ),
    Table(format="ultralytics", needs=frozenset({"epoch", "train/box_loss", "val/box_loss"}),
          names=MappingProxyType({"train/box_loss": "loss", "val/box_loss": "eval_loss", "lr/pg0": "lr"})),
    Table(format="lightning_csv", needs=frozenset({"step", "epoch"}), without="rank"),
)  # fmt: skip


def table_for(columns: Collection[str], *, csv: bool) -> Table | None:
    """The special table that a set of columns belongs to, if any."""
    for table in TABLES:
        if table.needs <= set(columns) and (csv or table.format != "lightning_csv"):
            if table.format == "lightning_csv" and not any("loss" in column for column in columns):
                continue
            return table
    return None
