"""Compressed logs, other encodings, and files that are no logs at all."""

import bz2
import codecs
import gzip
import lzma
import os
import random

import pytest

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log

TEXT = "".join(f"step {n} | loss {3 - n / 100:.2f} | lr 1e-4\n" for n in range(50))
JSONL = "".join(f'{{"step": {n}, "loss": {3 - n / 100:.2f}}}\n' for n in range(50))
LOSSES = [(n, round(3 - n / 100, 2)) for n in range(50)]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("content", [TEXT, JSONL])
def test_compressed_logs_are_unpacked(read, pack, content):
    assert read(pack(content.encode())).series("loss") == LOSSES


def test_a_compressed_log_that_breaks_off_is_read_up_to_there(read):
    text = "".join(f"step {n} | loss {random.Random(n).random():.6f} | lr 1e-4\n" for n in range(5000))
    got = read(gzip.compress(text.encode())[:20_000])
    assert len(got.steps) > 100
    assert any("breaks off" in note for note in got.info.notes)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "utf-16-be-bom"])
@pytest.mark.parametrize("content", [TEXT, JSONL, TEXT.replace("\n", "\r\n")])
def test_encodings(read, encoding, content):
    if encoding == "utf-16-be-bom":
        data = codecs.BOM_UTF16_BE + content.encode("utf-16-be")
    else:
        data = content.encode(encoding)
    assert read(data).series("loss") == LOSSES


def test_nul_bytes_are_left_out_and_noted(read):
    got = read(TEXT.encode()[:1000] + bytes(64) + TEXT.encode()[1000:])
    assert len(got.series("loss")) >= 49
    assert any("NUL" in note for note in got.info.notes)


@pytest.mark.parametrize(
    ("data", "said"), [(b"PK\x03\x04rest", "zip"), (b"\x28\xb5\x2f\xfdrest", "zstd"), (b"PAR1rest", "Parquet")]
)
def test_containers_are_refused_with_what_to_do(tmp_path, data, said):
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(NoUsableDataError, match=said):
        open_log(str(path))


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_are_refused(tmp_path, seed):
    path = tmp_path / "log"
    path.write_bytes(random.Random(seed).randbytes(50_000) if seed else os.urandom(50_000))
    with pytest.raises(NoUsableDataError):
        list(open_log(str(path)).records())


def test_a_line_of_ten_megabytes_is_rejected_and_the_rest_is_read(read):
    got = read(TEXT + "x" * 10_000_000 + "\n" + TEXT.replace("step ", "step 1"))
    assert got.info.rows_rejected == 1
    assert got.series("loss")[-1][0] == 149
