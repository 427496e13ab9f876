"""The parallel layouts, one file each, applied in this order: stages, tensor parallelism, recomputation, sharding.

Each changes a model in place and knows nothing of the others, beyond that order. `engine.py` puts them together.
"""
