"""The diagnosis: detectors, incidents, suspects, verdicts and plans. Never imports torch."""
