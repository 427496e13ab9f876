"""Suspects, one file each; found by folder scan and the entry-point group `runhealth.suspects`."""
