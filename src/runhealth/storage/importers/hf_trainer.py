"""Hugging Face `trainer_state.json`: the list `log_history`, streamed object by object.

The last entry of a finished training holds `train_loss`, the mean over the whole training, beside `train_runtime`:
it is a summary, not the loss of its step. With `logging_nan_inf_filter` the Trainer prints 0.0 or a mean in place of
NaN; what is printed is kept as it is.
"""

from collections.abc import Iterator
from typing import BinaryIO

from runhealth.storage.importers.base import EXTRA, Item, ReadContext, Row
from runhealth.storage.importers.json_stream import iter_objects
from runhealth.storage.importers.names import Names
from runhealth.storage.importers.rows import RowBuilder

_SUMMARY = "train_runtime"


class _HFTrainer:
    name = "hf_trainer_state"

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return 0.0
        return 0.97 if b'"log_history"' in head else 0.0

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]:
        builder = RowBuilder(context, Names(context.tally, context.mapping, {"train_loss": ""}))
        for line, entry in iter_objects(stream, context.tally, "log_history"):
            row = builder.row(line, entry)
            if row is None:
                continue
            yield _summary(row) if _SUMMARY in entry else row
        builder.finish()


def _summary(row: Row) -> Row:
    row.series = EXTRA
    return row


IMPORTER = _HFTrainer()
