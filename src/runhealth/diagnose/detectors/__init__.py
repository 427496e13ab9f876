"""Detectors, one file each; found by folder scan (`diagnose.detector`)."""
