# Sourced by the client scripts, each of which runs one client once:
#
#   BASE_URL=http://127.0.0.1:8000 MODEL=any API_KEY=key WORKDIR=dir RUN_HOME=dir ./codex.sh "PROMPT"
#
# BASE_URL is the server's root, without /v1. WORKDIR is where the client works, RUN_HOME an empty folder that is its
# HOME. Also read: TURN (tools; plain: a question for a small model; cancel), CONTEXT (tokens the client is told),
# OUTPUT (most tokens of an answer), CLIENTS_DIR (where clients are installed), PYTHON.
# The exit status is the client's; 77 when the machine lacks what the client needs, with the reason as the last line.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/versions.sh"
: "${BASE_URL:?}" "${MODEL:?}" "${API_KEY:?}" "${WORKDIR:?}" "${RUN_HOME:?}"
PROMPT=${1:?usage: $0 PROMPT}
TURN=${TURN:-tools}
CONTEXT=${CONTEXT:-200000}
OUTPUT=${OUTPUT:-4096}
CLIENTS_DIR=${CLIENTS_DIR:-$(cd "$HERE/../.." && pwd)/build/clients}
PYTHON=${PYTHON:-python3}

skip() {
  echo "$1" >&2
  exit 77
}

# LABEL COMMAND...: installs. Skips when the package index does not answer; any other failure is one.
install() {
  local label=$1 log status=0
  shift
  log=$(mktemp)
  "$@" >"$log" 2>&1 || status=$?
  cat "$log" >&2
  if [ "$status" -ne 0 ] && grep -qE "$UNREACHABLE" "$log"; then
    rm -f "$log"
    skip "$label cannot be installed: the package index does not answer"
  fi
  rm -f "$log"
  return "$status"
}
UNREACHABLE='ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|ERR_SOCKET_TIMEOUT'
UNREACHABLE+='|E50[234]|Failed to establish a new connection|Connection refused|Temporary failure in name resolution'
UNREACHABLE+='|ConnectTimeoutError|ReadTimeoutError|ProxyError|NewConnectionError'

need_npm() { # FOLDER PACKAGE@VERSION...
  local folder=$CLIENTS_DIR/$1
  shift
  command -v node >/dev/null && command -v npm >/dev/null || skip "node and npm are not installed"
  [ "$(cat "$folder/installed" 2>/dev/null)" != "$*" ] || return 0
  rm -rf "$folder"
  mkdir -p "$folder"
  echo '{"private": true}' >"$folder/package.json"
  install "$*" npm install --prefix "$folder" --no-audit --no-fund --save-exact --loglevel=error \
    --fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=120000 "$@"
  echo "$*" >"$folder/installed"
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
  [ "$(cat "$folder/installed" 2>/dev/null)" != "$*" ] || return 0
  rm -rf "$folder"
  "$PYTHON" -m venv "$folder/venv" || skip "$PYTHON makes no virtual environments"
  install "$*" "$folder/venv/bin/pip" install -q --disable-pip-version-check --retries 1 "$@"
  echo "$*" >"$folder/installed"
}

# VARIABLE=VALUE... COMMAND...: with nothing else of this environment, no input, and in the client's own folders.
run_clean() {
  cd "$WORKDIR"
  exec env -i PATH="$PATH" HOME="$RUN_HOME" LANG=C.UTF-8 TERM=dumb NO_COLOR=1 NO_PROXY=127.0.0.1,localhost "$@" </dev/null
}

# FOLDER SCRIPT PIN...: a script of Python SDKs, with the Python of SDK_PYTHON when it says which has them.
run_sdk() {
  local python=${SDK_PYTHON:-$CLIENTS_DIR/$1/venv/bin/python} folder=$1 script=$2
  shift 2
  [ -n "${SDK_PYTHON:-}" ] || need_pip "$folder" "$@"
  run_clean BASE_URL="$BASE_URL" MODEL="$MODEL" API_KEY="$API_KEY" TURN="$TURN" OUTPUT="$OUTPUT" COUNT="${COUNT:-}" PYTHONDONTWRITEBYTECODE=1 \
    "$python" "$HERE/$script" "$PROMPT"
}
