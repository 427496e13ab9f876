"""Streamlit pages, read-only."""
