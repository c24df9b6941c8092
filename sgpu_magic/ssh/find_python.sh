# Runs on the other machine as the standard input of /bin/sh, under any login shell. Finds a Python of version 3.11 or
# newer with torch, and continues in it. All lines that are meant for the other side begin with $mark.
#
# Before this text, the other side sets:
#   mark      a random word
#   ready     the name, below the home directory, of a file that names the Python that an earlier login has prepared
#   wanted    the Python that the user has chosen, or nothing
#   prologue  commands of the user, such as `module load`
#   check     a Python program that fails unless this Python can be used, and prints what it is
#   prepare   the Python program that continues
#   module    the module of sgpu-magic that is run at the end
#   order     its arguments after the mark
#   prepares  `always`, `again` if an earlier login has prepared something, or `never`
#
# The shell reads this text in blocks, and may read beyond a command: it is one function, so that all of it has been
# read when the first command reads the same input.

sgpu_say() { printf '\n%s %s\n' "$mark" "$*"; }

sgpu_try() {
    sgpu_path=$(command -v "$1" 2>/dev/null) || return 1
    [ -x "$sgpu_path" ] || return 1
    if sgpu_found=$("$sgpu_path" -c "$check" 2>&1 </dev/null); then
        return 0
    fi
    sgpu_seen="$sgpu_seen$sgpu_path $(printf '%s' "$sgpu_found" | tail -n 1)
"
    return 1
}

sgpu_main() {
    sgpu_say shell "$(uname -n 2>/dev/null)"
    [ -n "$HOME" ] || HOME=~
    # Python looks for modules in the working directory first
    cd / || return
    eval "$prologue" </dev/null >&2 || true
    if [ -r "$HOME/$ready" ]; then
        IFS= read -r sgpu_python <"$HOME/$ready"
        if [ -x "$sgpu_python" ]; then
            exec "$sgpu_python" -P -m "$module" "$mark" $order
        fi
    fi
    if [ "$prepares" = never ] || { [ "$prepares" = again ] && ! [ -d "$HOME/${ready%/*}" ]; }; then
        sgpu_say failed idle
        return
    fi
    sgpu_say step "looking for a Python with torch"
    sgpu_seen=
    if [ -n "$wanted" ]; then
        case $wanted in '~/'*) wanted=$HOME/${wanted#??} ;; esac
        set -- "$wanted"
    else
        set -- python3 "${VIRTUAL_ENV:-/nonexistent}/bin/python" "${CONDA_PREFIX:-/nonexistent}/bin/python" \
            python3.14 python3.13 python3.12 python3.11 "$HOME/.venv/bin/python" \
            "$HOME/miniconda3/bin/python" "$HOME/miniforge3/bin/python" "$HOME/anaconda3/bin/python" \
            /opt/conda/bin/python /usr/local/bin/python3 uv
    fi
    for sgpu_one in "$@"; do
        [ "$sgpu_one" != uv ] || sgpu_one=$(uv python find 2>/dev/null </dev/null) || continue
        if sgpu_try "$sgpu_one"; then
            sgpu_say step "found $sgpu_path: $sgpu_found"
            exec "$sgpu_path" -c "$prepare" "$mark" "$HOME/$ready" "$module" $order
        fi
    done
    [ -z "$wanted" ] || [ -n "$sgpu_seen" ] || sgpu_say seen "$wanted is not there, or can't be executed"
    printf '%s' "$sgpu_seen" | while IFS= read -r sgpu_line; do sgpu_say seen "$sgpu_line"; done
    sgpu_say failed no-python
}

sgpu_main
