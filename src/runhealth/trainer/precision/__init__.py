"""Number formats of the trainer."""
