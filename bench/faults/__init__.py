"""The fault bench: small training runs with labelled faults, and what the diagnosis makes of their telemetry."""
