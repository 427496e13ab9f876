"""Loss-spike and run-health diagnosis for PyTorch training.

The five rooms: `runhealth.instrument` measures a training loop, `runhealth.storage` keeps what it measured,
`runhealth.diagnose` says what went wrong and why, `runhealth.trainer` is a distributed trainer that obeys the
resulting plan, `runhealth.dashboard` shows all of it. Importing this package imports none of them.
"""

__version__ = "0.1.0"
