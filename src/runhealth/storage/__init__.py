"""Records, signal catalogue, rank logs, the published database, and importers of foreign logs."""
