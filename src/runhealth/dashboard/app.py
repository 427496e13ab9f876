"""The script that Streamlit runs. `runhealth.dashboard.launch` starts it."""

import streamlit as st

from runhealth.dashboard.pages import run

st.set_page_config(page_title="runhealth", page_icon="🩺", layout="wide", initial_sidebar_state="collapsed")
st.navigation([st.Page(run.page, title="Run", url_path="run", default=True)], position="hidden").run()
