"""Pure functions from data to what is drawn: chart specifications and escaped HTML. Nothing here imports Streamlit."""
