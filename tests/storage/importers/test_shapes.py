"""Lines read by an expression give what the rules of their format give."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runhealth.storage.importers.keyvalue import _places as text_places
from runhealth.storage.importers.megatron import _places as megatron_places
from runhealth.storage.importers.nanogpt import _iter_places, _llmc_places
from runhealth.storage.importers.shapes import FieldReader
from runhealth.storage.importers.text import field_places
from runhealth.storage.importers.values import to_number

RULES = {
    "text": text_places,
    "megatron": megatron_places,
    "llmc": _llmc_places,
    "iter": _iter_places,
    "fields": field_places,
}
_PIECE = st.sampled_from(
    ["loss", "lr", "top5", "norm ", ": ", "=", " ", "  ", " | ", ", ", "(", ")", "[", "]", "ms", "%", "s", "GiB", "/",
     "z", "1", "2.5", "-3", "1e-4", "12", "nan", "inf", "1,234", "0.001", "tok/s", "a b", "\t", "-", "e"]
)  # fmt: skip
LINES = st.lists(_PIECE, min_size=1, max_size=16).map("".join)


def by_rules(places, text):
    found = {}
    for name, start, end in places(text):
        number = to_number(text[start:end])
        if number is not None:
            found.setdefault(name, number)
    return found


@pytest.mark.parametrize("rules", sorted(RULES))
@settings(max_examples=150, deadline=None)
@given(line=LINES, digits=st.lists(st.sampled_from("0123456789"), min_size=40, max_size=40))
def test_other_numbers_in_the_same_line_read_alike(rules, line, digits):
    places = RULES[rules]
    reader = FieldReader(places)
    reader(line)
    source = iter(digits)
    other = re.sub(r"(?<![A-Za-z_\d])\d", lambda _: next(source, "7"), line)
    for text in (line, other, line):
        assert repr(sorted(reader(text).items())) == repr(sorted(by_rules(places, text).items()))


def test_a_wider_gap_is_the_same_shape():
    reader = FieldReader(field_places)
    assert reader(" loss:  9.5  mem: 5.0GiB(5%)") == {"loss": 9.5, "mem_GiB": 5.0}
    reader._places = None  # what follows is read by the expression alone
    assert reader(" loss:   0.25  mem: 15.5GiB(55%)") == {"loss": 0.25, "mem_GiB": 15.5}
