# Sourced by the client scripts, each of which runs one client once:
#
#   BASE_URL=http://127.0.0.1:8000 MODEL=any API_KEY=key WORKDIR=dir RUN_HOME=dir ./codex.sh "PROMPT"
#
# BASE_URL is the server's root, without /v1. WORKDIR is where the client works, RUN_HOME an empty folder that is its
# HOME. Also read: CONTEXT (tokens the client is told), CLIENTS_DIR (where clients are installed), PYTHON.
# The exit status is the client's; 77 when the machine lacks what the client needs, with the reason as the last line.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/versions.sh"
: "${BASE_URL:?}" "${MODEL:?}" "${API_KEY:?}" "${WORKDIR:?}" "${RUN_HOME:?}"
PROMPT=${1:?usage: $0 PROMPT}
CONTEXT=${CONTEXT:-200000}
CLIENTS_DIR=${CLIENTS_DIR:-$HOME/.cache/ds4-clients}
PYTHON=${PYTHON:-python3}

skip() {
  echo "$1" >&2
  exit 77
}

npm_has() { # FOLDER PACKAGE@VERSION
  local manifest="$CLIENTS_DIR/$1/node_modules/${2%@*}/package.json"
  [ -f "$manifest" ] && [ "$(node -p 'require(process.argv[1]).version' "$manifest")" = "${2##*@}" ]
}

need_npm() { # FOLDER PACKAGE@VERSION...
  local folder=$1 package missing=
  shift
  command -v node >/dev/null && command -v npm >/dev/null || skip "node and npm are not installed"
  for package in "$@"; do npm_has "$folder" "$package" || missing=1; done
  [ -n "$missing" ] || return 0
  mkdir -p "$CLIENTS_DIR/$folder"
  [ -f "$CLIENTS_DIR/$folder/package.json" ] || echo '{"private": true}' >"$CLIENTS_DIR/$folder/package.json"
  npm install --prefix "$CLIENTS_DIR/$folder" --no-audit --no-fund --save-exact --loglevel=error "$@" >&2
}

need_node22() {
  command -v node >/dev/null && command -v npm >/dev/null || skip "node and npm are not installed"
  [ "$(node -p 'process.versions.node.split(".")[0]')" -lt 22 ] || return 0
  need_npm node22 "$NODE"
  PATH="$CLIENTS_DIR/node22/node_modules/.bin:$PATH"
}

need_pip() { # FOLDER PACKAGE==VERSION...
  local folder=$CLIENTS_DIR/$1
  shift
  [ -x "$folder/venv/bin/python" ] || "$PYTHON" -m venv "$folder/venv" || skip "$PYTHON makes no virtual environments"
  "$folder/venv/bin/python" - "$@" <<'PY' || "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@" >&2
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    missing = [pin for pin in sys.argv[1:] if version(pin.split("==")[0]) != pin.split("==")[1]]
except PackageNotFoundError as error:
    missing = [error.name]
sys.exit(bool(missing))
PY
}

# VARIABLE=VALUE... COMMAND...: with nothing else of this environment, no input, and in the client's own folders.
run_clean() {
  cd "$WORKDIR"
  exec env -i PATH="$PATH" HOME="$RUN_HOME" LANG=C.UTF-8 TERM=dumb NO_COLOR=1 NO_PROXY=127.0.0.1,localhost "$@" </dev/null
}
