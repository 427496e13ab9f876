"""The planner: what sits in GPU memory, what moves over which link, and which layout follows. Importable without torch.

shape     a model as numbers: layers, width, parameters
cluster   GPUs, their memory and links
layout    how a model is laid over a cluster
memory    bytes a GPU holds: model state and activations
traffic   bytes a step moves, and over which link
estimate  one layout's step time, term by term
walk      from one GPU upwards: what does not fit, what is the bottleneck, what helps
saving    checkpoint size, cadence, effective training time
render    the answer as text, JSON and Markdown
"""
