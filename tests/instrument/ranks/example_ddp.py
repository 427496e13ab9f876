"""Runs examples/attach_ddp.py as torchrun would."""
# ruff: noqa: F821  RANK, WORLD_SIZE, FOLDER, EXAMPLE and PORT are set by the run_ranks fixture

import os
import runpy
import sys

os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
sys.argv = [EXAMPLE, FOLDER]
runpy.run_path(EXAMPLE, run_name="__main__")
