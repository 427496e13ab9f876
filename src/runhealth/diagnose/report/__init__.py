"""Forms of the report: text, JSON, Markdown."""
