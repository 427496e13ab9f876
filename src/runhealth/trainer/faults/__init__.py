"""Faults that can be injected on purpose, one file each, found by a scan of this folder.

A fault's file holds one constant, `FAULT`: a class derived from `runhealth.trainer.fault.Fault`. Its label says what
really happened, so that the bench and the tests judge every diagnosis against the same truth.
"""
