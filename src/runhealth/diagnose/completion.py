"""Completion for bash, zsh and fish. The shells only call back: what may come next is decided here, for all of them."""

import argparse

from runhealth.diagnose.parsers import PARSERS

CALLBACK = "--completion-candidates"
_SCRIPTS = {
    "bash": f"""\
_diagnose() {{
    local IFS=$'\\n'
    COMPREPLY=($(diagnose {CALLBACK} "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _diagnose diagnose
""",
    "zsh": f"""\
#compdef diagnose
_diagnose() {{
    local -a found
    found=(${{(f)"$(diagnose {CALLBACK} "${{(@)words[2,CURRENT]}}" 2>/dev/null)"}})
    if (( $#found )); then compadd -a found; else _files; fi
}}
compdef _diagnose diagnose
""",
    "fish": f"""\
complete -c diagnose -a '(diagnose {CALLBACK} (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""",
}


def script(shell: str) -> str:
    return _SCRIPTS[shell]


def candidates(words: list[str]) -> list[str]:
    """What may stand in place of the last of `words` (what is typed after `diagnose`); empty: let the shell offer
    files."""
    *before, typed = words or [""]
    if typed == "=" or (before and before[-1] == "="):  # bash hands over `--format=js` as three words
        *before, typed = [w for w in words if w != "="] + ([""] if typed == "=" else [])
    command, rest = _command(before)
    if command == "rollback":
        return _fitting(["plan", "apply"], typed)
    parser = PARSERS[command]()
    options = {option: action for action in parser._actions for option in action.option_strings}
    if rest and rest[-1] in options and options[rest[-1]].nargs != 0:
        return _fitting(_values(rest[-1], options[rest[-1]], rest), typed)
    if typed.startswith("-"):
        return _fitting(sorted(option for option in options if option.startswith("--")), typed)
    if command == "explain":
        return _fitting(_topics(), typed)
    if not before:
        found = _fitting(dict.fromkeys(name.split()[0] for name in PARSERS if name), typed)
        return found if typed else []  # an empty word is as well the start of a file's name
    return []


def _command(before: list[str]) -> tuple[str, list[str]]:
    if before[:1] == ["rollback"]:
        name = " ".join(before[:2])
        return (name, before[2:]) if name in PARSERS else ("rollback", [])
    return (before[0], before[1:]) if before and before[0] in PARSERS else ("", before)


def _values(option: str, action: argparse.Action, before: list[str]) -> list[str]:
    if action.choices:
        return list(action.choices)
    if option == "--run":
        return ["latest", *_runs(before)]
    if option == "--map":
        from runhealth.storage.signals import STEP_SIGNALS

        return [f"{name}=" for name in STEP_SIGNALS]
    return []


def _runs(before: list[str]) -> list[str]:
    from runhealth.storage.errors import RunhealthError
    from runhealth.storage.store import Store

    store = before[before.index("--store") + 1] if "--store" in before[:-1] else None
    try:
        return [run.name for run in Store(store).runs()]
    except (RunhealthError, OSError):
        return []


def _topics() -> list[str]:
    from runhealth.diagnose.codes import CODES
    from runhealth.diagnose.suspect import load_suspects

    return sorted({*CODES.values(), *CODES, *(suspect.name for suspect in load_suspects())})


def _fitting(words: object, typed: str) -> list[str]:
    assert isinstance(words, list | dict)
    return [word for word in words if word.startswith(typed) and word.isprintable()]
