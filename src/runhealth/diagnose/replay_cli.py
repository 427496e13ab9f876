"""`diagnose replay`: prove the cause of an incident by training its stretch again."""

import argparse
import importlib.util
from dataclasses import replace

from runhealth.diagnose import replays
from runhealth.diagnose.findings import Finding, Report, Severity
from runhealth.diagnose.port import ReplayProcess
from runhealth.diagnose.replay import Inquiry, check_run, pick
from runhealth.diagnose.replay_words import sentence
from runhealth.diagnose.report.forms import render
from runhealth.diagnose.report.output import say, write_output
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import ReplayError
from runhealth.storage.reader import RunReader


def replay(args: argparse.Namespace) -> Report:
    """Replay, keep the result, print the finding as it stands then; returns the report that was printed.

    Raises:
        ReplayError: the run or incident cannot be replayed, another replay of it is under way, or one has failed.
    """
    with RunReader.open(args.run, args.store) as reader:
        check_run(reader)
        if importlib.util.find_spec("torch") is None:
            raise ReplayError("a replay trains, which needs torch: pip install 'runhealth[train]'")
        stored, _ = replays.read_all(reader.info.path)
        report = diagnose(reader, results=())  # what an earlier replay said is not said twice
        finding = pick(report, args.incident)
        inquiry = Inquiry(reader, report, finding, say)
        with replays.claim(reader.info.path, inquiry.incident):
            with ReplayProcess(reader.info.path) as trainer:
                result = inquiry.run(trainer)
            replays.write(reader.info.path, result)
        others = [one for one in stored if one.incident != result.incident]
        after = diagnose(reader, results=(*others, result))
    mine = tuple(f for f in after.findings if f.replay is not None and f.replay.incident == result.incident)
    shown = replace(after, findings=mine if args.format == "json" else tuple(map(_told, mine)))
    write_output(render([shown], args.format, several=False, to_file=args.output is not None), args.output)
    return shown


def _told(finding: Finding) -> Finding:
    """A minor finding is shown in two lines; what was replayed is what was asked for."""
    if finding.severity is not Severity.INFO or finding.replay is None:
        return finding
    return replace(finding, summary=sentence(finding.replay, finding))
