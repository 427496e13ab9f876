"""python -m bench.faults run | report"""

import sys

from bench.faults.cli import main

sys.exit(main())
